"""Blends: the weights are met exactly, every index of every source comes once, and any position can be asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data.blend import LONGEST_PERIOD, Blend, quotas

weights = st.lists(st.sampled_from([0.1, 0.25, 0.3, 0.5, 1.0, 2.0, 3.0, 7.0, 50.0]), min_size=1, max_size=5)
wild = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("given_weights", "places"),
    [
        ([1.0], (1,)),
        ([3.5], (1,)),
        ([0.7, 0.3], (7, 3)),
        ([2.0, 1.0], (2, 1)),
        ([50, 25, 17, 8], (50, 25, 17, 8)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
    ],
)
def test_quotas_are_the_weights_in_lowest_terms(given_weights: list[float], places: tuple[int, ...]) -> None:
    assert quotas(given_weights) == places


@given(wild)
def test_rounded_quotas_are_within_one_place(given_weights: list[float]) -> None:
    places = quotas(given_weights)
    period, total = sum(places), sum(given_weights)
    assert min(places) >= 1
    assert period <= LONGEST_PERIOD + len(places)
    for place, weight in zip(places, given_weights, strict=True):
        # one place for the rounding, and at most one for each source that was lifted to its first place
        assert abs(place - weight / total * period) <= 1 + len(places)


@given(weights, st.integers(0, 2**63), st.integers(1, 4))
def test_each_index_of_each_source_comes_once_and_in_order(given_weights: list[float], key: int, periods: int) -> None:
    blend = Blend(given_weights, key)
    sources, indices = blend.locate(np.arange(periods * blend.period))
    for number, quota in enumerate(blend.quotas):
        assert indices[sources == number].tolist() == list(range(periods * quota))  # ascending, none left out


@given(weights, st.integers(0, 2**63), st.integers(0, 2**50), st.integers(1, 300), st.data())
def test_any_cut_gives_the_same(given_weights: list[float], key: int, first: int, count: int, data: st.DataObject) -> None:
    blend = Blend(given_weights, key)
    cut = data.draw(st.integers(0, count))
    whole = blend.locate(np.arange(first, first + count))
    parts = [blend.locate(np.arange(first, first + cut)), blend.locate(np.arange(first + cut, first + count))]
    for column in (0, 1):
        assert whole[column].tolist() == np.concatenate([part[column] for part in parts]).tolist()


def test_shares_are_exact_in_the_long_run_and_close_in_the_short() -> None:
    blend = Blend([0.7, 0.2, 0.1], 5)
    sources, _ = blend.locate(np.arange(100_000))
    assert np.bincount(sources).tolist() == [70_000, 20_000, 10_000]
    assert np.bincount(sources[123:133], minlength=3).sum() == 10
    far, _ = blend.locate(np.arange(10**12, 10**12 + 1000))
    assert np.bincount(far).tolist() == [700, 200, 100]
    running = np.cumsum(sources == 0) - 0.7 * np.arange(1, 100_001)
    assert np.abs(running).max() <= 7  # never further off than one period's quota


def test_the_places_within_a_period_vary() -> None:
    sources, _ = Blend([0.5, 0.5], 0).locate(np.arange(64))
    assert len({tuple(pair) for pair in sources.reshape(-1, 2).tolist()}) == 2


@pytest.mark.parametrize("wrong", [[], [0.0], [1.0, -1.0]])
def test_weights_must_be_above_zero(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="above zero"):
        quotas(wrong)
