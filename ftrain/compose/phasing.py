"""Which phase an attempt is in: that of the state it will begin with.

The workers know best: they see the state. They leave with 0 at the boundary of their phase, and also at once if the state they
found belongs to another one (memory was lost just behind a boundary, and storage ends before it); either way they say where
each phase began, and the next attempt is planned for the right one.

Where the run is in its data follows from what they say as well, and from what each update read since: what the config says of a
run that begins at 0 is not the way of one that has had other batches before, or began with another run's state.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ftrain.checkpoint.messages import Final
from ftrain.config import Config
from ftrain.course import Begun, Cursor, course, cursor_at, entered, phase_after, recalled, tokens_read
from ftrain.load import changes
from ftrain.phases import effective, num_phases
from recovery.events import Event, PhaseBegan, Ready, steps_of


class Phasing:
    """Where a run is, and where its phases began. Used by the delegate's one thread, and by whoever follows a ledger."""

    def __init__(self) -> None:
        self.cursor = Cursor()
        """Behind the newest update that was finished."""
        self.left = False
        """Whether the newest workers have made way for another phase."""
        self.seam: int | None = None
        """The step behind which the newest attempt begins another phase; None: it goes on in the same."""
        self.recorded = 0
        """The phase that the ledger was told of last."""

    def recall(self, config: Config, progress: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.cursor = recalled(config, progress)

    def told(self, step: int, begun: Sequence[tuple[int, int]]) -> None:
        """By workers that have the state."""
        self.cursor = Cursor(step, tuple(Begun(*part) for part in begun)) if begun else self.cursor

    def stepped(self, config: Config, step: int, sequences: int) -> None:
        """An update was finished, and had so many; if others before it were not heard of, they were as the config says."""
        next_one = sequences and step == self.cursor.step + 1
        self.cursor = self.cursor.after(sequences) if next_one else cursor_at(config, step, self.cursor)

    def see(self, config: Config, event: Event) -> None:
        """The same from the ledger. One that was written before ledgers had it is taken for one of the config from 0 on."""
        if isinstance(event, Ready):
            self.cursor = cursor_at(config, event.step)
            self.told(event.step, event.begun)
        for record in steps_of(event):
            self.stepped(config, record.step, record.sequences)

    def leave(self, final: Final) -> int:
        """Workers have left for another phase; which one."""
        self.told(final.step, final.begun)
        self.left = True
        return self.of(final.step)

    def of(self, step: int) -> int:
        """The phase of the update that follows `step`."""
        return phase_after([part.first_step for part in self.cursor.begun], step)


def began(config: Config, before: int, number: int, step: int, layout: str) -> PhaseBegan:
    """What the ledger keeps of a change-over from phase `before`, with all that it changes."""
    told = changes(effective(config, before), effective(config, number))
    return PhaseBegan(
        t=time.time(),
        phase=number,
        phases=num_phases(config),
        step=step,
        from_tokens=config.phases[number - 1].from_tokens if number else 0,
        layout=layout,
        changes=tuple({"path": it.path, "old": it.old, "new": it.new} for it in told),
    )


def at_boundary(config: Config, number: int, cursor: Cursor) -> bool:
    """Whether a run that has come so far in this phase has come to its end, and not to its own."""
    return cursor.step < config.run.steps and entered(config, cursor).phase > number


def phase_status(config: Config, number: int, cursor: Cursor) -> dict[str, Any]:
    """For `ftrain status`; nothing of a run without phases."""
    if not config.phases:
        return {}
    legs = course(config, cursor)
    following = legs[number + 1] if number + 1 < len(legs) else None
    return {
        "phase": number,
        "phases": len(legs),
        "tokens_read": tokens_read(config, cursor),
        "seq_len": legs[number].config.data.seq_len,
        "next_phase_step": following.first_step if following is not None and following.steps else None,
    }
