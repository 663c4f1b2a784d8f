"""Schedules are proven here as data: legal, without deadlock, and as idle as the closed formulas say."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.parallel.schedule import (
    Action,
    IllegalScheduleError,
    Kind,
    Schedule,
    build,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_in_flight,
    problems,
    zb_h1,
    zb_v,
)
from ftrain.parallel.timeline import even, simulate

RANKS = st.integers(1, 9)
MICROBATCHES = st.integers(1, 24)
TIMES = st.integers(1, 9)
UNHURRIED = settings(deadline=None, max_examples=40)  # a deadline measures the machine's load, not the code


@UNHURRIED
@given(name=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v"]), p=RANKS, m=MICROBATCHES)
def test_every_schedule_is_legal(name: str, p: int, m: int) -> None:
    assert problems(build(name, num_ranks=p, num_microbatches=m)) == []


@UNHURRIED
@given(p=st.integers(2, 8), groups=st.integers(1, 3), v=st.integers(2, 4), forward=TIMES, half=TIMES)
def test_interleaved_is_legal_and_its_bubble_is_the_formula_for_any_ratio(
    p: int, groups: int, v: int, forward: int, half: int
) -> None:
    m = p * groups
    schedule = interleaved(p, m, v)
    assert problems(schedule) == []
    line = simulate(schedule, even(forward=forward, backward_input=half, backward_weight=half, num_chunks=v))
    assert line.bubble_of_compute() == Fraction(p - 1, v * m)
    assert line.bubble_of_total() == Fraction(p - 1, v * m + p - 1)


@UNHURRIED
@given(p=RANKS, m=MICROBATCHES, forward=TIMES, half=TIMES, maker=st.sampled_from([gpipe, one_f_one_b]))
def test_bubble_of_gpipe_and_1f1b_is_the_formula_for_any_ratio(p: int, m: int, forward: int, half: int, maker: object) -> None:
    line = simulate(maker(p, m), even(forward=forward, backward_input=half, backward_weight=half))  # type: ignore[operator]
    assert line.bubble_of_total() == Fraction(p - 1, m + p - 1)
    assert line.bubble_of_compute() == Fraction(p - 1, m)


@UNHURRIED
@given(p=RANKS, extra=st.integers(0, 12))
def test_zero_bubble_h1_idles_p_minus_1_of_f_plus_b_minus_w(p: int, extra: int) -> None:
    m = p + extra
    line = simulate(zb_h1(p, m), even())
    assert line.length == 3 * m + (p - 1)  # compute 3m, idle (p-1)(1+1-1)


@UNHURRIED
@given(p=RANKS, extra=st.integers(0, 12))
def test_zero_bubble_v_has_no_idle_time_inside_a_rank(p: int, extra: int) -> None:
    m = 2 * p + extra
    line = simulate(zb_v(p, m), even(num_chunks=2))
    assert line.length == 3 * m + Fraction(p - 1, 2)
    for rank in range(p):
        spans = [span for span in line.spans if span.rank == rank]
        assert spans[-1].end - spans[0].begin == line.busy(rank)


@UNHURRIED
@given(p=RANKS, extra=st.integers(0, 8), f=TIMES, b=TIMES, w=TIMES)
def test_what_zero_bubble_h1_idles_at_any_times(p: int, extra: int, f: int, b: int, w: int) -> None:
    """The first rank's forwards, the last backwards, or both where W is too short to fill what they leave."""
    m = 2 * p + extra
    line = simulate(zb_h1(p, m), even(forward=f, backward_input=b, backward_weight=w))
    assert line.length == m * (f + b + w) + (p - 1) * max(f, b, f + b - w)


@settings(UNHURRIED, max_examples=150)
@given(extra=st.integers(0, 4), f=TIMES, b=TIMES, w=TIMES)
def test_what_zero_bubble_v_idles_on_two_ranks_at_any_times(extra: int, f: int, b: int, w: int) -> None:
    """`f`, `b`, `w`: of a half stage. The last two only where W is not even half of B."""
    m = 4 + extra
    idle = max(f, b, 2 * (b - w), 2 * f - b - w, f + b - 2 * w, 2 * f - 3 * w)
    line = simulate(zb_v(2, m), even(forward=2 * f, backward_input=2 * b, backward_weight=2 * w, num_chunks=2))
    assert line.length == 2 * m * (f + b + w) + idle


@UNHURRIED
@given(p=RANKS, m=MICROBATCHES)
def test_activations_in_flight(p: int, m: int) -> None:
    assert peak_in_flight(gpipe(p, m)) == (m,) * p
    assert peak_in_flight(one_f_one_b(p, m)) == tuple(min(m, p - i) for i in range(p))
    assert max(peak_in_flight(zb_h1(p, m))) <= min(m, p)
    assert max(peak_in_flight(zb_v(p, m))) <= 2 * p


def test_interleaved_warm_up_holds_what_the_paper_says() -> None:
    p, v = 4, 3
    assert peak_in_flight(interleaved(p, 8, v)) == tuple(2 * (p - i - 1) + (v - 1) * p + 1 for i in range(p))


def test_the_vee_puts_the_last_stage_beside_the_first() -> None:
    schedule = zb_v(4, 8)
    assert [schedule.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_row_16_order_of_two_stages_and_three_microbatches() -> None:
    schedule = one_f_one_b(2, 3)
    order = [[f"{a.kind.value}{a.microbatch + 1}" for a in rank] for rank in schedule.actions]
    assert order == [["F1", "F2", "B1", "F3", "B2", "B3"], ["F1", "B1", "F2", "B2", "F3", "B3"]]
    line = simulate(schedule, even())
    at = {(span.rank, span.action.kind.value, span.action.microbatch): span for span in line.spans}
    assert at[0, "F", 0].end <= at[1, "F", 0].begin
    assert at[1, "B", 0].end <= at[0, "B", 0].begin
    assert line.bubble_of_total() == Fraction(1, 4)


def test_a_slow_hop_lengthens_the_step() -> None:
    schedule = one_f_one_b(2, 1)
    assert simulate(schedule, even(), hop=5).length == simulate(schedule, even()).length + 10


@pytest.mark.parametrize(("p", "m", "near"), [(4, 6, "4 or 8"), (4, 3, "counts are 4$"), (1, 3, "1 pipeline rank|1 ranks")])
def test_interleaved_refuses_and_names_the_nearest_counts(p: int, m: int, near: str) -> None:
    with pytest.raises(IllegalScheduleError, match=near):
        interleaved(p, m, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("2f2b", (2, 2, 1), "there are gpipe, 1f1b"),
        ("1f1b", (0, 2, 1), "at least one rank"),
        ("1f1b", (2, 2, 2), "interleaved takes any"),
        ("interleaved", (2, 2, 1), "with 1 it is 1f1b"),
    ],
)
def test_build_refuses_what_does_not_exist(name: str, arguments: tuple[int, int, int], message: str) -> None:
    ranks, microbatches, chunks = arguments
    with pytest.raises(IllegalScheduleError, match=message):
        build(name, num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)


def _with_rank(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return replace(schedule, actions=tuple(lists))


def test_defects_are_named() -> None:
    good = one_f_one_b(2, 2)
    first = list(good.actions[0])
    assert problems(_with_rank(good, 0, first[:-1])) == ["missing: B2@0"]
    assert problems(_with_rank(good, 0, [*first, first[0]])) == ["2 times: F1@0"]
    assert "does not hold" in problems(_with_rank(good, 0, [*first, Action(Kind.FORWARD, 1, 0)]))[0]
    backwards_first = _with_rank(good, 0, first[::-1])
    assert problems(backwards_first) == ["deadlock: rank 0 waits at B2@0; rank 1 waits at F1@1"]
    with pytest.raises(IllegalScheduleError, match="deadlock"):
        simulate(backwards_first, even())
