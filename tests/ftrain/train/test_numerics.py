"""Bad steps: counted, told from good ones by a robust yardstick, and dated to their onset."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.train.numerics import SIGMA, Bounds, Watch, deviation


def watched(losses: list[float], **bounds: float) -> list[tuple[int, int]]:
    """(onset, step) of every trouble seen."""
    watch = Watch(bounds=Bounds(**bounds))  # type: ignore[arg-type]
    found = [watch.see(step=step, loss=loss, applied=math.isfinite(loss)) for step, loss in enumerate(losses, 1)]
    return [(it.onset, it.step) for it in found if it is not None]


def test_nonfinite_steps_count_only_in_a_row() -> None:
    nan = math.nan
    assert watched([1.0, nan, nan, 1.0, nan, nan, 1.0]) == []
    assert watched([1.0, nan, nan, nan]) == [(2, 4)]
    assert watched([nan] * 100, nonfinite_steps=0) == []


def test_a_skipped_update_is_one_even_if_the_loss_is_finite() -> None:
    watch = Watch(bounds=Bounds(nonfinite_steps=1))
    trouble = watch.see(step=7, loss=2.0, applied=False)
    assert trouble is not None
    assert "not finite in 1 consecutive steps" in trouble.reason


def test_a_lasting_spike_is_dated_to_its_onset_and_a_short_one_is_none() -> None:
    calm = [2.0 + 0.01 * (step % 5) for step in range(40)]
    assert watched([*calm, *[9.0] * 9, *calm], spike_steps=10) == []
    assert watched([*calm, *[9.0] * 10], spike_steps=10) == [(41, 50)]
    assert watched([*calm, *[9.0] * 50], spike_z=0) == []


@pytest.mark.parametrize(
    ("losses", "bounds", "since"),
    [
        ([9.0, 9.0], {}, 41),
        ([9.0, 9.0, 2.0], {}, None),
        ([9.0], {"spike_z": 0.0}, None),
        ([math.nan, math.nan], {}, 41),
        ([math.nan], {"nonfinite_steps": 0}, None),
    ],
)
def test_bad_steps_are_told_before_it_is_certain_that_they_are_trouble(
    losses: list[float], bounds: dict[str, float], since: int | None
) -> None:
    watch = Watch(bounds=Bounds(**bounds))  # type: ignore[arg-type]
    seen = [*(2.0 + 0.01 * (step % 5) for step in range(40)), *losses]
    for step, loss in enumerate(seen, 1):
        watch.see(step=step, loss=loss, applied=math.isfinite(loss))
    assert watch.bad_since(len(seen)) == since


def test_the_deviation_is_that_of_the_median() -> None:
    window = deque([1.0] * 8 + [2.0] * 8 + [4.0])  # median 2, absolute deviations: 8 of 0, 8 of 1, one 2 -> median 1
    window.remove(2.0)
    window.append(3.0)  # 8 of 1, 7 of 2, 3, 4: median 2; deviations 7 of 0, 9 of 1, one 2 -> median 1
    assert deviation(2.0 + 3 * SIGMA, window) == pytest.approx(3.0)
    assert deviation(5.0, deque([1.0] * 15)) is None
    assert deviation(1.05, deque([1.0] * 16)) == pytest.approx(5.0)  # no spread: a hundredth of the median counts as one


@given(
    window=st.lists(st.floats(-20.0, 20.0), min_size=16, max_size=64).map(deque),
    loss=st.floats(-20.0, 200.0),
    least=st.floats(0.0, 20.0),
)
def test_what_the_median_alone_tells_is_true(window: deque[float], loss: float, least: float) -> None:
    z, told = deviation(loss, window), deviation(loss, window, least=least)
    assert z is not None
    assert told == z or (told is None and z < least + 1e-9)


@given(
    start=st.floats(1.0, 20.0),
    noise=st.lists(st.floats(-0.2, 0.2), min_size=30, max_size=200),
    rate=st.floats(0.9, 1.0),
)
def test_ordinary_training_is_never_trouble(start: float, noise: list[float], rate: float) -> None:
    assert watched([1.0 + start * rate**step + wobble for step, wobble in enumerate(noise)]) == []
