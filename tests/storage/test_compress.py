"""Compressed checkpoints: the same values and digests in fewer bytes."""

import random
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from storage import reader, zarr_view
from storage.box import Box
from storage.commit import read_commit
from storage.compress import Compressor, compress, compressor_named, inflate
from storage.copy import copy_checkpoint
from storage.deflate import Deflated
from storage.diff import diff
from storage.errors import CoverageError, Damaged
from storage.keys import pack_name, step_folder
from storage.lengths import encode_lengths
from storage.local import LocalStore
from storage.manifest import PackInfo, PackManifest
from storage.memory import MemoryStore
from storage.merge import merge
from storage.objects import ByteRange, BytesList
from storage.pack import ArraySpec, plan_pack, seal
from storage.reader import Want
from storage.reshard import ReadLimits
from storage.run import RunStore
from tests.storage import building
from tests.storage.building import COMPRESSIBLE, build_pack, deal, save, smooth_values, write_packs
from tests.storage.crashing import ClockStore, crash_everywhere

LZ4, ZSTD = Compressor(), Compressor(cname="zstd", clevel=1)
VALUES = smooth_values(COMPRESSIBLE, 1)


@pytest.fixture(autouse=True)
def specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SPECS", COMPRESSIBLE)


def run_with(*compressors: Compressor | None) -> RunStore:
    """A history of the same state at steps 1, 2, ..., each compressed in its own way."""
    run = RunStore(MemoryStore())
    epoch = run.take_epoch(owner={})
    for step, compressor in enumerate(compressors, 1):
        save(run, VALUES, step=step, epoch=epoch, writers=3, compressor=compressor)
    return run


def test_values_and_digests_are_those_of_an_uncompressed_checkpoint() -> None:
    run = run_with(None, LZ4, ZSTD)
    plain, *pressed = (run.open(step) for step in (1, 2, 3))
    for found, compressor in zip(pressed, (LZ4, ZSTD), strict=True):
        assert found.manifest.compressor == compressor
        assert found.manifest.digests == plain.manifest.digests
        assert all(found.read(name).tobytes() == values.tobytes() for name, values in VALUES.items())
        assert found.verify().ok
        assert found.verify(sample=0.5).ok
        assert diff(plain, found) == []


def test_only_compressed_checkpoints_need_a_newer_reader() -> None:
    """An older release reads on what it can, and says of the rest what it needs."""
    run = run_with(None, LZ4)
    for step, version in ((1, 1), (2, 2)):
        record = read_commit(run.store, f"{step_folder(step)}commit-e0000.json")
        assert (record.format_version, record.min_reader) == (version, version)
        assert (run.open(step).manifest.format_version, run.open(step).manifest.min_reader) == (version, version)


def test_the_manifest_does_not_grow_with_the_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 500B model has 430 million of them: their lengths stand in the packs."""
    sizes = []
    for tile in ((64, 256), (1, 32)):
        specs = {"master/w": ArraySpec(name="master/w", shape=(64, 256), dtype="float32", tile=tile)}
        monkeypatch.setattr(building, "SPECS", specs)
        manifest = write_packs(MemoryStore(), smooth_values(specs, 1), step=1, epoch=0, writers=1, compressor=LZ4)
        sizes.append(len(manifest.encode()))
    assert abs(sizes[1] - sizes[0]) < 20


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_box_can_be_had_under_any_cut(dim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where ranges are many and a batch is inflated in many pieces."""
    monkeypatch.setattr(reader, "SCRATCH_BYTES", 300)
    monkeypatch.setattr(reader, "LIMITS", ReadLimits(gap_bytes=8, max_waste=0.1, range_bytes=150))
    run = RunStore(LocalStore(tmp_path) if dim == 1 else MemoryStore())  # they are read in other ways
    save(run, VALUES, step=1, epoch=run.take_epoch(owner={}), writers=4, dim=dim, compressor=LZ4)
    checkpoint, rng = run.open(), random.Random(dim)
    for name, spec in COMPRESSIBLE.items():
        for _ in range(20):
            offset = tuple(rng.randrange(n) for n in spec.shape)
            box = Box(offset, tuple(rng.randint(1, n - o) for n, o in zip(spec.shape, offset, strict=True)))
            assert checkpoint.read(name, box).tobytes() == VALUES[name][(*box.slices(), ...)].tobytes()


def test_trained_numbers_shrink_and_noise_grows_by_a_header() -> None:
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal(1 << 16).astype(np.float32).view(np.uint8)
    noise = rng.integers(0, 256, 1 << 16, dtype=np.uint8)
    for compressor in (LZ4, ZSTD):
        assert len(compress(numbers, compressor, 4)) < 0.95 * numbers.nbytes
        assert len(compress(noise, compressor, 4)) == noise.nbytes + 16 + 4
    assert compressor_named("none", 5) is None
    assert compressor_named("zstd", 3) == Compressor(cname="zstd", clevel=3)


def test_zeros_inflate_in_bounded_memory() -> None:
    """The moments of step 0: some kilobytes that inflate to hundreds of megabytes, quite without malice."""
    spec = ArraySpec(name="exp_avg/w", shape=(64 << 10, 1 << 10), dtype="float32", tile=(1 << 10, 1 << 10))
    layout = plan_pack({spec.name: spec}, [(spec.name, Box.whole(spec.shape))])
    chunk = compress(np.zeros(4 << 20, np.uint8), LZ4, 4)
    data = chunk * 64 + encode_lengths([len(chunk)] * 64)
    delivery = PackManifest(
        pack=PackInfo(name=pack_name(0, 0, 0), nbytes=len(data), chunks_crc32c=f"{google_crc32c.value(chunk[-4:] * 64):08x}"),
        arrays=[spec],
        parts=list(layout.parts),
        digests={spec.name: 0},
        compressor=LZ4,
        stored=[len(data)],
    )
    run = RunStore(MemoryStore())
    epoch = run.take_epoch(owner={})
    run.store.put(run.pack_key(1, epoch, 0, 0), data)
    run.commit(merge([delivery], step=1, epoch=epoch, attempt=0, progress={}, created_s=0.0))
    tracemalloc.start()
    assert run.open().verify().ok
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * reader.SCRATCH_BYTES


class CountingStore(MemoryStore):
    """How often somebody waited for ranges."""

    calls = 0

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        self.calls += 1
        return super().get_ranges(key, rngs)


@pytest.mark.parametrize("limit", [zarr_view.MAX_GROUP_CHUNKS, 0], ids=["group", "arrays"])
def test_a_commit_waits_once_for_the_tables_of_a_pack(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each part: there may be tens of thousands, at the latency of a far bucket."""
    monkeypatch.setattr(zarr_view, "MAX_GROUP_CHUNKS", limit)
    run = RunStore(CountingStore())
    manifest = write_packs(run.store, VALUES, step=1, epoch=run.take_epoch(owner={}), writers=2, compressor=LZ4)
    assert len(manifest.table) > 2 * len(manifest.packs)
    run.commit(manifest)
    assert isinstance(run.store, CountingStore)
    assert run.store.calls == len(manifest.packs)
    assert run.open().verify().ok


# -- what a writer delivers ----------------------------------------------------------------------------------------------------


def test_packs_are_all_compressed_alike_or_nothing_is_committed() -> None:
    hands = deal(COMPRESSIBLE, 2)
    packs = [
        build_pack(COMPRESSIBLE, VALUES, hand, pack_name(0, 0, i), c)[1]
        for i, (hand, c) in enumerate(zip(hands, (LZ4, None), strict=True))
    ]
    with pytest.raises(CoverageError, match=r"r00001\.pack is compressed: not at all, and e0000-a0000-r00000\.pack: lz4 5"):
        merge(packs, step=1, epoch=0, attempt=0, progress={}, created_s=0.0)


def test_what_changed_in_memory_after_it_was_sealed_is_not_stored() -> None:
    spec = COMPRESSIBLE["master/layers.0.wq"]
    layout = plan_pack({spec.name: spec}, [(spec.name, Box.whole(spec.shape))])
    buffer = np.zeros(layout.nbytes, np.uint8)
    seal(buffer, layout)
    buffer[50] ^= 1
    with pytest.raises(Damaged, match="has changed in memory"):
        list(Deflated(buffer, layout, LZ4))


def test_a_stream_can_be_read_again_and_describes_the_last_reading() -> None:
    layout = plan_pack(COMPRESSIBLE, deal(COMPRESSIBLE, 1)[0])
    buffer = np.zeros(layout.nbytes, np.uint8)
    seal(buffer, layout)
    plain = PackManifest(pack=PackInfo(name="p", nbytes=layout.nbytes), arrays=[], parts=list(layout.parts), digests={})
    deflated = Deflated(buffer, layout, LZ4)
    first = b"".join(deflated)
    again = b"".join(deflated)
    described = deflated.described(plain)
    assert again == first
    assert described.pack.nbytes == len(first)
    assert described.parts[0].position == 0
    assert described.parts[-1].position + described.stored[-1] == len(first)
    assert PackManifest.decode(described.encode()) == described


def test_a_crash_at_any_point_of_a_save_leaves_the_old_one_or_the_new_one() -> None:
    before, new = ClockStore(), smooth_values(COMPRESSIBLE, 2)
    epoch = RunStore(before).take_epoch(owner={})
    save(RunStore(before), VALUES, step=1, epoch=epoch, writers=1)
    seen = set()
    for remains in crash_everywhere(before, lambda s: save(RunStore(s), new, step=2, epoch=epoch, writers=1, compressor=LZ4)):
        newest = RunStore(remains).open()
        seen.add(newest.step)
        assert newest.verify().ok
        assert newest.manifest.compressor == (LZ4 if newest.step == 2 else None)
    assert seen == {1, 2}


def test_copies_keep_the_compressed_bytes() -> None:
    run = run_with(LZ4)
    source, target = run.open(), RunStore(MemoryStore("copy"))
    copy_checkpoint(source, target)
    copy = target.open()
    assert copy.manifest.compressor == LZ4
    assert copy.verify().ok
    assert [target.store.get(copy.prefix + p.name) for p in copy.manifest.packs] == [
        run.store.get(source.prefix + p.name) for p in source.manifest.packs
    ]


def test_a_load_counts_the_tables_it_reads() -> None:
    """What is read is all of the packs but the bytes between parts."""
    checkpoint = run_with(LZ4).open()
    wants = [Want(name, Box.whole(spec.shape), np.empty_like(VALUES[name])) for name, spec in COMPRESSIBLE.items()]
    assert checkpoint.manifest.stored is not None
    parts = int(checkpoint.manifest.stored.sum())
    assert parts <= checkpoint.load(wants).read_bytes <= parts + 64 * len(checkpoint.manifest.table)


@pytest.mark.parametrize("compressor", [LZ4, ZSTD], ids=str)
def test_the_bytes_do_not_depend_on_threads(compressor: Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper compresses in a thread of a pool, heal in the main thread, where Blosc shares a chunk of several blocks out.

    Whoever has imported zarr does not see it: zarr forbids that too.
    """
    from numcodecs import blosc

    numbers = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32).view(np.uint8)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(compress, numbers, compressor, 4).result()
    for _ in range(5):
        monkeypatch.setattr(blosc, "use_threads", None)
        assert compress(numbers, compressor, 4) == elsewhere
    out = np.empty_like(numbers)
    assert inflate(np.frombuffer(elsewhere, np.uint8), out) == ""
    assert out.tobytes() == numbers.tobytes()
