"""Results that do not make sense: what is done again is compared, and what came after an onset does not count.

An onset is open until the run has gone back to before it, whatever ended the attempt and whichever coordinator carries on: the
ledger knows it (`recovery.state.Onset`). As long as it is, nothing that came after it counts: what is in storage is tainted,
what is on its way there is let go, what lies in memory is not stored, and nothing begins with any of it.

Going back is an epoch that starts from the newest checkpoint before the onset. Every later one is tainted: it is not loaded any
more, it is not deleted, and `ckpt ls` says why. The onset is a guess, and a person may want them.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from ftrain.checkpoint.messages import Doubt, StepDone
from ftrain.compose.skips import newest_before
from recovery.events import Event, StorageNotice, Suspected
from recovery.owner import this_process
from recovery.state import Onset
from storage.errors import Damaged, FormatError, NoCheckpoint, ObjectMissing
from storage.run import RunStore

Lineage = tuple[tuple[int, str], ...]
"""The layouts under which a state came about: after how many steps each began."""
REMEMBERED = 4096  # losses: more than lie between two checkpoints, or the older ones cannot be compared


class Doubts:
    """What is known against the run's own results. Used by the delegate's one thread."""

    def __init__(self) -> None:
        self._onsets: dict[int, tuple[int, str]] = {}  # open ones: attempt -> since which step, and why
        self._void: dict[int, int] = {}  # attempt -> onset: packs of attempts up to it from the onset on
        self._losses: OrderedDict[int, tuple[int, bytes, Lineage]] = OrderedDict()  # step -> attempt, bits of the loss, layouts
        self._lineage: Lineage = ()
        self._doing = self._said = -1

    def on_doubt(self, doubt: Doubt, attempt: int) -> list[Event]:
        """A worker doubts; since when is remembered until the run goes back to before it, in the ledger too."""
        if doubt.onset is not None and not _after(self._void, attempt, doubt.onset):  # else told again, and acted upon
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
            if onset.open:
                self._onsets[onset.attempt] = onset.step, onset.reason
            else:
                self._void[onset.attempt] = onset.step

    @property
    def open(self) -> tuple[int, str] | None:
        """Since which step nothing counts, and why, as a taint says it; None: nothing is in doubt."""
        onset, reason = min(self._onsets.values(), default=(0, ""))
        return (onset, f"the run goes back to before step {onset}: {reason}") if self._onsets else None

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

    def give_up(self) -> tuple[int, str] | None:
        """Whether the run must go back now that no attempt is under way: as `open`. What was done from there on is void then,
        and nothing open here any more.
        """
        known = self.open
        if known is not None:
            attempt = max(self._onsets)
            self._void[attempt] = min(known[0], self._void.get(attempt, known[0]))
            self._onsets.clear()
        return known

    def read_otherwise(self, attempt: int, step: int) -> None:
        """What attempts up to this one did from this step on does not count: it is done again, and with other data."""
        self._void[attempt] = min(step, self._void.get(attempt, step))
        self.forget_from(step)

    def is_void(self, attempt: int, step: int) -> bool:
        """Whether a state of `attempt` after `step` steps does not count: it was given up, or will be."""
        return _after(self._void, attempt, step) or _after(
            {until: onset for until, (onset, _) in self._onsets.items()}, attempt, step
        )


def _after(onsets: Mapping[int, int], attempt: int, step: int) -> bool:
    """`onsets`: of attempts; what earlier ones did from there on is in doubt as well."""
    return any(attempt <= until and step >= onset for until, onset in onsets.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """Where a run has gone back to. `step` None: the very beginning; `passed`: checkpoints that it could not go back to."""

    step: int | None
    epoch: int
    passed: Mapping[int, str]

    def told(self) -> list[Event]:
        """What the ledger and the screen are told: more is lost than the steps since the newest checkpoint."""
        found = [f"step {step} cannot be gone back to: {why}" for step, why in self.passed.items()]
        if self.step is None:
            found.append("there is no checkpoint that the run could go back to: it begins anew")
        return [StorageNotice(t=time.time(), topic="back", text=text) for text in found]


def go_back(run: RunStore, before: int, reason: str) -> Back:
    """Take the epoch that goes on from the newest checkpoint before this step, later ones tainted. May be repeated.

    One that is gone, or does not open, is passed over. No `reason`: what is later is void, but in no doubt.
    """
    passed: dict[int, str] = {}
    while True:
        step = newest_before((info for info in run.checkpoints() if info.step not in passed), before)
        try:
            if step is not None:
                run.open(step, tainted=False)
            if reason:
                run.taint(after=step, reason=reason)
            epoch = run.take_epoch(owner=msgspec.to_builtins(this_process()), starts_from=step)
        except (NoCheckpoint, Damaged, FormatError, ObjectMissing) as problem:
            if step is None:
                raise
            passed[step] = str(problem)
        else:
            return Back(step=step, epoch=epoch, passed=passed)


def _continued(lineage: Lineage, step: int, layout: str) -> Lineage:
    """That of a state which goes on after `step` steps."""
    kept = tuple(part for part in lineage if part[0] < step)
    return kept if kept and kept[-1][1] == layout else (*kept, (step, layout))
