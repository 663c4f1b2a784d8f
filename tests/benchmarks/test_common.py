"""The benchmarks' arithmetic, on made-up figures."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.common import interleaved, median, median_within, ratio, turns
from benchmarks.recovery import LIMIT_S, SNAPSHOT_STEPS, Kill, Sample, Step, _recovered, _sample, record


def test_rounds_take_turns_and_the_first_one_changes() -> None:
    order: list[str] = []

    def case(name: str) -> object:
        return lambda number: order.append(f"{name}{number}") or float(number)  # type: ignore[func-returns-value]

    seconds = interleaved({name: case(name) for name in "abc"}, 3)  # type: ignore[arg-type,misc]
    assert sorted(order) == [f"{name}{number}" for name in "abc" for number in range(3)]
    assert [name[1] for name in order] == list("000111222")
    assert {order[place][0] for place in (0, 3, 6)} == set("abc")
    assert seconds == {"a": [0.0, 1.0, 2.0], "b": [0.0, 1.0, 2.0], "c": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 10])
def test_each_case_comes_at_each_place_and_behind_each_other_equally_often(count: int) -> None:
    names = [str(number) for number in range(count)]
    rounds = [turns(names, number) for number in range(2 * count)]
    assert all(sorted(order) == sorted(names) for order in rounds)
    places = Counter((place, name) for order in rounds for place, name in enumerate(order))
    assert set(places.values()) == {2}
    assert len(places) == count**2
    behind = Counter(pair for order in rounds for pair in pairwise(order))
    assert len(behind) == count * (count - 1)
    assert set(behind.values()) <= {2}


def test_a_figure_that_is_missing_makes_no_ratio() -> None:
    assert median([]) is None
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert ratio(1.0, 3.0) == 0.333
    assert ratio(None, 3.0) is None
    assert ratio(1.0, None) is None


def test_the_bounds_of_a_median_are_those_of_the_sign_test() -> None:
    """Tables of the sign test at 90 %: of 10 samples the 2nd and the 9th (97.9 % between them), of 15 the 4th and the 12th
    (96.5 %), of 20 the 6th and the 15th (95.9 %); of 3 no two samples are that sure.
    """
    assert median_within([float(n) for n in range(10, 0, -1)]) == (5.5, 2.0, 9.0)
    assert median_within([float(n) for n in range(1, 16)]) == (8.0, 4.0, 12.0)
    assert median_within([float(n) for n in range(1, 21)]) == (10.5, 6.0, 15.0)
    assert median_within([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_recovery_is_the_first_step_above_all_that_was_finished_before() -> None:
    """Work done again does not count, nor does a step that the dying attempt still finishes after the kill."""
    before = [Step(0, number, number / 10) for number in range(1, 26)]
    dying = [Step(0, 26, 2.61)]
    again = [Step(1, number, 3.0 + number / 10) for number in range(21, 27)]
    assert _recovered(before + dying, 0) is None
    assert _recovered(before + dying + again, 0) is None
    sample = _sample([*before, *dying, *again, Step(1, 27, 9.0)], 0, t0=2.55, step_s=0.1)
    assert sample.seconds == pytest.approx(6.45)
    assert sample.first_step_s == pytest.approx(3.0 + 2.1 - 2.55)
    assert (sample.highest_step, sample.resumed_at) == (26, 20)


def test_a_non_recovery_counts_against_us_and_not_for_us() -> None:
    def recovered(seconds: float | None) -> Sample:
        return Sample(seconds=seconds, first_step_s=None, highest_step=1, resumed_at=None, step_s=0.1)

    samples = [recovered(None), recovered(1.0), recovered(None)]
    assert record(samples, LIMIT_S)["median_s"] == 60.0
    assert record(samples, None)["median_s"] == 1.0
    assert record(samples, None)["non_recoveries"] == 2


def test_kills_are_drawn_from_the_seed_between_two_snapshots() -> None:
    drawn = [Kill.draw(random.Random(7)) for _ in range(2)]
    assert drawn[0] == drawn[1]
    randoms = random.Random(7)
    steps = {Kill.draw(randoms).after_step for _ in range(200)}
    assert steps == set(range(2 * SNAPSHOT_STEPS, 3 * SNAPSHOT_STEPS))
