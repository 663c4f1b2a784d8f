"""Where the time of a run went: every nanosecond since the first launch in exactly one bucket.

A report that does not add up hides what it cannot explain, so the books are kept in integers and checked: the whole timeline is
cut at the events of the ledger (no second can be counted twice or forgotten), finished steps are laid over it, and the sum must
equal the wall time or ReportError is raised. Time is unix time; where a clock was set back the ledger's order wins and time
stands still until the clock has caught up.

Steps are counted by their numbers, because a script need not tell each of them: where step M was told and then step N, N - M
steps were finished. Of the state that an attempt began with nothing follows from its first step (`Ready.assumed`).

What the buckets mean (`a -> b`: from event a to event b):

    productive      steps that are in the final history, without the two next
    checkpoint      the part of such steps that waited for a save
    evaluation      the part of such steps that evaluated
    discarded       steps (whole) that a roll-back undid, and the unfinished step of an attempt that died
    initialisation  launch of a supervisor -> all ranks ready, the first time
    detection       a death is seen, or progress ends -> the decision
    backoff         the wait that was decided
    restart         the decision, or the end of its wait -> all ranks ready again
    stopping        a stop is asked for, or the work is done -> the supervisor leaves, without the steps in between
    absent          no supervisor: between runs, or since the last sign of life of a coordinator that died
    unrecorded      the last event before a missing segment of the ledger -> the first one after it, without steps told there
    other           inside an attempt between steps, not explained by anything above

What a missing segment held is not made up. If it was the start of the run, or of an attempt of which there is more, nobody can
say from which state that went on and what it undid: the books do not add up then, and ReportError says which segment it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import pairwise

from msgspec import Struct

from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    Event,
    InterruptionClassified,
    ProcessDied,
    Ready,
    RunEnded,
    RunStarted,
    StepRecord,
    StopRequested,
    Suspected,
    steps_of,
)
from recovery.gaps import SegmentsMissing

NS = 1_000_000_000


class ReportError(ValueError):
    """The books do not add up, or there is nothing to report on."""


class Bucket(StrEnum):
    """Names of the buckets, in the order of a report."""

    PRODUCTIVE = "productive"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    DISCARDED = "discarded"
    INITIALISATION = "initialisation"
    DETECTION = "detection"
    BACKOFF = "backoff"
    RESTART = "restart"
    STOPPING = "stopping"
    ABSENT = "absent"
    UNRECORDED = "unrecorded"
    OTHER = "other"


class Buckets(Struct, frozen=True, kw_only=True):
    """The books: nanoseconds by bucket, all buckets present, and the wall time that they sum up to."""

    start_ns: int
    end_ns: int
    ns: dict[str, int]

    @property
    def wall_ns(self) -> int:
        """Time since the first launch."""
        return self.end_ns - self.start_ns

    @property
    def effective(self) -> float:
        """Effective time: productive over wall time, 0 for an empty run."""
        return self.ns[Bucket.PRODUCTIVE] / self.wall_ns if self.wall_ns else 0.0

    def seconds(self, bucket: str) -> float:
        """Seconds in one bucket."""
        return self.ns[bucket] / NS

    def check(self) -> None:
        """ReportError unless every bucket is there, none is negative, and they sum up to the wall time."""
        if set(self.ns) != set(Bucket) or min(self.ns.values()) < 0 or sum(self.ns.values()) != self.wall_ns:
            raise ReportError(
                f"the buckets do not add up: {self.ns} sum to {sum(self.ns.values())}, wall time is {self.wall_ns} ns"
            )


class _Step(Struct):
    """Finished steps `first` to `step` as the books need them, told as one. Times in ns. Above `top` a roll-back undid them."""

    attempt: int
    step: int
    begin: int
    end: int
    blocked: int
    evaluate: int
    tokens: int
    first: int
    top: int

    @property
    def count(self) -> int:
        return self.step - self.first + 1

    @property
    def lost(self) -> int:
        return self.step - self.top

    @property
    def tokens_lost(self) -> int:
        return self.tokens * self.lost // self.count


class Accounts:
    """The books while the ledger is read, one event at a time, in the ledger's order."""

    def __init__(self) -> None:
        self.steps_finished = 0
        """Steps that are known to be finished, lost ones included."""
        self.steps_lost = 0
        """Finished steps that a roll-back undid."""
        self.tokens_lost = 0
        """Tokens of those."""
        self.at_least = False
        """Whether not every step was told: then there may have been more before the first and after the last of an attempt."""
        self._gap = ""  # that segments of the ledger are missing: the newest so far
        self._leapt = False  # since the newest of them no step was told
        self._silent: dict[tuple[int, int], int] = {}  # step that was told after them -> the first that was finished meanwhile
        self._unbooked = ""  # why the books cannot add up for want of them
        self._begun: tuple[set[int], set[int]] = (set(), set())  # attempts whose start is told, and whose state
        self._cuts: list[tuple[int, Bucket]] = []  # (since when, bucket); times never decrease
        self._now = 0
        self._progress = 0  # end of the last finished step, or when all ranks were ready
        self._backoff_end = 0
        self._steps: dict[tuple[int, int], _Step] = {}
        self._kept: list[_Step] = []  # steps of the history as it stands, by step
        self._ready = (-1, 0)  # attempt, step of the last Ready
        self._launched = False  # a supervisor is there, and no attempt yet that could be made again
        self._left = False  # a rank has done its work before anybody was told that it was ready
        self._reached: dict[int, int] = {}  # attempt -> the highest step that it is known to have come to

    def add(self, event: Event) -> None:
        """Take one event into the books."""
        before = self._now
        self._now = max(self._now, _ns(event.t))
        if isinstance(event, SegmentsMissing):
            self._missing(event, before)
            return
        self._needs_its_start(event)
        if not self._cuts:
            if not isinstance(event, RunStarted):
                return
            self._cuts.append((self._now, Bucket.INITIALISATION))
            self._launched = True
            return
        self._end_backoff()
        for record in steps_of(event):
            self._add_step(event.attempt, record)
        self._change(event, before)

    def close(self, until_s: float | None = None) -> Buckets:
        """The books up to `until_s` (by default: the last event). ReportError if they do not add up."""
        if self._unbooked:
            raise ReportError(f"{self._unbooked}, so the books do not add up, and there is no report")
        if not self._cuts:
            raise ReportError("the ledger holds no start of a run")
        start = self._cuts[0][0]
        end = max(start, self._now if until_s is None else _ns(until_s))
        totals = dict.fromkeys(Bucket, 0)
        covered = self._paint_steps(start, end, totals)
        for begin, stop, bucket in self._base(end):
            totals[bucket] += stop - begin
        for bucket, overlap in self._covered_base(covered, end):
            totals[bucket] -= overlap
        books = Buckets(start_ns=start, end_ns=end, ns={str(bucket): value for bucket, value in totals.items()})
        books.check()
        return books

    def knows(self, attempt: int, step: int) -> bool:
        """Whether this step of this attempt is in the books already."""
        return (attempt, step) in self._steps

    def told_as(self, attempt: int, step: int) -> range:
        """The steps that are known to be finished because this one was told."""
        return range(self._silent.get((attempt, step), self._steps[attempt, step].first), step + 1)

    def absent_s(self, begin_s: float, end_s: float) -> float:
        """Seconds between two moments in which nobody had started the run."""
        begin, end = _ns(begin_s), _ns(end_s)
        spans = (
            stop - max(start, begin) for start, stop, bucket in self._base(end) if bucket is Bucket.ABSENT and stop > begin
        )
        return sum(spans) / NS

    def _missing(self, event: SegmentsMissing, before: int) -> None:
        """Of the time between nothing is known, nor of what was finished in it."""
        self._gap, self._leapt, self.at_least = event.missing(), True, True
        if not self._cuts:
            self._unbooked = f"{self._gap}: the start of the run is not recorded"
            self._cuts.append((self._now, Bucket.UNRECORDED))
            return
        self._end_backoff()
        mode = self._cuts[-1][1]
        self._switch(Bucket.UNRECORDED, before)
        self._switch(mode)  # whatever has changed it meanwhile left an event behind the gap, or was the start of an attempt
        self._progress = self._now

    def _needs_its_start(self, event: Event) -> None:
        """After a gap: whether it is known how the attempt of this event began."""
        told, ready = self._begun
        match event:
            case AttemptStarted():
                told.add(event.attempt)
            case Ready():
                ready.add(event.attempt)
        needed = isinstance(event, Ready | AttemptEnded | InterruptionClassified) and event.attempt not in told
        if self._gap and not self._unbooked and (needed or (any(steps_of(event)) and event.attempt not in told & ready)):
            self._unbooked = f"{self._gap}: the start of attempt {event.attempt} is not recorded"

    def _change(self, event: Event, before: int) -> None:
        """What the event says about the time from now on."""
        mode = self._cuts[-1][1]
        match event:
            case RunStarted():
                self._run_started(event, before)
            case AttemptStarted():
                self._left = False
                if mode is not Bucket.INITIALISATION:
                    self._switch(Bucket.INITIALISATION if self._launched else Bucket.RESTART)
                self._launched = False
            case Ready():
                self._is_ready(event)
            case ProcessDied():
                self._died(event, mode)
            case Suspected():
                self._died_at(max(_ns(event.since), self._progress), mode)
            case Decided(action="finish" | "stop_for_human") | StopRequested():
                self._switch(Bucket.STOPPING)
            case Decided():
                self._switch(Bucket.BACKOFF if event.wait_s > 0 else Bucket.RESTART)
                self._backoff_end = self._now + _ns(event.wait_s)
            case AttemptEnded() if mode is Bucket.OTHER:
                self._switch(Bucket.RESTART)
            case RunEnded():
                self._switch(Bucket.ABSENT)
                if event.step is not None:
                    self._roll_back(event.step)

    def _run_started(self, event: RunStarted, before: int) -> None:
        mode, self._launched = self._cuts[-1][1], not event.readopted
        self._switch(Bucket.ABSENT, before)
        self._switch(mode if event.readopted and mode is not Bucket.ABSENT else Bucket.INITIALISATION)

    def _is_ready(self, event: Ready) -> None:
        self._switch(Bucket.STOPPING if self._left else Bucket.OTHER)
        self._progress = self._now
        self._roll_back(event.step)
        self._ready = (event.attempt, event.step)
        if not event.assumed:
            self._reached[event.attempt] = event.step

    def _died(self, event: ProcessDied, mode: Bucket) -> None:
        if event.ours or event.kind not in ("worker", "agent") or mode in (Bucket.STOPPING, Bucket.ABSENT):
            return
        if event.kind == "worker" and event.status == 0:
            self._left = mode is not Bucket.OTHER
            if mode is Bucket.OTHER:  # the work is done: the rest of the attempt is winding down
                self._switch(Bucket.STOPPING, self._progress)
            return
        self._died_at(self._now, mode)

    def _died_at(self, at: int, mode: Bucket) -> None:
        """The attempt broke at `at`: what was begun since the last finished step is lost, then detection begins."""
        if mode is Bucket.OTHER:
            self._switch(Bucket.DISCARDED, self._progress)
        if mode not in (Bucket.DETECTION, Bucket.BACKOFF, Bucket.STOPPING, Bucket.ABSENT):
            self._switch(Bucket.DETECTION, at)

    def _add_step(self, attempt: int, record: StepRecord) -> None:
        if (attempt, record.step) in self._steps:  # told twice, by an agent that did not know whether we had heard
            return
        begin, end = _ns(record.t_begin), _ns(record.t_end)
        at, reached = record.step, self._reached.get(attempt, record.step - 1)
        first = reached + 1 if reached < at else at
        self._reached[attempt] = max(reached, at)
        if self._leapt and first < at:  # of these neither times nor tokens are known, and of this one both
            self._silent[attempt, at] = first
            self._enter(_Step(attempt, at - 1, begin, begin, 0, 0, 0, first, at - 1))
            first = at
        self._leapt = False
        self._enter(_Step(attempt, at, begin, end, _ns(record.blocked_s), _ns(record.evaluate_s), record.tokens, first, at))
        self._progress = max(self._progress, min(end, self._now))
        if self._cuts[-1][1] is Bucket.DETECTION and end >= self._cuts[-1][0] and attempt == self._ready[0]:
            self._switch(Bucket.OTHER)  # a suspicion that did not come true

    def _enter(self, step: _Step) -> None:
        self._steps[step.attempt, step.step] = step
        self.steps_finished += step.count
        self.at_least = self.at_least or step.count > 1
        if step.attempt >= self._ready[0] or self._keep(step, self._ready[1]):
            self._kept.append(step)

    def _roll_back(self, step: int) -> None:
        """The history goes on from the state of `step`: what was finished after it is lost."""
        while self._kept and self._kept[-1].top > step and not self._keep(self._kept[-1], step):
            self._kept.pop()

    def _keep(self, told: _Step, step: int) -> bool:
        """Undo what is above `step`; whether anything is left."""
        steps, tokens = told.lost, told.tokens_lost
        told.top = max(told.first - 1, min(told.top, step))
        self.steps_lost += told.lost - steps
        self.tokens_lost += told.tokens_lost - tokens
        return told.top >= told.first

    def _switch(self, bucket: Bucket, at: int | None = None) -> None:
        """From `at` (default now) on, time goes to `bucket`."""
        at = max(self._now if at is None else at, self._cuts[-1][0])
        if self._cuts[-1][0] == at:
            self._cuts.pop()
        self._cuts.append((at, bucket))

    def _end_backoff(self) -> None:
        if self._cuts[-1][1] is Bucket.BACKOFF and self._now > self._backoff_end:
            self._switch(Bucket.RESTART, self._backoff_end)

    def _base(self, end: int) -> Iterator[tuple[int, int, Bucket]]:
        """The timeline without steps, up to `end`."""
        cuts = list(self._cuts)
        if cuts[-1][1] is Bucket.BACKOFF and self._backoff_end < end:
            cuts.append((self._backoff_end, Bucket.RESTART))
        for (begin, bucket), (stop, _) in pairwise([*cuts, (end, Bucket.OTHER)]):
            if begin < end:
                yield begin, min(stop, end), bucket

    def _paint_steps(self, start: int, end: int, totals: dict[Bucket, int]) -> list[tuple[int, int]]:
        """Add the steps to the totals and return the intervals they cover, in order, without overlap."""
        covered: list[tuple[int, int]] = []
        edge = start
        for step in sorted(self._steps.values(), key=lambda step: (step.begin, step.end)):
            begin, stop = max(step.begin, edge), min(step.end, end)
            if begin >= stop:
                continue
            edge = stop
            covered.append((begin, stop))
            lost = (stop - begin) * step.lost // step.count
            totals[Bucket.DISCARDED] += lost
            kept = stop - begin - lost
            evaluate = min(step.evaluate, kept)
            blocked = min(step.blocked, kept - evaluate)
            totals[Bucket.EVALUATION] += evaluate
            totals[Bucket.CHECKPOINT] += blocked
            totals[Bucket.PRODUCTIVE] += kept - evaluate - blocked
        return covered

    def _covered_base(self, covered: list[tuple[int, int]], end: int) -> Iterator[tuple[Bucket, int]]:
        """How much of each piece of the timeline the steps cover: both lists are in order, so one pass is enough."""
        base = list(self._base(end))
        at = 0
        for begin, stop in covered:
            while at < len(base) and base[at][1] <= begin:
                at += 1
            here = at
            while here < len(base) and base[here][0] < stop:
                piece_begin, piece_stop, bucket = base[here]
                yield bucket, min(stop, piece_stop) - max(begin, piece_begin)
                here += 1


def buckets(events: Iterable[Event], until_s: float | None = None) -> Buckets:
    """The books of a whole ledger."""
    accounts = Accounts()
    for event in events:
        accounts.add(event)
    return accounts.close(until_s)


def _ns(seconds: float) -> int:
    return round(seconds * NS)
