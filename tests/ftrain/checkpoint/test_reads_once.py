"""All ranks of a load together read each chunk about once: what would be saved by reading once and exchanging is not there.

On the boxes of `parallel.layout`, through the manifest and the planner of every load (ADR 0006).
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest

from ftrain.checkpoint.layout import rank_layout, rank_layouts
from ftrain.config import Config
from ftrain.load import parse
from ftrain.parallel import arrays, buckets
from ftrain.parallel.shape import mesh_shape
from storage import pack
from storage.box import Box
from storage.manifest import Manifest, PackInfo, PackManifest
from storage.merge import merge
from storage.reader import LIMITS
from storage.reshard import plan_reads

BASE = """
run = {url = "x", steps = 10}
model = {layers = 4, hidden = 1024, heads = 8, ffn = 2816, vocab = 4096}
data = {sources = [{path = "stdlib"}], seq_len = 64}
batch = {global_batch = 48}
optimizer = {lr = 1}
"""

LAYOUTS = {
    "one": {},
    "dp8": {"ranks": 8},
    "dp3": {"ranks": 3},
    "tp4": {"ranks": 4, "tp": 4},
    "tp8": {"ranks": 8, "tp": 8},
    "pp2 dp4": {"ranks": 8, "pp": 2},
    "tp2 pp2 dp2": {"ranks": 8, "tp": 2, "pp": 2},
    "tp4 dp2": {"ranks": 8, "tp": 4},
}


def laid_out(name: str) -> Config:
    return parse(BASE, [f"parallel.{key}={value}" for key, value in LAYOUTS[name].items()])


def boxes_of(config: Config) -> list[list[tuple[str, Box]]]:
    """What each rank loads: masters and moments of its shard. Weights are made from them."""
    return [
        [(part.array, part.box) for part in layout.parts if not part.array.startswith("weights/")]
        for layout in rank_layouts(config)
    ]


def manifest_of(config: Config) -> Manifest:
    packs = []
    for rank, layout in enumerate(rank_layouts(config)):
        info = PackInfo(name=f"e0000-a0000-r{rank:05d}.pack", nbytes=layout.nbytes)
        packs.append(PackManifest(pack=info, arrays=list(layout.specs.values()), parts=list(layout.parts), digests={}))
    return merge(packs, step=1, epoch=0, attempt=0, progress={}, created_s=0.0)


def read_over_needed(manifest: Manifest, config: Config) -> float:
    """Bytes that all ranks read, over the bytes of the masters and moments."""
    plans = [plan_reads(manifest, wants, limits=LIMITS) for wants in boxes_of(config) if wants]
    state = sum(spec.nbytes for spec in manifest.arrays if not spec.name.startswith("weights/"))
    return sum(plan.read_bytes for plan in plans) / state


EXPERTS = ("model.experts=4", "parallel.ranks=8", "parallel.tp=2")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("parallel.ranks=3",), id="dp3"),
        pytest.param(("parallel.ranks=8", "parallel.tp=2", "parallel.pp=2"), id="tp2 pp2 dp2"),
        pytest.param((*EXPERTS, "parallel.ep=2"), id="tp2 dp4 ep2"),
        pytest.param(
            (*EXPERTS, "parallel.cp=2", "parallel.ep=4", "parallel.order=['dp', 'tp', 'cp', 'pp']"), id="dp2 tp2 cp2 ep4"
        ),
    ],
)
def test_what_places_have_in_common_is_planned_once_for_all(overrides: tuple[str, ...]) -> None:
    config = parse(BASE, list(overrides))
    assert list(rank_layouts(config)) == [rank_layout(config, place) for place in mesh_shape(config).coordinates()]


def test_layers_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `ftrain doctor` and every start ask of thousands of layers: what one is like is found out for all of them."""
    calls: Counter[str] = Counter()

    def counted(module: ModuleType, name: str) -> None:
        call = getattr(module, name)

        def count(*given: object, **more: object) -> object:
            calls[name] += 1
            return call(*given, **more)

        monkeypatch.setattr(module, name, count)

    counted(arrays, "tile_shape")
    counted(buckets, "_try_fit")
    counted(pack, "off_grid")

    def work(layers: int) -> Counter[str]:
        for kept in (arrays._tile, buckets._fit, buckets._padding):
            kept.cache_clear()
        calls.clear()
        settings = [f"model.layers={layers}", "parallel.ranks=2", "parallel.tp=2", "parallel.bucket_mib=1"]
        assert len(list(rank_layouts(parse(BASE, settings)))) == 2
        return calls.copy()

    few, many = work(4), work(64)
    assert many == few
    assert set(few) == {"tile_shape", "_try_fit", "off_grid"}


@pytest.mark.parametrize("saved", ["one", "dp3", "tp4", "tp2 pp2 dp2"])
def test_all_ranks_together_read_the_state_about_once(saved: str) -> None:
    manifest = manifest_of(laid_out(saved))
    found = {loaded: read_over_needed(manifest, laid_out(loaded)) for loaded in LAYOUTS}
    assert max(found.values()) <= 1.1, found
    assert min(found.values()) >= 1.0
