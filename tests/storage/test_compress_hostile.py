"""Compressed checkpoints that are damaged, or lie behind right checksums: they say so, and do no harm."""

import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pytest

from storage.box import Box
from storage.compress import compress, inflate
from storage.errors import Damaged, FormatError, ObjectMissing
from storage.lengths import encode_lengths, read_starts
from storage.local import LocalStore
from storage.manifest import MAGIC, decode
from storage.memory import MemoryStore
from storage.reader import Want
from storage.run import RunStore
from tests.storage import building
from tests.storage.building import COMPRESSIBLE, save, write_packs
from tests.storage.test_compress import LZ4, VALUES, ZSTD, run_with
from tests.storage.test_manifest import mutated


@pytest.fixture(autouse=True)
def specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SPECS", COMPRESSIBLE)


def rewritten(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A manifest with a right checksum whose header was changed."""
    data = write_packs(MemoryStore(), VALUES, step=1, epoch=0, compressor=LZ4).encode()
    length = struct.unpack_from("<I", data, 12)[0]
    header = msgspec.json.decode(data[16 : 16 + length])
    change(header)
    raw = msgspec.json.encode(header)
    body = struct.pack("<I", len(raw)) + raw + data[16 + length :]
    return MAGIC + struct.pack("<I", google_crc32c.value(body)) + body


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("compressor", {"name": "gzip"}, "cannot be parsed"),
        ("compressor", {"name": "blosc", "clevel": 77}, "cannot be parsed"),
        ("compressor", None, "unknown columns"),
        ("min_reader", 1, "a reader of version 1 may read it"),
        ("num_parts", 3, "does not have 3 rows"),
        ("packs", [{"name": "e0000-a0000-r00000.pack", "nbytes": 9999}] * 2, "not unique"),
    ],
)
def test_each_rule_of_compression_is_checked(field: str, value: Any, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        decode(rewritten(lambda header: header.update({field: value})))


@pytest.mark.parametrize("crc32c", ["", "ABCDEF01", "123"])
def test_a_compressed_pack_has_a_checksum_of_its_chunks(crc32c: str) -> None:
    with pytest.raises(FormatError, match="no checksum of its chunks"):
        decode(rewritten(lambda header: header["packs"][0].update(chunks_crc32c=crc32c)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda stored: stored + 100_000, "part 0 has"),
        (lambda stored: stored * 0 + 30, "chunks in 30 bytes"),
        (lambda stored: stored + 64 * (np.arange(len(stored)) == 0), "overlap|past the end|part 0 has"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: Callable[[Any], Any], why: str) -> None:
    manifest = write_packs(MemoryStore(), VALUES, step=1, epoch=0, compressor=LZ4)
    with pytest.raises(FormatError, match=why):
        decode(replace(manifest, stored=change(manifest.stored)).encode())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lengths: [lengths[0] + 1, *lengths[1:]], "has lengths that cannot be"),
        (lambda lengths: [lengths[0] + 4, lengths[1] - 4, *lengths[2:]], "the chunk at byte"),
        (lambda lengths: [19, lengths[1] + lengths[0] - 19, *lengths[2:]], "has lengths that cannot be"),
        (lambda lengths: [2**32 - 1, *lengths[1:]], "has lengths that cannot be"),
    ],
    ids=["sum", "cut", "short", "long"],
)
def test_a_table_that_lies_is_damage(change: Callable[[list[int]], list[int]], why: str) -> None:
    """Behind a right checksum of its own."""
    run = run_with(LZ4)
    checkpoint = run.open()
    manifest = checkpoint.manifest
    row = next(row for row, (_, part) in enumerate(manifest.parts) if part.array == "master/layers.0.wq")
    assert manifest.stored is not None
    starts = read_starts(run.store, manifest, [row], prefix=checkpoint.prefix)[row]
    table = encode_lengths(change(np.diff(starts).tolist()))
    key = checkpoint.prefix + manifest.packs[int(manifest.table.pack[row])].name
    data, end = bytearray(run.store.get(key)), int(manifest.table.position[row] + manifest.stored[row])
    data[end - len(table) : end] = table
    run.store.put(key, bytes(data))
    with pytest.raises(Damaged, match=why) as caught:
        checkpoint.read("master/layers.0.wq")
    assert caught.value.pack == key.rpartition("/")[2]
    problems = [problem for problem in checkpoint.verify().problems if problem.pack]
    assert problems
    assert all(re.search(why, problem.reason) for problem in problems), problems


def test_a_pack_that_is_missing_is_said_once(tmp_path: Path) -> None:
    """Not for each table that should be in it; and a load says it like that of a plain checkpoint."""
    for run in (run_with(LZ4), RunStore(LocalStore(tmp_path))):
        if isinstance(run.store, LocalStore):
            save(run, VALUES, step=1, epoch=run.take_epoch(owner={}), writers=3, compressor=LZ4)
        checkpoint = run.open()
        pack = checkpoint.manifest.packs[0].name
        run.store.delete(checkpoint.prefix + pack)
        report = checkpoint.verify()
        assert len([problem for problem in report.problems if problem.pack]) == 1
        assert not checkpoint.verify(sample=0.5).ok
        with pytest.raises(ObjectMissing, match=f"there is no object .*{pack}"):
            checkpoint.load(
                [Want(name, Box.whole(spec.shape), np.empty_like(VALUES[name])) for name, spec in COMPRESSIBLE.items()]
            )


def stored(frame: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A chunk with a right checksum."""
    return np.frombuffer(frame + google_crc32c.value(frame).to_bytes(4, "little"), np.uint8)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "too short"),
        (b"\x02\x01\x93\x04" + bytes(8), "too short"),
        (b"\x02\x01\x93\x04" + struct.pack("<III", 1 << 31, 1 << 20, 16), "inflate to 2147483648"),  # a bomb
        (b"\x02\x01\x93\x04" + struct.pack("<III", 399, 399, 16), "inflate to 399, and is 16 bytes for 400"),
        (b"\x02\x01\x93\x04" + struct.pack("<III", 400, 1 << 31, 16), "claims blocks of 2147483648"),
        (b"\x02\x01\x93\x04" + struct.pack("<III", 400, 400, 1 << 30), "claims to be 1073741824 bytes"),
        (b"\x02\x01\x03\x04" + struct.pack("<III", 400, 400, 16), "codec 0"),
        (b"\x09\x01\x93\x04" + struct.pack("<III", 400, 400, 16), "version 9"),
        (b"\x02\x01\x93\x04" + struct.pack("<III", 400, 400, 56) + b"\xff" * 40, "cannot be inflated"),
    ],
)
def test_a_frame_that_lies_is_not_inflated(frame: bytes, why: str) -> None:
    out = np.zeros(400, np.uint8)
    tracemalloc.start()
    assert why in inflate(stored(frame), out)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def fuzz(rounds: int) -> None:
    """Frames with any bytes changed behind a right checksum: they inflate to something of the right size, or say why not."""
    rng = random.Random(3)
    values = np.random.default_rng(1).standard_normal(5000).astype(np.float32).view(np.uint8)
    for compressor in (LZ4, ZSTD):
        good = compress(values, compressor, 4)[:-4]
        out, reasons = np.zeros(values.nbytes, np.uint8), set[str]()
        for _ in range(rounds):
            frame = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(frame) if rng.random() < 0.5 else 64)
                frame[at] = rng.randrange(256)
            reasons.add(inflate(stored(bytes(frame)), out).split(":")[0])
        assert "cannot be inflated" in reasons
        assert inflate(stored(good), out) == ""
        assert out.tobytes() == values.tobytes()


def test_mutated_frames_never_do_harm() -> None:
    fuzz(500)


@pytest.mark.slow
def test_very_many_mutated_frames_never_do_harm() -> None:
    fuzz(50_000)


def fuzz_manifests(rounds: int) -> None:
    rng = random.Random(5)
    data = write_packs(MemoryStore(), VALUES, step=1, epoch=0, compressor=LZ4).encode()
    for _ in range(rounds):
        with suppress(FormatError):
            assert decode(mutated(rng, data)).problems() == []


def test_mutated_manifests_end_in_format_errors_or_valid_manifests() -> None:
    fuzz_manifests(300)


@pytest.mark.slow
def test_very_many_mutated_manifests_end_in_format_errors_or_valid_manifests() -> None:
    fuzz_manifests(100_000)


def test_a_chunk_that_inflates_to_other_values_is_found_by_its_digest() -> None:
    """A right checksum over the wrong values: what only the proof after a load, and verify, can see."""
    run = run_with(LZ4)
    checkpoint = run.open()
    manifest = checkpoint.manifest
    row = next(row for row, (_, part) in enumerate(manifest.parts) if part.array == "master/norm")
    start, stop = read_starts(run.store, manifest, [row], prefix=checkpoint.prefix)[row].tolist()
    key = checkpoint.prefix + manifest.packs[int(manifest.table.pack[row])].name
    other = compress((VALUES["master/norm"] ^ np.uint32(1)).view(np.uint8), LZ4, 4)
    assert len(other) == stop - start
    data = bytearray(run.store.get(key))
    data[start:stop] = other
    run.store.put(key, bytes(data))
    reasons = [problem.reason for problem in checkpoint.verify().problems]
    assert any("has other chunks than those that were committed" in reason for reason in reasons)
    assert any(reason.startswith("master/norm: the digest is") for reason in reasons)
