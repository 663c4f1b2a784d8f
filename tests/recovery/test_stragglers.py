"""The slow rank is named after several windows, once, and not for one bad window."""

from __future__ import annotations

import pytest

from recovery.heartbeat import Beat
from recovery.stragglers import WINDOW_STEPS, WINDOWS, Slowest, Stragglers


def windows(*shares: tuple[float, ...]) -> tuple[Stragglers, list[Slowest]]:
    """Pages at the ends of windows in which each rank computed so many seconds a step."""
    watch, told = Stragglers(), []
    busy = [0.0] * len(shares[0])
    for number, share in enumerate([(0.0,) * len(busy), *shares]):
        busy = [before + seconds * WINDOW_STEPS for before, seconds in zip(busy, share, strict=True)]
        page = [
            Beat(rank=rank, attempt=0, step=1 + number * WINDOW_STEPS, phase="reduce", busy_s=seconds)
            for rank, seconds in enumerate(busy)
        ]
        found = watch.see(page)
        told += [found] if found else []
    return watch, told


def test_a_lasting_straggler_is_told_once() -> None:
    watch, told = windows(*[(0.1, 0.1, 0.3, 0.1)] * (WINDOWS + 3))
    assert [(it.rank, it.ratio, it.step_s) for it in told] == [(2, pytest.approx(3.0), pytest.approx(0.3))]
    assert watch.slowest is not None
    assert watch.slowest.lasting
    assert "rank 2 computes 3.00 times as long" in told[0].describe()


def test_one_bad_window_and_changing_ranks_are_no_straggler() -> None:
    calm, bad, other = (0.1, 0.1, 0.1), (0.1, 0.1, 0.9), (0.9, 0.1, 0.1)
    assert windows(calm, bad, bad, calm, bad, bad)[1] == []
    assert windows(bad, other, bad, other, bad, other)[1] == []


def test_of_two_ranks_the_faster_is_the_yardstick() -> None:
    watch, _ = windows((0.1, 0.2))
    assert watch.slowest == Slowest(rank=1, ratio=pytest.approx(2.0), step_s=pytest.approx(0.2))


def test_a_rank_alone_is_never_slow() -> None:
    watch, told = windows(*[(0.1,)] * 5)
    assert (watch.slowest, told) == (None, [])


def test_of_ranks_whose_computing_time_nobody_knows_none_is_the_slowest() -> None:
    watch = Stragglers()
    for step in (1, 1 + WINDOW_STEPS):
        assert watch.see([Beat(rank=rank, attempt=0, step=step, phase="step") for rank in (0, 1)]) is None
    assert watch.slowest is None
