"""Waiting, taken apart: against cases whose answer is known by construction."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ftrain.parallel.idle import Idle, expected_idle, split_idle, split_waits
from ftrain.parallel.schedule import NAMES, Kind, build
from ftrain.parallel.timeline import even, simulate

COST = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def schedule_of(name: str, p: int = 4, m: int = 8):
    return build(name, num_ranks=p, num_microbatches=m, num_chunks=2 if name in ("interleaved", "zb-v") else 1)


def durations(schedule, cost):
    return {action: cost(action) for rank in schedule.actions for action in rank}


def test_who_comes_last_waits_for_the_bytes_only() -> None:
    """Two collectives that take 1 and 2 s; this rank comes 5 s before the last in the first, and last in the second."""
    assert split_waits([6.0, 2.0], [1.0, 2.0]) == (3.0, 5.0)
    assert split_waits([1.0, 2.0], [1.0, 2.0]) == (3.0, 0.0)
    assert split_waits([], []) == (0.0, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_equal_stages_wait_for_the_schedule_alone(name: str) -> None:
    schedule = schedule_of(name)
    found = expected_idle(schedule, durations(schedule, lambda action: COST[action.kind]))
    line = simulate(schedule, lambda action: COST[action.kind])
    for rank, idle in enumerate(found):
        assert idle.bubble == pytest.approx(line.length - line.busy(rank))
        assert idle.measured == pytest.approx(idle.bubble)


def test_the_bubble_of_1f1b_is_the_formula() -> None:
    """(p - 1)(f + b) on every rank: arXiv 2104.04473."""
    schedule = schedule_of("1f1b")
    found = expected_idle(schedule, durations(schedule, lambda action: COST[action.kind]))
    assert [idle.bubble for idle in found] == pytest.approx([3 * (1.0 + 2.0)] * 4)


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_stage_is_no_bubble(slow: int) -> None:
    """One stage of GPipe takes 0.5 s longer for each action: the others wait for it m x 0.5 s twice, while the bubble grows
    only by what an even spread of that work makes it grow."""
    schedule = schedule_of("gpipe")
    cost = even(forward=1.0, backward_input=1.0, backward_weight=1.0)
    found = expected_idle(schedule, durations(schedule, lambda action: float(cost(action)) + 0.5 * (action.stage == slow)))
    mean = 0.5 / 4
    for rank, idle in enumerate(found):
        assert idle.bubble == pytest.approx(3 * (1 + mean + 2 + mean))
        if rank != slow:
            assert idle.measured - 3 * 3.0 == pytest.approx(8 * 0.5 * 2)


def test_what_paper_does_not_explain_was_the_link() -> None:
    """A schedule with a hop of 0.25 s, measured; what is waited beyond the hop-free one is all communication."""
    schedule = schedule_of("1f1b")
    took = durations(schedule, lambda action: COST[action.kind])
    slow = simulate(schedule, took.__getitem__, hop=0.25)
    for rank, idle in enumerate(expected_idle(schedule, took)):
        waited = float(slow.length - slow.busy(rank))
        parts = split_idle(waited, 0.0, idle)
        assert parts.bubble == pytest.approx(9.0)
        assert parts.imbalance == pytest.approx(0.0)
        assert parts.communication == pytest.approx(waited - 9.0)
        assert parts.communication > 0


@pytest.mark.parametrize(
    ("received", "tail", "bubble", "measured"), list(itertools.product([0, 1.0, 6.0], [0, 2.0], [0, 1.0, 4.0], [0, 2.0, 7.0]))
)
def test_the_parts_add_up_and_none_is_negative(received: float, tail: float, bubble: float, measured: float) -> None:
    parts = split_idle(received, tail, Idle(bubble, measured))
    assert sum(parts) == pytest.approx(received + tail)
    assert min(parts) >= 0
    assert parts.communication <= received


def test_a_replica_without_micro_batches_has_no_idle_time() -> None:
    nothing = replace(schedule_of("gpipe", p=2), num_microbatches=0, actions=((), ()))
    assert expected_idle(nothing, {}) == (Idle(0.0, 0.0), Idle(0.0, 0.0))
