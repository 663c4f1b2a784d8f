"""What is said of a step that was done again, and when a gradient norm is not believed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import MeshShape
from ftrain.train.numerics import Bounds, Watch
from ftrain.train.replay import differing, doubt


@dataclass(frozen=True)
class Result:
    step: int = 7
    loss: float = 2.0
    grad_norm: float = 1.0
    applied: bool = True


NAN = Result(loss=math.nan, grad_norm=math.nan, applied=False)
HIGH = Result(grad_norm=1e9, applied=False)


@pytest.mark.parametrize(
    ("first", "again", "ranks", "says", "rank"),
    [
        (NAN, Result(), (3,), "was not finite, and finite when repeated: silent corruption; rank 3 computed", 3),
        (NAN, Result(), (1, 2), "silent corruption; 2 ranks computed something else", None),
        (HIGH, Result(), (0,), "norm of 1e+09, far above the usual, and another when repeated: silent corruption", 0),
        (HIGH, Result(grad_norm=1e9), (), "and the same when repeated: data or code", None),
        (NAN, NAN, (1,), "not finite in another way when repeated: silent corruption; rank 1", 1),
    ],
)
def test_what_is_said(first: Result, again: Result, ranks: tuple[int, ...], says: str, rank: int | None) -> None:
    told = doubt(first, again, ranks)
    assert told is not None
    assert says in told.reason
    assert (told.rank, told.corruption) == (rank, bool(ranks))
    assert told.onset is None


def test_what_fails_alike_is_told_when_it_has_failed_often_enough() -> None:
    assert doubt(NAN, NAN, ()) is None


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [
        ([1.0, 2.0], [1.0, 2.0], ()),
        ([1.0, 2.0], [1.0, math.nextafter(2.0, 3.0)], (0,)),
        ([math.nan, 0.0], [math.nan, 0.0], ()),  # the same bits, although not equal as numbers
        ([0.0, 1.0], [-0.0, 1.0], (0,)),
    ],
)
def test_shares_are_compared_by_their_bits(before: list[float], after: list[float], ranks: tuple[int, ...]) -> None:
    mesh = Mesh(MeshShape(), 0)
    shares = [torch.tensor(values, dtype=torch.float64) for values in (before, after)]
    assert differing(mesh, *shares) == ranks


def test_a_norm_is_believed_until_there_is_a_usual_one() -> None:
    watch = Watch(bounds=Bounds(replay_norm=20.0))
    for step in range(1, 16):
        watch.see(step=step, loss=2.0, applied=True, norm=0.5)
        assert watch.norm_limit == math.inf
    watch.see(step=16, loss=2.0, applied=True, norm=0.5)
    assert watch.norm_limit == 10.0
    watch.see(step=17, loss=2.0, applied=True, norm=1e9)
    assert watch.norm_limit == 10.0, "one that was applied after all does not move the usual"
    watch.see(step=18, loss=math.nan, applied=False, norm=math.nan)
    assert watch.norm_limit == 10.0


def test_zero_switches_the_replay_off() -> None:
    watch = Watch(bounds=Bounds(replay_norm=0.0))
    for step in range(1, 100):
        watch.see(step=step, loss=2.0, applied=True, norm=0.5)
    assert watch.norm_limit == math.inf
