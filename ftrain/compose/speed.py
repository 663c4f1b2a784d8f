"""How fast a run is now, and when it will be done: measured at its present size, not at one it had before.

A step under another layout, or in another phase, takes another time, so what was measured is forgotten at each such seam; until
the first step behind it nothing is said. What is left is counted in tokens: later updates may have more of them.
"""

from __future__ import annotations

from ftrain.config import Config
from ftrain.course import Cursor, updates_left
from ftrain.phases import effective
from ftrain.units import format_count
from recovery.events import AttemptStarted, Event, PhaseBegan, steps_of


class Speed:
    """Seconds and tokens of recent steps, smoothed."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._tokens = 0
        self._sequences = 0
        self._phase = 0
        self._size: tuple[str, int] | None = None

    def begin(self, layout: str, phase: int) -> None:
        """An attempt of this size begins: what was measured of another says nothing about it."""
        if self._size not in (None, (layout, phase)):
            self.step_s = 0.0
        self._size = layout, phase

    def add(self, event: Event) -> None:
        """Take in the steps an event reports."""
        if isinstance(event, AttemptStarted):
            self.begin(event.layout, self._phase)
        if isinstance(event, PhaseBegan):
            self._phase = event.phase
        for record in steps_of(event):
            seconds = record.t_end - record.t_begin
            self.step_s = seconds if not self.step_s else 0.9 * self.step_s + 0.1 * seconds
            self._tokens, self._sequences = record.tokens, record.sequences

    def text(self) -> str:
        """As shown."""
        return f"{format_count(self._tokens / self.step_s)} tokens/s" if self.step_s else ""

    def eta_s(self, config: Config, cursor: Cursor) -> float | None:
        """Seconds from there to the end, without failures; None if nothing was measured yet."""
        update_tokens = self._sequences * effective(config, cursor.phase).data.seq_len
        return self.step_s * updates_left(config, cursor, update_tokens) if self.step_s and update_tokens else None
