"""What is left of replicas that shared weights."""

from __future__ import annotations

import pytest
from founding import ROOT

from ftrain.load import load
from ftrain.plan import elastic, profile


@pytest.mark.parametrize(
    ("left", "sharding"),
    [(3, "zero1"), (2, "fsdp")],  # 4 micro-batches: unequal shares over three, equal ones over two
)
def test_fsdp_makes_way_where_shares_would_be_unequal(left: int, sharding: str) -> None:
    overrides = ["parallel.ranks=4", "parallel.sharding=fsdp", "model.heads=3", "model.kv_heads=3", "model.hidden=66"]
    config = load(str(ROOT / "configs" / "tiny-dp2.toml"), [*overrides, "model.layers=1", "model.ffn=127"])
    chosen = elastic.best(config, left, profile.load("laptop"), known=False)
    assert chosen is not None
    assert (chosen.config.parallel.ranks, chosen.config.parallel.sharding) == (left, sharding)
