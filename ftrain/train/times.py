"""Where the time of a step went, on every rank, at next to no cost: measured in one step, put together during the next.

    end of step s       what this rank waited for each collective of each group: least over the group  (started)
                        how long each action of the pipeline took: all of them to all of its ranks     (started)
    vote of step s+1    both are there; this rank's seconds in buckets: to rank 0                      (started)
    end of step s+1     rank 0 has all ranks' buckets, and reports means and worst ranks

Nothing is waited for that has not had half a step to arrive, and everything travels beside the training, over the host. What
the buckets mean, and how waiting is told apart, stands in `ftrain.parallel.clock` and `ftrain.parallel.idle`. On a GPU
everything comes half a step later: its marks can be read once the stream has passed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ftrain import device as seam
from ftrain.checkpoint.messages import RankMemory, StepTimes
from ftrain.parallel.clock import CHECKPOINT, COMPUTE, DATA, EVALUATE, LINK, OTHER, Spent, Taken, spent
from ftrain.parallel.idle import Idle, expected_idle, split_idle, split_waits
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.pipeline import durations
from ftrain.parallel.program import Instruction
from ftrain.parallel.schedule import Action, Kind, Schedule
from ftrain.parallel.shape import AXES
from ftrain.train.passes import Passes

BUCKETS = (COMPUTE, "tp", "cp", "pp", "dp", "bubble", "imbalance", DATA, CHECKPOINT, EVALUATE, OTHER)
MEMORY = len(BUCKETS)  # of a rank's values, behind its buckets: used, reserved, peak
SENT = MEMORY + 3  # behind these: bytes along each axis
KINDS = tuple(Kind)
DIGITS = 7
"""Of seconds: a tenth of a microsecond."""
Marked = Sequence[tuple[Instruction, Any, Any]]


class StepTimer(Protocol):
    """What a training loop tells of its steps."""

    def begin(self) -> None:
        """A step begins."""

    def end(self, step: int) -> None:
        """It has ended."""

    def during(self, activity: str) -> AbstractContextManager[None]:
        """Everything inside counts as this activity."""

    def finish(self) -> None:
        """No step follows: put together what is left. A collective of all ranks."""


class NoTimes:
    """Nobody asks where the time went."""

    def begin(self) -> None:
        """Nothing."""

    def end(self, step: int) -> None:
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

    def end(self, step: int) -> None:
        """A step has ended."""
        self._open.append(self._put_together(step, self._clock.take(), *self._carried_out))
        self._advance()

    def _advance(self) -> None:
        """Take what has arrived, and start what follows from it."""
        self._open = [work for work in self._open if next(work, self) is not self]

    def finish(self) -> None:
        """Put together all that is left."""
        while self._open:
            self._advance()

    def _put_together(self, step: int, taken: Taken, schedule: Schedule | None, marked: Marked) -> Iterator[None]:
        """The stages of one step's measurements; each `yield` is half a step of time for what was started."""
        if self._device.type == "cuda":
            yield
        found, took = spent(taken, self._clock.timer), durations(marked, self._clock.timer)
        waits = {group: torch.tensor(waited, dtype=torch.float64) for group, waited in found.waits.items()}
        works = [self._mesh.start_least(values, group.members) for group, values in waits.items()]
        actions = _table(schedule, took) if schedule else torch.zeros(0)
        works += [work for work in [self._mesh.start_total(actions, ("pp",))] if work is not None and schedule]
        yield
        for work in works:
            work.wait()
        idle = _idle(schedule, actions)[self._mesh.coordinate.pp] if schedule else None
        own = _buckets(found, [values.tolist() for values in waits.values()], idle, self._mesh.shape.world)
        now = seam.memory(self._device)
        values = [own[bucket] for bucket in BUCKETS] + [float(now.used), float(now.reserved), float(now.peak)]
        values += [taken.sent.get(axis, 0.0) for axis in AXES]
        into, collection = self._mesh.start_collection(torch.tensor(values, dtype=torch.float64))
        yield
        if collection is not None:
            collection.wait()
        if into:
            told = {"device": seam.name(self._device), "dtype": str(self._passes.pipeline.dtype).removeprefix("torch.")}
            kinds = _means(actions) if schedule else {}
            self._report(_summary(step, [values.tolist() for values in into], self._mesh, actions=kinds, **told))


def _table(schedule: Schedule, took: dict[Action, float]) -> torch.Tensor:
    """[kind, stage, micro-batch] seconds, zero for other ranks' actions."""
    table = torch.zeros(len(KINDS), schedule.num_stages, schedule.num_microbatches, dtype=torch.float64)
    for action, seconds in took.items():
        table[KINDS.index(action.kind), action.stage, action.microbatch] = seconds
    return table


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
