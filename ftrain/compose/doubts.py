"""Results that do not make sense: what is done again is compared, and what came after an onset does not count.

Going back to before the onset is an epoch that starts from the newest checkpoint before it. Every later commit of earlier
epochs is thereby void for good (`storage.epoch`): it is listed as fenced and never loaded, until a collection deletes it.
What was still on its way to storage when the run went back is let go here.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Iterable

from ftrain.checkpoint.messages import Doubt, StepDone
from recovery.events import Event, Suspected
from storage.catalog import CheckpointInfo

REMEMBERED = 4096  # losses: more than lie between two checkpoints, or the older ones cannot be compared


class Doubts:
    """What is known against the run's own results. Used by the delegate's one thread."""

    def __init__(self) -> None:
        self._onset: int | None = None
        self._void: list[tuple[int, int]] = []  # (attempt, onset): packs of attempts up to it from the onset on
        self._losses: OrderedDict[int, tuple[int, bytes]] = OrderedDict()  # step -> (attempt, bits of the loss)
        self._said = -1

    def on_doubt(self, doubt: Doubt, attempt: int) -> list[Event]:
        """A worker doubts; if the run must go back, where to is remembered until the next attempt is planned."""
        self._onset = doubt.onset if doubt.onset is not None else self._onset
        now = time.time()
        return [Suspected(t=now, attempt=attempt, since=now, reason=doubt.reason)]

    def on_step(self, done: StepDone, attempt: int) -> list[Event]:
        """A step that was finished before must have had the same loss, bit for bit; said once in an attempt."""
        bits = struct.pack("<d", done.loss)
        before = self._losses.get(done.step)
        self._losses[done.step] = (attempt, bits)
        if len(self._losses) > REMEMBERED:
            self._losses.popitem(last=False)
        if before is None or before[0] == attempt or before[1] == bits or self._said == attempt:
            return []
        self._said = attempt
        was = struct.unpack("<d", before[1])[0]
        reason = (
            f"step {done.step} was done again and its loss differs (attempt {before[0]}: {was!r}, now {done.loss!r}): silent "
            "corruption in one of them, or the repetition is not bitwise here"
        )
        return [Suspected(t=done.t_end, attempt=attempt, since=done.t_end, reason=reason)]

    def go_back(self, infos: Iterable[CheckpointInfo], attempt: int) -> tuple[bool, int | None]:
        """Whether the run must go back now that `attempt` is over, and to which checkpoint (None: to the very beginning)."""
        onset, self._onset = self._onset, None
        if onset is None:
            return False, None
        self._void.append((attempt, onset))
        return True, max((info.step for info in infos if info.state == "valid" and info.step < onset), default=None)

    def is_void(self, attempt: int, step: int) -> bool:
        """Whether a state of `attempt` after `step` steps was given up."""
        return any(attempt <= until and step >= onset for until, onset in self._void)
