"""The plan's traffic against bytes counted on running ranks, below the engine, for layouts of every kind: within 1 %.

All layouts of one number of ranks share a world. Sizes divide evenly, so that nothing is left to chance but what the plan says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted import Counted

from ftrain.config import Config
from ftrain.parallel.mesh import members
from ftrain.parallel.shape import MeshShape, mesh_shape
from ftrain.plan import profile
from ftrain.plan.ring import Volume
from ftrain.plan.setup import Setup, options_of
from ftrain.plan.volume import volumes
from tests.engines import engine_of
from tests.layouts import laid_out
from tests.tiny import tiny
from tests.world import run_world

EXPERTS = {"experts": 4, "experts_per_token": 2, "ffn": 64}
CASES: dict[str, dict[str, Any]] = {
    "tp2": {"ranks": 2, "tp": 2},
    "tp2, no sp": {"ranks": 2, "tp": 2, "sp": False},
    "tp2, no regather": {"ranks": 2, "tp": 2, "sp_regather": False},
    "tp2, full": {"ranks": 2, "tp": 2, "recompute": "full"},
    "tp2, no sp, full, bf16": {"ranks": 2, "tp": 2, "sp": False, "recompute": "full", "dtype": "bfloat16"},
    "tp2, bf16": {"ranks": 2, "tp": 2, "dtype": "bfloat16"},
    "tp2, experts": {"ranks": 2, "tp": 2, "model": EXPERTS},
    "tp2, experts, no sp": {"ranks": 2, "tp": 2, "sp": False, "model": EXPERTS},
    "tp2, experts, full, bf16": {"ranks": 2, "tp": 2, "recompute": "full", "model": EXPERTS, "dtype": "bfloat16"},
    "cp2": {"ranks": 2, "cp": 2},
    "cp2, ring": {"ranks": 2, "cp": 2, "cp_exchange": "ring"},
    "cp2, ring, selective, bf16": {
        "ranks": 2,
        "cp": 2,
        "cp_exchange": "ring",
        "recompute": "selective",
        "dtype": "bfloat16",
    },
    "cp2, experts, full": {"ranks": 2, "cp": 2, "recompute": "full", "model": EXPERTS},
    "dp2": {"ranks": 2},
    "dp2, overlaps": {"ranks": 2, "overlap_reduce": True, "overlap_gather": True},
    "fsdp2": {"ranks": 2, "sharding": "fsdp"},
    "ep2": {"ranks": 2, "ep": 2, "model": EXPERTS},
    "ep2, full": {"ranks": 2, "ep": 2, "recompute": "full", "model": EXPERTS},
    "pp2": {"ranks": 2, "pp": 2},
    "pp2, tied": {"ranks": 2, "pp": 2, "model": {"tied": True}},
    "pp2, interleaved": {"ranks": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "pp2, zb_v": {"ranks": 2, "pp": 2, "schedule": "zb_v"},
    "tp4": {"ranks": 4, "tp": 4},
    "tp4, one kv head": {"ranks": 4, "tp": 4, "model": {"kv_heads": 1, "qk_norm": True}},
    "pp4": {"ranks": 4, "pp": 4},
    "pp4, tied": {"ranks": 4, "pp": 4, "model": {"tied": True}},
    "tp2 pp2": {"ranks": 4, "tp": 2, "pp": 2},
    "tp2 dp2": {"ranks": 4, "tp": 2},
    "cp2 dp2": {"ranks": 4, "cp": 2},
    "cp4, ring": {"ranks": 4, "cp": 4, "cp_exchange": "ring"},
    "dp4 ep2": {"ranks": 4, "ep": 2, "model": EXPERTS},
    "pp2 dp2, tied": {"ranks": 4, "pp": 2, "model": {"tied": True, "vocab": 32_768}},  # a small one is not cut over replicas
    "fsdp4": {"ranks": 4, "sharding": "fsdp"},
    "tp2 fsdp2": {"ranks": 4, "tp": 2, "sharding": "fsdp"},
    "hsdp": {"ranks": 4, "sharding": "hsdp", "fsdp_inner": 2},
    "hfsdp": {"ranks": 4, "sharding": "hfsdp", "fsdp_inner": 2},
}
QUICK = ("tp2", "tp2, experts", "cp2", "dp2", "fsdp2", "ep2", "pp2, tied")


def config_of(case: dict[str, Any]) -> Config:
    model = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 192, "vocab": 512} | case.get("model", {})
    machine = {"compute_dtype": case.get("dtype", "float32"), "device": "cpu"}
    config = tiny(model=model, data={"seq_len": 64}, batch={"global_batch": 4}, machine=machine)
    return laid_out(config, bucket_mib=4, **{name: value for name, value in case.items() if name not in ("model", "dtype")})


def _sent(rank: int, configs: list[Config]) -> list[dict[tuple[int, ...], float]]:
    """What a rank sends in an update, by the ranks of the group."""
    return [_of(rank, config) for config in configs]


def _of(rank: int, config: Config) -> dict[tuple[int, ...], float]:
    engine = engine_of(config, rank)
    if config.model.experts:
        engine.passes.choose = lambda microbatch, layer, chosen: _evenly(chosen, config.model.experts)
    with Counted() as counted:
        engine.train_step(step=1, first_sequence=0)
        engine.optimizer.finish()
    return dict(counted.sent)


def _evenly(chosen: Any, experts: int) -> Any:
    """Every expert as often as any other: what the plan assumes."""
    return torch.arange(chosen.numel()).view(chosen.shape) % experts


def planned(config: Config) -> tuple[Volume, ...]:
    setup = Setup(config=config, profile=profile.load("laptop"), options=options_of(config))
    return volumes(setup, aligned=True)


def group_of(shape: MeshShape, rank: int, volume: Volume) -> tuple[int, ...]:
    """The ranks that a volume of the plan is exchanged among, as the mesh has them."""
    them = members(shape, rank, volume.axes)
    if volume.run:
        first = them.index(rank) // volume.run * volume.run
        return them[first : first + volume.run]
    return them[them.index(rank) % volume.step :: volume.step]


def deviations(config: Config, found: list[dict[tuple[int, ...], float]]) -> dict[str, float]:
    """Kind of group -> planned over counted, minus 1. Kinds that talk among the same ranks are counted together."""
    shape, said = mesh_shape(config), planned(config)
    together: dict[tuple[int, ...], list[Volume]] = {}
    for volume in said:
        together.setdefault(group_of(shape, 0, volume), []).append(volume)
    worst = {}
    for kinds in together.values():
        counted = max(sent.get(group_of(shape, rank, kinds[0]), 0.0) for rank, sent in enumerate(found))
        assert counted > 0, [kind.name for kind in kinds]
        worst[" + ".join(kind.name for kind in kinds)] = float(sum(kind.nbytes for kind in kinds)) / counted - 1
    for rank, sent in enumerate(found):
        known = {group_of(shape, rank, volume) for volume in said}
        rest = sum(nbytes for ranks, nbytes in sent.items() if ranks not in known)
        assert rest <= 0.001 * sum(sent.values()), "something is sent that the plan has no group for"
    return worst


def check(names: tuple[str, ...]) -> None:
    configs = [config_of(CASES[name]) for name in names]
    ranks = configs[0].parallel.ranks
    worlds = run_world(_sent, ranks, configs)
    for index, (name, config) in enumerate(zip(names, configs, strict=True)):
        errors = deviations(config, [world[index] for world in worlds])
        assert {kind: error for kind, error in errors.items() if abs(error) > 0.01} == {}, name


@pytest.mark.dist
def test_what_is_sent_is_what_was_planned() -> None:
    check(QUICK)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_sent_is_what_was_planned_under_every_layout(ranks: int) -> None:
    check(tuple(name for name, case in CASES.items() if case["ranks"] == ranks))
