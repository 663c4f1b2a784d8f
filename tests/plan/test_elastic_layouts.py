"""The layout for what is left: legal, fitting, nearest of equals, and the best by the planner's own clock."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from ftrain.combinations import combinations
from ftrain.config import Batch, Config, Data, Machine, Model, Optimizer, Parallel, Run, Source
from ftrain.parallel.shape import mesh_shape
from ftrain.plan import profile
from ftrain.plan.elastic import best, rate


def config(ranks: int, *, tp: int = 1, pp: int = 1, batch: int = 16, layers: int = 4, heads: int = 4) -> Config:
    return Config(
        run=Run(url="x", steps=1),
        model=Model(layers=layers, hidden=64, heads=heads, ffn=128, vocab=257),
        data=Data(sources=(Source(path="stdlib"),), seq_len=64),
        batch=Batch(global_batch=batch, micro_batch=1),
        optimizer=Optimizer(lr=1e-3),
        parallel=Parallel(ranks=ranks, tp=tp, pp=pp),
        machine=Machine(device="cpu"),
    )


LAPTOP = profile.load("laptop")


def layout(found: object) -> str:
    assert found is not None
    return str(mesh_shape(found.config))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ranks", "left", "expected", "share"),
    [
        (8, 7, "tp1 x cp1 x pp1 x dp7", 2 / 3),  # the busiest replica has 3 micro-batches instead of 2
        (8, 6, "tp1 x cp1 x pp1 x dp6", 2 / 3),
        (4, 3, "tp1 x cp1 x pp1 x dp3", 4 / 6),
        (2, 1, "tp1 x cp1 x pp1 x dp1", 1 / 2),
    ],
)
def test_replicas_are_lost_one_by_one(ranks: int, left: int, expected: str, share: float) -> None:
    found = best(config(ranks), left, LAPTOP, known=False)
    assert layout(found) == expected
    assert found is not None
    assert found.tokens_per_s == pytest.approx(share)


def test_ranks_that_do_not_make_a_replica_stand_idle_or_the_cut_changes() -> None:
    """Of 7 places tensor parallelism of two can use 6; a replica a rank can use all and is no faster: the nearest is taken."""
    found = best(config(8, tp=2), 7, LAPTOP, known=False)
    assert layout(found) == "tp2 x cp1 x pp1 x dp3"


def test_what_is_found_is_legal_and_trains_the_same() -> None:
    start = config(8, tp=2, pp=2)
    for left in range(1, 8):
        found = best(start, left, LAPTOP, known=False)
        assert found is not None
        assert found.config.parallel.ranks <= left
        assert combinations(found.config) == []
        assert replace(found.config, parallel=start.parallel) == start, "only the cut changes"


def test_too_few_are_refused() -> None:
    assert best(config(8), 3, LAPTOP, least_ranks=4, known=False) is None
    assert best(config(8), 0, LAPTOP, known=False) is None


def test_a_model_that_does_not_fit_any_more_is_cut_finer_or_refused() -> None:
    """With known hardware memory counts: 8 B parameters do not fit on one 80 GB card, whatever is recomputed."""
    from ftrain.load import load

    model = load("configs/llama3-8b.toml")
    h100 = profile.load("h100")
    assert best(model, 1, h100) is None
    found = best(model, 7, h100)
    assert found is not None
    assert found.config.parallel.ranks <= 7


def test_known_hardware_ranks_by_the_predicted_step() -> None:
    from ftrain.load import load

    model, h100 = load("configs/llama3-8b.toml"), profile.load("h100")
    found = best(model, 15, h100)
    assert found is not None
    others = [replace(model, parallel=replace(model.parallel, ranks=8, tp=tp, pp=1)) for tp in (1, 2, 8)]
    assert rate(found.config, h100) >= max(rate(other, h100) for other in others)
    assert not math.isnan(found.tokens_per_s)
