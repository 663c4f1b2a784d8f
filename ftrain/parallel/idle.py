"""What a rank waited for: the link, the other ranks, or the schedule.

Two questions, answered without comparing the clocks of two machines.

**A collective.** Every member waits until the last one has come, and then for the bytes. The member that waited least came
last, and waited for the bytes only; what the others waited beyond that, they waited for it:

    communication = the least that any member waited          imbalance = the rest of one's own waiting

One all-reduce (min) over the group, of one number per collective, says it for all of a step's collectives.

**A pipeline.** A rank that waits for a neighbour may wait because the schedule has nothing for it to do, because some stage is
slower than the others, or because the link is slow. The schedule is put on the clock twice (`ftrain.parallel.timeline`): with
the durations that the ranks measured, and with the same work spread evenly over the stages and micro-batches:

    bubble        = idle time of the even one: the schedule's own
    imbalance     = what idle time the measured one has beyond it
    communication = what was waited beyond that

Pure: no torch. The parts of a waiting time are never negative and add up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftrain.parallel.schedule import Action, Kind, Schedule
from ftrain.parallel.timeline import simulate


def split_waits(mine: Sequence[float], least: Sequence[float]) -> tuple[float, float]:
    """(communication, imbalance) of a group's collectives; `least` waited by any member, the same collectives."""
    communication = sum(min(own, least_) for own, least_ in zip(mine, least, strict=True))
    return communication, max(0.0, sum(mine) - communication)


class Idle(NamedTuple):
    """Seconds in which a pipeline rank has nothing to do, on paper."""

    bubble: float
    """With the same work spread evenly."""
    measured: float
    """With the durations as they were."""


def expected_idle(schedule: Schedule, durations: Mapping[Action, float]) -> tuple[Idle, ...]:
    """The idle time of each pipeline rank in a step, from the first begin to the last end of any rank."""
    if not schedule.num_microbatches:
        return (Idle(0.0, 0.0),) * schedule.num_ranks
    means: dict[Kind, float] = {}
    for kind in Kind:
        of_kind = [seconds for action, seconds in durations.items() if action.kind is kind]
        means[kind] = sum(of_kind) / len(of_kind) if of_kind else 0.0
    even = simulate(schedule, lambda action: means[action.kind])
    real = simulate(schedule, durations.__getitem__)
    ranks = range(schedule.num_ranks)
    return tuple(Idle(float(even.length - even.busy(rank)), max(0.0, float(real.length - real.busy(rank)))) for rank in ranks)


class Waited(NamedTuple):
    """The parts of the time that a pipeline rank waited."""

    bubble: float
    imbalance: float
    communication: float


def split_idle(received: float, tail: float, idle: Idle) -> Waited:
    """The parts of what a rank waited for its neighbours (`received`) and, behind its last action, for the whole pipeline
    (`tail`): there nothing is on its way, so none of it is communication.
    """
    waited = received + tail
    bubble = min(waited, idle.bubble, idle.measured)
    imbalance = min(waited, idle.measured) - bubble
    communication = min(received, waited - bubble - imbalance)
    return Waited(bubble, waited - bubble - communication, communication)
