"""Save on one mesh, load on another: the state is the same array by array, whoever wrote it and whoever reads it.

Rows are (load mesh, tier). The save mesh is DP 4, three steps into training; the loader saves what it has loaded, and DP 4
loads that again and goes on: bitwise as if nothing had happened. The model has a matrix large enough for ZeRO-1 to cut it, so
that the boxes of different meshes really do not match.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from engines import engine_of
from mixed import Digests, Tiers, loaded, resized, tiers_in, trained
from tiny import tiny
from world import run_world

from ftrain.checkpoint.layout import rank_layouts
from ftrain.config import Config, Model
from ftrain.load import num_parameters
from storage.manifest import Manifest
from storage.objects import open_store
from storage.pack import ArraySpec
from storage.run import RunStore

STEPS, MORE = 3, 2
WIDE = {"vocab": 17_000, "hidden": 64, "ffn": 96, "init_std": 0.02}  # embedding and head: 4.15 MiB of fp32 each


def config_of(ranks: int, *, compute_dtype: str = "float32") -> Config:
    return tiny(ranks=ranks, model=WIDE, machine={"compute_dtype": compute_dtype})


@dataclass(frozen=True)
class Saved:
    """The state that all rows begin with, and where the unbroken training went from there."""

    tiers: Tiers
    digests: Digests
    eval_loss: float
    manifest: Manifest
    later: Digests


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    tiers = tiers_in(tmp_path_factory.mktemp("saved"), "dp4")
    digests, eval_loss, manifest = trained(config_of(4), STEPS, tiers)
    later, _, _ = trained(config_of(4), STEPS + MORE)
    assert manifest is not None
    assert later != digests
    return Saved(tiers, digests, eval_loss, manifest, later)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("ranks", "source"),
    [
        (1, "storage"),
        (2, "storage"),
        (3, "storage"),
        (8, "storage"),
        (3, "memory"),
        (8, "memory"),
        pytest.param(1, "memory", marks=pytest.mark.slow),
        pytest.param(2, "memory", marks=pytest.mark.slow),
        pytest.param(5, "storage", marks=pytest.mark.slow),
        pytest.param(4, "memory", marks=pytest.mark.slow),
    ],
)
def test_save_on_dp_4_load_on_another_and_back(ranks: int, source: str, saved: Saved, tmp_path: Path) -> None:
    onward = tiers_in(tmp_path, f"dp{ranks}")
    there = loaded(config_of(ranks), source, saved.tiers, onward=onward)
    assert there.at_load == saved.digests
    assert there.eval_loss == saved.eval_loss  # bitwise: the held-out loss knows no layout
    assert there.progress == {"step": STEPS, "sequences": STEPS * 8}
    assert there.manifest is not None
    assert there.manifest.digests == saved.digests
    assert len(there.manifest.packs) == ranks
    assert {spec.name: tuple(spec.shape) for spec in there.manifest.arrays} == {
        spec.name: tuple(spec.shape) for spec in saved.manifest.arrays
    }
    back = loaded(config_of(4), source, onward, steps=MORE)
    assert back.at_load == saved.digests
    assert back.at_end == saved.later


@pytest.mark.dist
def test_the_digests_that_ranks_computed_are_those_of_the_stored_bytes(saved: Saved) -> None:
    report = RunStore(open_store(saved.tiers.url)).open().verify()
    assert report.ok
    assert report.digests == saved.manifest.digests == saved.digests


@pytest.mark.dist
def test_fp64_state_changes_its_mesh_too(tmp_path: Path) -> None:
    """8-byte elements take another way through the copy (pairs of 4-byte words beside the checksums)."""
    first, onward = tiers_in(tmp_path, "dp2"), tiers_in(tmp_path, "dp3")
    exact = config_of(2, compute_dtype="float64")
    digests, _, _ = trained(exact, 1, first)
    there = loaded(resized(exact, 3), "storage", first, onward=onward)
    assert there.at_load == digests
    assert there.manifest is not None
    assert there.manifest.digests == digests


# -- bytes ------------------------------------------------------------------------------------------------------------------

SHAPES = [
    pytest.param({"layers": 4, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "vocab": 8192}, id="even"),
    pytest.param({"layers": 3, "hidden": 520, "heads": 8, "kv_heads": 2, "ffn": 1400, "vocab": 10_007}, id="odd"),
    pytest.param({"layers": 2, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 257}, id="few-tokens"),
    pytest.param({"layers": 24, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "vocab": 4096}, id="deep"),
    pytest.param(
        {"layers": 2, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1408, "vocab": 32_000, "tied": True}, id="tied"
    ),
    pytest.param({"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128_256}, id="llama3-8b"),
]


def planned(model: dict[str, int], ranks: int) -> tuple[Config, int]:
    config = resized(config_of(1), ranks)
    config = msgspec.structs.replace(
        config, model=Model(**model), parallel=msgspec.structs.replace(config.parallel, bucket_mib=64)
    )
    return config, sum(layout.nbytes for layout in rank_layouts(config))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8, 16, 64])
@pytest.mark.parametrize("model", SHAPES)
def test_a_checkpoint_is_14_bytes_a_parameter(model: dict[str, int], ranks: int) -> None:
    """2 of the bf16 weight, 4 each of master and two moments; crcs, edges of tiles and padding together stay under 1 %."""
    config, nbytes = planned(model, ranks)
    parameters = num_parameters(config)
    assert parameters > 10**7
    assert 14 * parameters <= nbytes <= 1.01 * 14 * parameters


@pytest.mark.dist
def test_a_real_checkpoint_of_ten_million_parameters_is_as_large_as_planned(tmp_path: Path) -> None:
    """Everything in the step's folder counts: packs, manifest, Zarr view, commit."""
    config, nbytes = planned({"layers": 3, "hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 1200, "vocab": 3001}, 3)
    parameters, tiers = num_parameters(config), tiers_in(tmp_path, "large")
    assert parameters > 10**7
    _, _, manifest = trained(config, 0, tiers)
    assert manifest is not None
    assert sum(pack.nbytes for pack in manifest.packs) == nbytes
    on_disk = sum(path.stat().st_size for path in (Path(tiers.url) / "checkpoints").rglob("*") if path.is_file())
    assert 14 * parameters <= on_disk <= 1.01 * 14 * parameters


# -- the torch-free plan and the live pieces -----------------------------------------------------------------------------------


def _listed(rank: int, config: Config) -> tuple[list[object], list[ArraySpec]]:
    engine = engine_of(config, rank)
    pieces = [(piece.array, piece.box.offset, piece.box.shape, piece.dtype) for piece in engine.pieces() if piece.owner]
    return pieces, list(engine.array_specs())


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "compute_dtype"), [(3, "float32"), (8, "float64")])
def test_the_planned_parts_are_the_live_pieces_in_their_order(ranks: int, compute_dtype: str) -> None:
    """The supervisor sizes arenas by the plan, the worker copies by the pieces: one list, made twice."""
    config = config_of(ranks, compute_dtype=compute_dtype)
    for layout, (live, specs) in zip(rank_layouts(config), run_world(_listed, ranks, config), strict=True):
        plan = [(part.array, tuple(part.offset), tuple(part.shape), layout.specs[part.array].dtype) for part in layout.parts]
        assert live == plan
        assert list(layout.specs.values()) == specs
    cut = {part.array for part in layout.parts if part.shape != layout.specs[part.array].shape}
    assert any(name.startswith("master/") for name in cut), "no array is cut: the test says nothing"
