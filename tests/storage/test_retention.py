"""Retention policies: plain functions of plain facts."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.retention import (
    CheckpointFacts,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPinned,
    KeepUpTo,
    KeepYoung,
    RetentionPolicy,
    kept_steps,
)

FACTS = [
    CheckpointFacts(step=10, created_s=100.0, metric=3.0),
    CheckpointFacts(step=20, created_s=200.0, metric=1.0),
    CheckpointFacts(step=30, created_s=300.0, metric=None),
    CheckpointFacts(step=40, created_s=400.0, metric=1.0),
    CheckpointFacts(step=50, created_s=500.0, metric=math.nan),
]


@pytest.mark.parametrize(
    ("policies", "kept"),
    [
        pytest.param([], {10, 20, 30, 40, 50}, id="no policy, no deletion"),
        pytest.param([KeepLast(2)], {40, 50}, id="last"),
        pytest.param([KeepLast(9)], {10, 20, 30, 40, 50}, id="last of fewer"),
        pytest.param([KeepLast(0)], {50}, id="never none"),
        pytest.param([KeepEvery(20)], {20, 40, 50}, id="every"),
        pytest.param([KeepBest(1)], {40, 50}, id="best, of equals the later"),
        pytest.param([KeepBest(9)], {10, 20, 40, 50}, id="best of those that have a metric"),
        pytest.param([KeepBest(1, mode="highest")], {10, 50}, id="highest"),
        pytest.param([KeepYoung(250.0)], {40, 50}, id="young"),
        pytest.param([KeepPinned(frozenset({10, 11}))], {10, 50}, id="pinned"),
        pytest.param([KeepLast(1), KeepUpTo(20)], {10, 20, 50}, id="up to a step"),
        pytest.param([KeepLast(1), KeepEvery(30), KeepBest(2)], {20, 30, 40, 50}, id="any of them"),
    ],
)
def test_what_is_kept(policies: list[RetentionPolicy], kept: set[int]) -> None:
    assert kept_steps(policies, FACTS, now_s=600.0) == kept


@given(st.sets(st.integers(0, 99), min_size=1), st.integers(0, 5), st.integers(1, 9), st.integers(0, 3))
def test_the_newest_stays_and_another_policy_never_keeps_less(steps: set[int], last: int, every: int, best: int) -> None:
    facts = [CheckpointFacts(step, float(step), float(step % 7)) for step in steps]
    policies: list[RetentionPolicy] = [KeepLast(last), KeepEvery(every), KeepBest(best)]
    kept = [kept_steps(policies[: n + 1], facts, now_s=0.0) for n in range(3)]
    assert all(max(steps) in k for k in kept)
    assert kept[0] <= kept[1] <= kept[2] <= steps
