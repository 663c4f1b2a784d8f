"""How fast a run is now, and when it will be done: measured at its present size, not at one it had before.

A step under another layout, or in another phase, takes another time, so what was measured is forgotten at each such seam; until
the first step behind it nothing is said. What is left is counted in tokens: later updates may have more of them.

All that is told of one moment (seconds of a step, tokens and operations a second, time left) comes from the same few steps: of
one step alone, or each figure of others, a person who divides one by the other finds a contradiction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ftrain.config import Config
from ftrain.course import Cursor, updates_left
from ftrain.phases import effective
from ftrain.units import format_count
from recovery.events import AttemptStarted, Event, PhaseBegan, StepRecord, steps_of

NEWEST = 20
"""Steps of which the mean is told: enough for one slow step not to be the answer, few enough to be of now."""


class Speed:
    """Seconds, tokens and sequences of the newest steps, each as the mean of one of them."""

    def __init__(self) -> None:
        self.layout = ""
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=NEWEST)
        self._first = True  # the next step is the first of its attempt
        self._cold = False  # the only step that is kept was the first of its attempt
        self._since = 0  # the first step at this size
        self._phase = 0
        self._size: tuple[str, int] | None = None

    def begin(self, layout: str, phase: int) -> None:
        """An attempt of this size begins: what was measured of another says nothing about it."""
        if self._size not in (None, (layout, phase)):
            self._steps.clear()
            self._cold = False
        self._size, self.layout, self._first = (layout, phase), layout, True

    def add(self, event: Event) -> None:
        """Take in the steps an event reports."""
        if isinstance(event, AttemptStarted):
            self.begin(event.layout, self._phase)
        if isinstance(event, PhaseBegan):
            self._phase = event.phase
        for record in steps_of(event):
            self._step(record)

    def _step(self, record: StepRecord) -> None:
        """The first step of an attempt builds programs and faults pages in: it counts only until there is another."""
        first, self._first = self._first, False
        self._since = min(self._since, record.step)  # a run that went back does steps at this size again
        if first and self._steps:
            return
        if self._cold or not self._steps:
            self._steps.clear()
            self._since = self._since if self._cold else record.step
        self._cold = first
        self._steps.append((record.t_end - record.t_begin, record.tokens, record.sequences))

    def _mean(self, place: int) -> float:
        return sum(step[place] for step in self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def step_s(self) -> float:
        """Mean of the newest steps, seconds; 0 if nothing was measured yet."""
        return self._mean(0)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the same steps over their seconds; None if nothing was measured yet, or no tokens are told."""
        return self._mean(1) / self.step_s if self.step_s and self._mean(1) else None

    def text(self) -> str:
        """As shown; empty where nothing is known."""
        return f"{format_count(self.tokens_per_s)} tokens/s" if self.tokens_per_s is not None else ""

    def status(self) -> dict[str, float | None]:
        """For `ftrain status`."""
        return {"step_s": self.step_s or None, "tokens_per_s": self.tokens_per_s}

    def paced(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A whole line of metrics.jsonl with the rates of these steps instead of its own: at the same size the operations of a
        sequence are the same, so rates follow the sequences a second. Without rates if it is of another size.
        """
        rates = ("tflops", "tflops_full", "mfu", "mfu_full")
        here = record["layout"] == self.layout and record["step"] >= self._since
        if not (here and self.step_s and record["seconds"] > 0 and record.get("sequences")):
            return {**record, **dict.fromkeys(rates)}
        ratio = self._mean(2) / self.step_s / (record["sequences"] / record["seconds"])
        return {**record, **{name: None if record[name] is None else record[name] * ratio for name in rates}}

    def eta_s(self, config: Config, cursor: Cursor) -> float | None:
        """Seconds from there to the end, without failures; None if nothing was measured yet."""
        update_tokens = self._mean(2) * effective(config, cursor.phase).data.seq_len
        return self.step_s * updates_left(config, cursor, update_tokens) if self.step_s and update_tokens else None
