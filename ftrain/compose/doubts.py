"""Results that do not make sense: what is done again is compared, and what came after an onset does not count.

Going back to before the onset is an epoch that starts from the newest checkpoint before it. Every later checkpoint is tainted
first (`storage.taint`): none is loaded any more, none is deleted, and `ckpt ls` says why. The onset is a guess, and a person
may want them.
What was still on its way to storage when the run went back is let go here.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Iterable

from ftrain.checkpoint.messages import Doubt, StepDone
from recovery.events import Event, Suspected
from recovery.state import Onset

Lineage = tuple[tuple[int, str], ...]
"""The layouts under which a state came about: after how many steps each began."""
REMEMBERED = 4096  # losses: more than lie between two checkpoints, or the older ones cannot be compared


class Doubts:
    """What is known against the run's own results. Used by the delegate's one thread."""

    def __init__(self) -> None:
        self._onsets: dict[int, tuple[int, str]] = {}  # attempt -> since which step, and why
        self._void: dict[int, int] = {}  # attempt -> onset: packs of attempts up to it from the onset on
        self._losses: OrderedDict[int, tuple[int, bytes, Lineage]] = OrderedDict()  # step -> attempt, bits of the loss, layouts
        self._lineage: Lineage = ()
        self._doing = self._said = -1

    def on_doubt(self, doubt: Doubt, attempt: int) -> list[Event]:
        """A worker doubts; since when is remembered until the next attempt is planned, in the ledger too."""
        if doubt.onset is not None:
            found = doubt.onset, doubt.reason
            self._onsets[attempt] = min(self._onsets.get(attempt, found), found)
        now = time.time()
        until = doubt.step if doubt.onset is not None else None
        told = Suspected(
            t=now, attempt=attempt, since=now, reason=doubt.reason, onset=doubt.onset, until=until, rank=doubt.rank
        )
        return [told]

    def recall(self, onsets: Iterable[Onset]) -> None:
        """What an earlier coordinator knew."""
        for onset in onsets:
            self._onsets[onset.attempt] = onset.step, onset.reason
            if onset.void:
                self._void[onset.attempt] = onset.step

    def on_step(self, done: StepDone, attempt: int, layout: str) -> list[Event]:
        """A step that was finished before must have had the same loss, bit for bit; said once in an attempt.

        Only where all steps up to it were done under the same layouts: under another one sums are rounded in another order.
        """
        if attempt != self._doing:
            self._doing, self._lineage = attempt, _continued(self._lineage, done.step - 1, layout)
        bits = struct.pack("<d", done.loss)
        before = self._losses.get(done.step)
        self._losses[done.step] = (attempt, bits, self._lineage)
        if len(self._losses) > REMEMBERED:
            self._losses.popitem(last=False)
        if before is None or before[0] == attempt or before[1] == bits or self._said == attempt or before[2] != self._lineage:
            return []
        self._said = attempt
        was = struct.unpack("<d", before[1])[0]
        reason = (
            f"step {done.step} was done again and its loss differs (attempt {before[0]}: {was!r}, now {done.loss!r}): silent "
            "corruption in one of them, or the repetition is not bitwise here"
        )
        return [Suspected(t=done.t_end, attempt=attempt, since=done.t_end, reason=reason)]

    def forget_from(self, step: int) -> None:
        """From this step on other data are read: what is done again there is not the same."""
        self._losses = OrderedDict((known, entry) for known, entry in self._losses.items() if known < step)

    def give_up(self, attempt: int) -> tuple[int, str] | None:
        """Whether the run must go back now that `attempt` is over: to before which step, and why, as a taint says it.

        What the attempt did from there on is void after this.
        """
        known = self._onsets.pop(attempt, None)
        if known is None:
            return None
        onset, reason = known
        self._void[attempt] = onset
        return onset, f"the run went back to before step {onset}: {reason}"

    def read_otherwise(self, attempt: int, step: int) -> None:
        """What attempts up to this one did from this step on does not count: it is done again, and with other data."""
        self._void[attempt] = min(step, self._void.get(attempt, step))
        self.forget_from(step)

    def is_void(self, attempt: int, step: int) -> bool:
        """Whether a state of `attempt` after `step` steps was given up."""
        return any(attempt <= until and step >= onset for until, onset in self._void.items())


def _continued(lineage: Lineage, step: int, layout: str) -> Lineage:
    """That of a state which goes on after `step` steps."""
    kept = tuple(part for part in lineage if part[0] < step)
    return kept if kept and kept[-1][1] == layout else (*kept, (step, layout))
