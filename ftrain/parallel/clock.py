"""Where a rank's time goes: one line of marks, each saying what begins there.

At any moment a rank is in exactly one activity: it computes, reads data, waits in a collective of some group, waits for another
pipeline stage, or saves. Entering the next activity is one reading of a clock and one append, a fifth of a microsecond, so it
may be done around every collective; and because the activities follow each other without gaps, they add up to the step by
construction. On a GPU the marks are events on the compute stream (`ftrain.device.timer`): what lies between two of them is what
the stream did or waited for, not what the host enqueued meanwhile.

Collectives of a group are told apart by their number in the step, counted where they are issued: issuing happens on all members
in the same order, waiting does not have to. What all members of a group waited for its n-th collective can so be laid side by
side (`ftrain.parallel.idle`). Pure: no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

COMPUTE, DATA, CHECKPOINT, EVALUATE, OTHER = "compute", "data", "checkpoint", "evaluate", "other"
LINK = "link"
"""Waiting for, or handing over to, another pipeline stage."""


class Timer(Protocol):
    """What reads the time: of the host, or of a GPU's stream."""

    origin: Any
    """A mark before all others."""

    def now(self) -> Any:
        """A mark."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks; may wait until the later one has been passed."""


class HostTimer:
    """The host's monotonic clock."""

    origin = 0.0

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin


@dataclass(eq=False, slots=True)
class Group:
    """The members of a process group, and how many collectives this rank has issued in it."""

    members: tuple[int, ...]
    axis: str  # whose communication it is: the outermost axis that it runs along
    issued: int = 0
    base: int = 0  # issued before the step under way

    def ticket(self) -> int:
        """The number of the collective that is issued now, over the life of the group."""
        self.issued += 1
        return self.issued - 1


class Wait(NamedTuple):
    """An activity: waiting for a collective of a group."""

    group: Group
    ticket: int


Activity = str | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What was marked in a step: (activity, mark at its begin), and the mark at the end of the last one."""

    marks: Sequence[tuple[Activity, Any]]
    end: Any
    issued: dict[Group, tuple[int, int]]  # collectives of each group: number of the first, and how many
    sent: dict[str, float] = field(default_factory=dict)  # bytes that this rank sent, by axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A step in seconds."""

    seconds: dict[str, float]  # of each activity that is not a collective's
    waits: dict[Group, list[float]]  # of the step's collectives, in their order; first, of all that were issued earlier

    @property
    def total(self) -> float:
        """Of the whole step."""
        return sum(self.seconds.values()) + sum(sum(waits) for waits in self.waits.values())


@dataclass(slots=True)
class Clock:
    """One rank's line of marks. Used by the thread that trains."""

    timer: Timer = field(default_factory=HostTimer)
    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    watcher: Callable[[Activity], None] | None = None  # told of each activity that is entered; for a profiler
    _now: Activity = OTHER
    _held: bool = False
    _marks: list[tuple[Activity, Any]] = field(default_factory=list)
    _sent: dict[str, float] = field(default_factory=dict)

    @property
    def issued(self) -> int:
        """Collectives that this rank has issued in its life, over all groups."""
        return sum(group.issued for group in self.groups.values())

    def begin(self) -> None:
        """A step begins; what was marked since the last one is forgotten."""
        for group in self.groups.values():
            group.base = group.issued
        self._now, self._held, self._sent = OTHER, False, {}
        self._marks = [(OTHER, self.timer.now())]

    def enter(self, activity: Activity) -> Activity:
        """Another activity begins; returns the one that was interrupted, to be entered again."""
        before = self._now
        if not self._held and self._marks:
            self._now = activity
            self._marks.append((activity, self.timer.now()))
            if self.watcher is not None:
                self.watcher(activity)
        return before

    @contextmanager
    def during(self, activity: str, *, hold: bool = False) -> Iterator[None]:
        """An activity, then the one before again. `hold`: what is entered inside counts as this one."""
        before, held = self.enter(activity), self._held
        self._held = held or hold
        try:
            yield
        finally:
            self._held = held
            self.enter(before)

    def send(self, axis: str, nbytes: float) -> None:
        """This rank sends so many bytes in a collective that is issued now."""
        self._sent[axis] = self._sent.get(axis, 0.0) + nbytes

    def group(self, members: tuple[int, ...], axis: str) -> Group:
        """The record of a group, made when it is first asked for."""
        found = self.groups.get(members)
        if found is None:
            found = self.groups[members] = Group(members, axis)
        return found

    def take(self) -> Taken:
        """What was marked since `begin`, to be read later: the step ends here."""
        marks, self._marks = self._marks, []
        issued = {group: (group.base, group.issued - group.base) for group in self.groups.values()}
        sent, self._sent = self._sent, {}
        return Taken(marks=marks, end=self.timer.now(), issued=issued, sent=sent)


def spent(taken: Taken, timer: Timer) -> Spent:
    """The seconds of each activity."""
    seconds: dict[str, float] = {}
    waits = {group: [0.0] * (count + 1) for group, (_, count) in taken.issued.items()}
    marks = taken.marks
    ends = [mark for _, mark in marks[1:]] + [taken.end]
    for (activity, begin), end in zip(marks, ends, strict=True):
        length = timer.seconds(begin, end)
        if isinstance(activity, str):
            seconds[activity] = seconds.get(activity, 0.0) + length
        else:
            place = activity.ticket - taken.issued[activity.group][0] + 1
            waits[activity.group][max(0, place)] += length
    return Spent(seconds=seconds, waits=waits)
