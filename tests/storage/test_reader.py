"""Reading: any boxes from any boxes, each chunk once, nothing that fails its checksum."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.errors import CoverageError, Damaged, ObjectMissing
from storage.manifest import Manifest
from storage.memory import MemoryStore
from storage.merge import merge
from storage.objects import ByteRange
from storage.pack import ArraySpec
from storage.reader import LIMITS, Want
from storage.reshard import ReadLimits, plan_reads, rectangles
from tests.storage.building import SPECS, build_pack, deal, random_values
from tests.storage.strategies import boxes

VALUES = random_values(SPECS, seed=1)


class CountingStore(MemoryStore):
    """Remembers which bytes were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, ByteRange]] = []

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        self.asked.append((key, rng))
        return super().get_range(key, rng)


def stored(specs: dict[str, ArraySpec], values: dict[str, np.ndarray], writers: int, dim: int = 0) -> Checkpoint:
    store, deliveries = CountingStore(), []
    for number, hand in enumerate(deal(specs, writers, dim)):
        data, delivery = build_pack(specs, values, hand, f"p{number}.pack")
        store.put(f"here/p{number}.pack", data)
        deliveries.append(delivery)
    return Checkpoint(store, merge(deliveries, step=1, epoch=0, attempt=0, progress={}, created_s=0.0), "here/")


@pytest.fixture(scope="module")
def saved() -> dict[tuple[int, int], Checkpoint]:
    return {(writers, dim): stored(SPECS, VALUES, writers, dim) for writers in (1, 2, 3, 5) for dim in (0, 1)}


@given(st.data(), st.sampled_from([(w, d) for w in (1, 2, 3, 5) for d in (0, 1)]))
@settings(max_examples=150)
def test_any_boxes_from_any_boxes(
    saved: dict[tuple[int, int], Checkpoint], data: st.DataObject, layout: tuple[int, int]
) -> None:
    """Several wants, overlapping or not, into destinations that are slices of larger arrays."""
    wants, expected = [], []
    for name in data.draw(st.lists(st.sampled_from(sorted(SPECS)), min_size=1, max_size=4)):
        box = data.draw(boxes(SPECS[name].shape))
        wide = np.full([2 * n for n in box.shape], 0xEE, dtype=f"<u{SPECS[name].itemsize}")
        destination = wide[(*(slice(1, 2 * n, 2) for n in box.shape), ...)] if box.ndim else wide
        wants.append(Want(name, box, destination))
        expected.append((VALUES[name][(*box.slices(), ...)], wide))
    saved[layout].load(wants)
    for want, (values, wide) in zip(wants, expected, strict=True):
        np.testing.assert_array_equal(want.destination, values)
        if want.box.ndim:
            assert (wide[(slice(0, None, 2),)] == wide.dtype.type(0xEE)).all()


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_run_of_chunks_is_cut_into_rectangles_in_order(grid: list[int], data: st.DataObject) -> None:
    total = int(np.prod(grid))
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    numbers = np.arange(total).reshape(grid)
    found = []
    for start, shape in rectangles(first, count, grid):
        found += numbers[tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))].reshape(-1).tolist()
    assert found == list(range(first, first + count))


def test_every_chunk_is_read_once_however_many_want_it(saved: dict[tuple[int, int], Checkpoint]) -> None:
    checkpoint = saved[3, 0]
    store = checkpoint.store
    assert isinstance(store, CountingStore)
    store.asked.clear()
    whole = Box.whole((12, 10))
    wants = [Want("master/layers.0.wq", whole, np.empty((12, 10), np.float32)) for _ in range(3)]
    wants.append(Want("master/layers.0.wq", Box((3, 3), (5, 5)), np.empty((5, 5), np.float32)))
    report = checkpoint.load(wants)
    seen: set[tuple[str, int]] = set()
    for key, rng in store.asked:
        span = {(key, b) for b in range(rng.start, rng.stop)}
        assert not span & seen
        seen |= span
    assert report.read_bytes == len(seen)
    assert report.num_chunks == 12
    assert report.wanted_bytes == 3 * 480 + 100


def large(dtype: str = "float32") -> tuple[ArraySpec, np.ndarray]:
    spec = ArraySpec(name="x", shape=(4096, 1376), dtype=dtype, tile=(8, 344))
    return spec, random_values({"x": spec}, seed=2)["x"]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_column_slice_of_a_row_cut_array_reads_little_more_than_it_needs(tp: int) -> None:
    spec, values = large()
    checkpoint = stored({"x": spec}, {"x": values}, writers=4)
    width = 1376 // tp
    for start in range(0, 1376, width):
        destination = np.empty((4096, width), np.uint32)
        report = checkpoint.load([Want("x", Box((0, start), (4096, width)), destination)])
        np.testing.assert_array_equal(destination, values[:, start : start + width])
        assert report.read_bytes <= 1.1 * report.wanted_bytes


def test_ranges_stay_within_their_limits() -> None:
    spec, values = large()
    manifest = stored({"x": spec}, {"x": values}, writers=3).manifest
    for gap, waste, size in itertools.product((0, 1 << 20), (0.0, 0.5), (1, 50_000, 1 << 20)):
        limits = ReadLimits(gap_bytes=gap, max_waste=waste, range_bytes=size)
        plan = plan_reads(manifest, [("x", Box((0, 0), (4096, 344)))], limits=limits)
        assert all(r.stop - r.start <= max(size, 8 * 344 * 4 + 4) for r in plan.ranges)
        useful = sum(s.stop - s.position for r in plan.ranges for s in r.spans)
        assert plan.read_bytes <= (1 + waste) * useful
        assert sum(s.count for r in plan.ranges for s in r.spans) == 512


def test_wants_that_are_not_there_are_all_listed_before_anything_is_read(saved: dict[tuple[int, int], Checkpoint]) -> None:
    checkpoint = saved[2, 0]
    wants = [
        Want("master/none", Box((0,), (1,)), np.empty(1, np.float32)),
        Want("master/norm", Box((0,), (8,)), np.empty(8, np.float32)),
        Want("steps", Box((0,), (1,)), np.empty(1, np.int64)),
    ]
    with pytest.raises(CoverageError) as caught:
        checkpoint.load(wants)
    assert [text.split(":")[0] for text in caught.value.problems] == [
        "array master/none is missing",
        "array master/norm has shape (7,)",
        "array steps has shape ()",
    ]


@pytest.mark.parametrize(
    ("destination", "why"),
    [
        (np.empty(6, np.float32), "has shape"),
        (np.empty(7, np.float64), "the stored values have 4 bytes"),
        (np.empty(7, np.uint16), "the stored values have 4 bytes"),
        (np.broadcast_to(np.float32(0), 7), "read-only"),
    ],
)
def test_destinations_that_do_not_fit_are_refused(
    saved: dict[tuple[int, int], Checkpoint], destination: np.ndarray, why: str
) -> None:
    with pytest.raises(CoverageError, match=why):
        saved[1, 0].load([Want("master/norm", Box((0,), (7,)), destination)])


def test_a_flipped_bit_names_array_pack_and_byte() -> None:
    checkpoint = stored(SPECS, VALUES, writers=2)
    for pack, part in checkpoint.manifest.parts:
        key = f"here/{pack.name}"
        good = checkpoint.store.get(key)
        bad = bytearray(good)
        bad[part.position + 1] ^= 4
        checkpoint.store.put(key, bytes(bad))
        with pytest.raises(Damaged) as caught:
            checkpoint.read(part.array)
        assert (caught.value.array, caught.value.pack, caught.value.offset) == (part.array, pack.name, part.position)
        checkpoint.store.put(key, good)


def test_a_missing_or_short_pack_is_a_clean_error() -> None:
    checkpoint = stored(SPECS, VALUES, writers=2)
    key = "here/p1.pack"
    data = checkpoint.store.get(key)
    checkpoint.store.put(key, data[:-1])
    with pytest.raises(Damaged, match="truncated"):
        checkpoint.load([Want(n, Box.whole(s.shape), np.empty(s.shape, f"u{s.itemsize}")) for n, s in SPECS.items()])
    checkpoint.store.delete(key)
    with pytest.raises(ObjectMissing):
        checkpoint.load([Want(n, Box.whole(s.shape), np.empty(s.shape, f"u{s.itemsize}")) for n, s in SPECS.items()])


def test_read_gives_native_types() -> None:
    checkpoint = stored(SPECS, VALUES, writers=2)
    assert checkpoint.read("weights/layers.0.wq").dtype == np.uint16
    assert checkpoint.read("master/norm", Box((2,), (3,))).tobytes() == VALUES["master/norm"][2:5].tobytes()
    assert checkpoint.read("steps").shape == ()
    with pytest.raises(CoverageError, match="no array"):
        checkpoint.read("nothing")


def test_a_box_that_no_part_holds_is_named() -> None:
    """Only possible with a manifest that nobody checked, such as a hostile one."""
    checkpoint = stored(SPECS, VALUES, writers=2)
    table = checkpoint.manifest.table
    keep = np.flatnonzero(table.array != checkpoint.manifest.index["master/norm"])
    holes = type(table)(table.array[keep], table.pack[keep], table.position[keep], table.offset[keep], table.shape[keep])
    fields = {k: getattr(checkpoint.manifest, k) for k in ("step", "epoch", "attempt", "created_s", "arrays", "packs")}
    manifest = Manifest(**fields, table=holes, digests=checkpoint.manifest.digests, progress={})
    with pytest.raises(CoverageError, match=r"array master/norm: gap: \[0:7\]"):
        plan_reads(manifest, [("master/norm", Box((0,), (7,)))], limits=LIMITS)
