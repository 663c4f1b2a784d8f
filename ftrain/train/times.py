"""Where the time of a step went, on every rank, at next to no cost: measured in each step, put together now and then.

    end of step s       what this rank waited for each collective of each group: least over the group  (started)
                        how long each action of the pipeline took: all of them to all of its ranks     (started)
    vote of step s+1    both are there; this rank's seconds in buckets: to rank 0                      (started)
    end of step s+1     rank 0 has all ranks' buckets, and reports means and worst ranks

Nothing is waited for that has not had half a step to arrive, and everything travels beside the training, over the host. A
message costs the same however little it says: a step of two seconds is put together by itself, shorter ones together, as many
as make up two seconds (`EVERY_S`). How many that are the ranks agree on by what the steps before took, which travels along.
Behind a snapshot all steps are put together: nobody does them again, so what is known of them must not be lost with an attempt.

What the buckets mean, and how waiting is told apart, stands in `ftrain.parallel.clock` and `ftrain.parallel.idle`. On a GPU
everything comes half a step later: its marks can be read once the stream has passed them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from ftrain import device as seam
from ftrain.checkpoint.messages import RankMemory, StepTimes
from ftrain.parallel.clock import CHECKPOINT, COMPUTE, DATA, EVALUATE, LINK, OTHER, Group, Spent, Taken, Timer, spent
from ftrain.parallel.idle import Idle, expected_idle, split_idle, split_waits
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.pipeline import durations
from ftrain.parallel.program import Instruction
from ftrain.parallel.schedule import Kind, Schedule
from ftrain.parallel.shape import AXES
from ftrain.train.passes import Passes

BUCKETS = (COMPUTE, "tp", "cp", "pp", "dp", "bubble", "imbalance", DATA, CHECKPOINT, EVALUATE, OTHER)
MEMORY = len(BUCKETS)  # of a rank's values, behind its buckets: used, reserved, peak
SENT = MEMORY + 3  # behind these: bytes along each axis
KINDS = tuple(Kind)
DIGITS = 7
"""Of seconds: a tenth of a microsecond."""
EVERY_S = 2.0
"""Steps that take less are put together with others."""
MEMORY_S = 10.0
"""Between two looks at a rank's memory: on a host that takes as long as several steps' measurements."""
MOST = 64
"""Steps at a time."""
Marked = Sequence[tuple[Instruction, Any, Any]]
_NO_ACTIONS = torch.empty(0, dtype=torch.float64)


class Step(NamedTuple):
    """What one rank measured of a step."""

    number: int
    taken: Taken
    schedule: Schedule | None
    marked: Marked


class StepTimer(Protocol):
    """What a training loop tells of its steps."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, step: int, *, kept: bool = False) -> None:
        """It has ended; `kept`: there is a snapshot of it. The same on all ranks."""

    def during(self, activity: str) -> AbstractContextManager[None]:
        """Everything inside counts as this activity."""

    def finish(self) -> None:
        """No step follows: put together what is left. A collective of all ranks."""


class NoTimes:
    """Nobody asks where the time went."""

    def begin(self) -> None:
        """Nothing."""

    def end(self, step: int, *, kept: bool = False) -> None:
        """Nothing."""

    def during(self, activity: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def finish(self) -> None:
        """Nothing."""


class Times:
    """One rank's measurements. All ranks call every method at the same places of their steps."""

    def __init__(self, passes: Passes, device: torch.device, *, report: Callable[[StepTimes], None]) -> None:
        """`report` is called on rank 0, about a step later. `voted` is to be called behind each vote."""
        self._passes, self._mesh, self._device, self._report = passes, passes.mesh, device, report
        self._clock = self._mesh.clock
        self._clock.timer = seam.timer(device)
        self._carried_out: tuple[Schedule | None, Marked] = (None, ())
        self._steps: list[Step] = []  # not begun to be put together
        self._at_once = 1
        self._memory: list[float] = []  # used, reserved, peak
        self._looked = 0.0
        self._open: list[Iterator[None]] = []

    def begin(self) -> None:
        """A step begins."""
        self._clock.begin()

    def during(self, activity: str) -> AbstractContextManager[None]:
        """Everything inside counts as this activity."""
        return self._clock.during(activity, hold=True)

    def voted(self) -> None:
        """All ranks have come to the vote of a step: an evaluation may use the pipeline next."""
        schedule = self._passes.schedule if self._mesh.shape.pp > 1 else None
        self._carried_out = (schedule, self._passes.pipeline.marked)
        self._advance()

    def end(self, step: int, *, kept: bool = False) -> None:
        """A step has ended; of one that is kept, and those before it, everything is to be known soon."""
        self._steps.append(Step(step, self._clock.take(), *self._carried_out))
        if kept or len(self._steps) >= self._at_once:
            self._begin()
        self._advance()

    def _begin(self) -> None:
        steps, self._steps = self._steps, []
        self._open.append(self._put_together(steps))

    def _advance(self) -> None:
        """Take what has arrived, and start what follows from it."""
        self._open = [work for work in self._open if next(work, self) is not self]

    def finish(self) -> None:
        """Put together all that is left."""
        if self._steps:
            self._begin()
        while self._open:
            self._advance()

    def _put_together(self, steps: Sequence[Step]) -> Iterator[None]:
        """The stages of some steps' measurements; each `yield` is half a step of time for what was started."""
        if self._device.type == "cuda":
            yield
        found = [spent(step.taken, self._clock.timer) for step in steps]
        least = _in_a_row(found, self._mesh.shape.world)
        actions = torch.cat([_table(step, self._clock.timer) for step in steps])
        works: list[Any] = [self._mesh.start_least(values, group.members) for group, values in least.items()]
        works += [work for work in [self._mesh.start_total(actions, ("pp",))] if work is not None]
        yield
        for work in works:
            work.wait()
        self._at_once = max(1, min(MOST, int(EVERY_S / _pace(found, least, self._mesh.shape.world))))
        tables, waits = _of_each(steps, actions), {group: iter(values.tolist()) for group, values in least.items()}
        self._look_at_memory()
        own = [self._own(*it, waits, self._memory) for it in zip(steps, found, tables, strict=True)]
        into, collection = self._mesh.start_collection(torch.tensor(own, dtype=torch.float64))
        yield
        if collection is not None:
            collection.wait()
        for number, (step, table) in enumerate(zip(steps, tables, strict=True) if into else ()):
            told = {"device": seam.name(self._device), "dtype": str(self._passes.pipeline.dtype).removeprefix("torch.")}
            kinds = _means(table) if step.schedule else {}
            ranks = [values[number].tolist() for values in into]
            self._report(_summary(step.number, ranks, self._mesh, actions=kinds, **told))

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if not self._memory or now - self._looked >= MEMORY_S:
            found, self._looked = seam.memory(self._device), now
            self._memory = [float(found.used), float(found.reserved), float(found.peak)]

    def _own(
        self, step: Step, found: Spent, table: torch.Tensor, waits: Mapping[Group, Iterator[float]], memory: list[float]
    ) -> list[float]:
        """This rank's values of a step; `waits` go on to the next step's."""
        idle = _idle(step.schedule, table)[self._mesh.coordinate.pp] if step.schedule else None
        least = [[next(waits[group]) for _ in waited] for group, waited in found.waits.items()]
        own = _buckets(found, least, idle, self._mesh.shape.world)
        return [*(own[bucket] for bucket in BUCKETS), *memory, *(step.taken.sent.get(axis, 0.0) for axis in AXES)]


def _in_a_row(found: Sequence[Spent], world: int) -> dict[Group, torch.Tensor]:
    """What this rank waited for the collectives of each group, step after step; behind that of the group of all ranks the mean
    seconds of a step, for the ranks to agree on.
    """
    waits = {group: [seconds for of_step in found for seconds in of_step.waits.get(group, ())] for group in found[-1].waits}
    mean = sum(of_step.total for of_step in found) / len(found)
    return {
        group: torch.tensor([*values, mean] if len(group.members) == world else values, dtype=torch.float64)
        for group, values in waits.items()
    }


def _pace(found: Sequence[Spent], least: Mapping[Group, torch.Tensor], world: int) -> float:
    """Seconds of a step: of the fastest rank, the same on all of them. A rank that went by its own would wait for the others
    forever, so there is nothing to fall back on: every update has a vote of all ranks.
    """
    if world == 1:
        return sum(of_step.total for of_step in found) / len(found)
    (agreed,) = (float(values[-1]) for group, values in least.items() if len(group.members) == world)
    return agreed


def _table(step: Step, timer: Timer) -> torch.Tensor:
    """[kind, stage, micro-batch] seconds in a row, zero for other ranks' actions; empty without a pipeline."""
    if step.schedule is None:
        return _NO_ACTIONS
    table = torch.zeros(_shape(step), dtype=torch.float64)
    for action, seconds in durations(step.marked, timer).items():
        table[KINDS.index(action.kind), action.stage, action.microbatch] = seconds
    return table.flatten()


def _shape(step: Step) -> tuple[int, int, int]:
    schedule = step.schedule
    return (len(KINDS), schedule.num_stages, schedule.num_microbatches) if schedule else (len(KINDS), 0, 0)


def _of_each(steps: Sequence[Step], actions: torch.Tensor) -> list[torch.Tensor]:
    """The table of each step again."""
    if all(step.schedule is None for step in steps):
        return [_NO_ACTIONS] * len(steps)
    shapes = [_shape(step) for step in steps]
    parts = actions.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _means(table: torch.Tensor) -> dict[str, list[float]]:
    """Mean seconds of each kind of action on each virtual stage; kinds that the schedule does not have are left out."""
    means = {kind.value: table[index].mean(-1).tolist() for index, kind in enumerate(KINDS)}
    return {kind: [round(seconds, DIGITS) for seconds in stages] for kind, stages in means.items() if any(stages)}


def _idle(schedule: Schedule, table: torch.Tensor) -> Sequence[Idle]:
    values = table.tolist()
    took = {
        action: values[KINDS.index(action.kind)][action.stage][action.microbatch]
        for rank in schedule.actions
        for action in rank
    }
    return expected_idle(schedule, took)


def _buckets(found: Spent, least: Sequence[Sequence[float]], idle: Idle | None, world: int) -> dict[str, float]:
    """The step's seconds of this rank; they add up to it."""
    buckets = dict.fromkeys(BUCKETS, 0.0)
    for activity, seconds in found.seconds.items():
        if activity != LINK:
            buckets[activity] += seconds
    tail = 0.0
    for (group, waited), shortest in zip(found.waits.items(), least, strict=True):
        communication, others = split_waits(waited, shortest)
        buckets[group.axis] += communication
        if idle is not None and len(group.members) == world:
            tail += others  # the end of the step: ranks of the pipeline that have no more to do wait there for the rest
        else:
            buckets["imbalance"] += others
    if idle is not None:
        waited_for = split_idle(found.seconds.get(LINK, 0.0), tail, idle)
        buckets["bubble"] = waited_for.bubble
        buckets["imbalance"] += waited_for.imbalance
        buckets["pp"] += waited_for.communication
    return buckets


def _mean(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of each bucket, over these ranks."""
    return {name: round(sum(values[index] for values in ranks) / len(ranks), DIGITS) for index, name in enumerate(BUCKETS)}


def _summary(step: int, ranks: Sequence[Sequence[float]], mesh: Mesh, **told: Any) -> StepTimes:
    """Means over the ranks, over those of each stage, and of each bucket the rank with the most of it."""
    worst, shape = {}, mesh.shape
    places = [shape.coordinate(rank).pp for rank in range(len(ranks))]
    for index, bucket in enumerate(BUCKETS):
        rank = max(range(len(ranks)), key=lambda it: ranks[it][index])
        worst[bucket] = (rank, round(ranks[rank][index], DIGITS))
    return StepTimes(
        step=step,
        mean=_mean(ranks),
        worst=worst,
        memory=[RankMemory(rank, places[rank], *map(int, values[MEMORY:SENT])) for rank, values in enumerate(ranks)],
        sent={axis: most for index, axis in enumerate(AXES) if (most := max(values[SENT + index] for values in ranks))},
        stages=[
            _mean([values for rank, values in enumerate(ranks) if places[rank] == stage])
            for stage in range(shape.pp)
            if shape.pp > 1
        ],
        **told,
    )
