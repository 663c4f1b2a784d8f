"""Batches: what a remote store answers and what a local one reads are the same bytes, joined where they are small."""

from pathlib import Path

import numpy as np
import pytest

from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.errors import Damaged
from storage.fetch import Batch, fetch, tile_blocks
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.merge import merge
from storage.objects import ObjectStore
from storage.pack import ArraySpec
from storage.reshard import ReadLimits, plan_reads
from tests.storage.building import build_pack, deal, random_values

SPEC = ArraySpec(name="x", shape=(64, 96), dtype="float32", tile=(4, 8))
VALUES = random_values({"x": SPEC}, 5)
LIMITS = ReadLimits(gap_bytes=0, max_waste=0.0, range_bytes=1000)
COLUMNS = Box((3, 20), (50, 30))


@pytest.fixture(params=["memory", "local"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    store: ObjectStore = MemoryStore() if request.param == "memory" else LocalStore(str(tmp_path))
    deliveries = []
    for number, hand in enumerate(deal({"x": SPEC}, 3)):
        data, delivery = build_pack({"x": SPEC}, VALUES, hand, f"p{number}.pack")
        store.put(f"p{number}.pack", data)
        deliveries.append(delivery)
    return Checkpoint(store, merge(deliveries, step=1, epoch=0, attempt=0, progress={}, created_s=0.0))


def test_each_range_comes_once_in_order_with_its_own_bytes(checkpoint: Checkpoint) -> None:
    store, manifest = checkpoint.store, checkpoint.manifest
    plan = plan_reads(manifest, [("x", COLUMNS)], limits=LIMITS)
    assert len(plan.ranges) > 10
    seen = []
    for batch in fetch(store, manifest, plan.ranges, prefix="", scratch_bytes=5000):
        for planned, start in batch.placed:
            name = manifest.packs[planned.pack].name
            assert batch.bytes_of(planned, start).tobytes() == store.get(name)[planned.start : planned.stop]
            assert batch.origin(start) == (planned.pack, planned.start)
            assert batch.origin(start + 3) == (planned.pack, planned.start + 3)
            seen.append(planned)
    assert seen == list(plan.ranges)


def test_a_column_of_tiles_becomes_one_block(checkpoint: Checkpoint) -> None:
    plan = plan_reads(checkpoint.manifest, [("x", Box((0, 16), (64, 24)))], limits=LIMITS)
    batches = list(fetch(checkpoint.store, checkpoint.manifest, plan.ranges, prefix="", scratch_bytes=1 << 20))
    shapes = [block.shape for batch in batches for block in tile_blocks(batch, plan.parts)]
    assert shapes == [(5, 3), (5, 3), (6, 3)]


@pytest.mark.parametrize("scratch_bytes", [1, 700, 5000])
def test_blocks_cover_each_wanted_chunk_once(checkpoint: Checkpoint, scratch_bytes: int) -> None:
    plan = plan_reads(checkpoint.manifest, [("x", COLUMNS), ("x", Box((0, 0), (1, 96)))], limits=LIMITS)
    cells: list[tuple[int, int]] = []
    for batch in fetch(checkpoint.store, checkpoint.manifest, plan.ranges, prefix="", scratch_bytes=scratch_bytes):
        for block in tile_blocks(batch, plan.parts):
            corner = [o // t for o, t in zip(plan.parts[block.part].box.offset, SPEC.tile, strict=True)]
            first = [c + f for c, f in zip(corner, block.first, strict=True)]
            cells += [(first[0] + i, first[1] + j) for i in range(block.shape[0]) for j in range(block.shape[1])]
    wanted = {(i, j) for i in range(14) for j in range(2, 7)} | {(0, j) for j in range(12)}
    assert len(cells) == len(set(cells))
    assert set(cells) == wanted


def test_damage_inside_a_joined_batch_is_found_where_it_is(checkpoint: Checkpoint) -> None:
    pack, part = list(checkpoint.manifest.parts)[1]
    stride = 4 * 8 * 4 + 4
    at = part.position + (2 * 12 + 3) * stride  # third row of tiles, fourth column
    data = bytearray(checkpoint.store.get(pack.name))
    data[at + 5] ^= 1
    checkpoint.store.put(pack.name, bytes(data))
    with pytest.raises(Damaged) as caught:
        checkpoint.read("x", COLUMNS)
    assert (caught.value.pack, caught.value.offset) == (pack.name, at)
    np.testing.assert_array_equal(checkpoint.read("x", Box((0, 0), (64, 24))).view(np.uint32), VALUES["x"][:, :24])


def test_an_empty_plan_is_no_batch(checkpoint: Checkpoint) -> None:
    assert list[Batch](fetch(checkpoint.store, checkpoint.manifest, [], prefix="", scratch_bytes=1)) == []
