"""Where the chunks of compressed parts lie: the tables of lengths that stand behind them.

In a plain pack a chunk is found by counting. Compressed ones have lengths of their own, and a 500B model has 430 million
chunks: these lengths stay in the packs, one table behind each part, and whoever reads a part reads its table first. The
manifest says where every table is, and is hardly larger than that of a plain checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage.compress import MAX_EXTRA_BYTES, MIN_STORED_BYTES
from storage.errors import Damaged
from storage.flights import flights
from storage.manifest import Manifest
from storage.objects import ByteRange, ObjectStore
from storage.pack import CRC_BYTES, PartGeometry
from storage.parts import LENGTH_BYTES

__all__ = ["Starts", "encode_lengths", "read_starts", "starts_reader", "stored_starts"]

Starts = Mapping[int, NDArray[np.int64]]
"""Row of the part table -> where each of its chunks begins in the pack, and where the last one ends."""

FLIGHT_BYTES = 64 << 20


def encode_lengths(lengths: Sequence[int]) -> bytes:
    """The table of a part: the stored bytes of each of its chunks, and a checksum."""
    raw = np.array(lengths, "<u4").tobytes()
    crc: int = google_crc32c.value(raw)
    return raw + crc.to_bytes(CRC_BYTES, "little")


def read_starts(store: ObjectStore, manifest: Manifest, rows: Iterable[int], *, prefix: str) -> Starts:
    """Of parts of a compressed checkpoint; nothing of a plain one. `Damaged` names the first table that is wrong,
    `ObjectMissing` the pack.
    """
    found: dict[int, NDArray[np.int64]] = {}
    for row, starts in stored_starts(store, manifest, rows, prefix=prefix):
        if isinstance(starts, Damaged):
            raise starts
        found[row] = starts
    return found


def starts_reader(store: ObjectStore, manifest: Manifest, *, prefix: str) -> Callable[[Iterable[int]], Starts]:
    """`read_starts` of one checkpoint, for whoever plans without knowing of stores."""
    return lambda rows: read_starts(store, manifest, rows, prefix=prefix)


def stored_starts(
    store: ObjectStore, manifest: Manifest, rows: Iterable[int], *, prefix: str
) -> Iterator[tuple[int, NDArray[np.int64] | Damaged]]:
    """The same, one by one, with what is wrong in the place of what could not be had; `ObjectMissing` if a pack is."""
    if manifest.stored is None:
        return
    pack_of = manifest.table.pack
    for flight in flights(
        rows, FLIGHT_BYTES, size=lambda row: len(_table_range(manifest, row)), of=lambda row: int(pack_of[row])
    ):
        ranges = [_table_range(manifest, row) for row in flight]
        pack = manifest.packs[int(pack_of[flight[0]])].name
        try:
            answers = store.get_ranges(prefix + pack, ranges)
        except Damaged:  # of several, perhaps of one
            answers = [_alone(store, prefix + pack, rng) for rng in ranges]
        for row, data in zip(flight, answers, strict=True):
            yield row, _decode(manifest, row, data)


def _alone(store: ObjectStore, key: str, rng: ByteRange) -> bytes:
    try:
        return store.get_range(key, rng)
    except Damaged:
        return b""


def _table_range(manifest: Manifest, row: int) -> ByteRange:
    assert manifest.stored is not None
    stop = int(manifest.table.position[row] + manifest.stored[row])
    return ByteRange(stop - LENGTH_BYTES * _geometry(manifest, row).num_chunks - CRC_BYTES, stop)


def _geometry(manifest: Manifest, row: int) -> PartGeometry:
    spec = manifest.arrays[int(manifest.table.array[row])]
    return PartGeometry.of(spec, manifest.table.box(row, len(spec.shape))[1])


def _decode(manifest: Manifest, row: int, data: bytes | memoryview) -> NDArray[np.int64] | Damaged:
    """The table of a part; or what is wrong with it."""
    raw, rng, geometry = bytes(data), _table_range(manifest, row), _geometry(manifest, row)
    lengths = np.frombuffer(raw[:-CRC_BYTES], "<u4").astype(np.int64) if len(raw) == len(rng) else np.zeros(0, np.int64)
    starts = np.cumsum(np.concatenate([manifest.table.position[row : row + 1], lengths]))
    if len(raw) != len(rng):
        reason = "cannot be read"
    elif google_crc32c.value(raw[:-CRC_BYTES]) != int.from_bytes(raw[-CRC_BYTES:], "little"):
        reason = "does not match its crc32c"
    elif lengths.min() < MIN_STORED_BYTES or lengths.max() > geometry.chunk_nbytes + MAX_EXTRA_BYTES or starts[-1] != rng.start:
        reason = "has lengths that cannot be"
    else:
        return starts
    pack = manifest.packs[int(manifest.table.pack[row])].name
    array = manifest.arrays[int(manifest.table.array[row])].name
    text = f"{array}: the table of lengths at byte {rng.start} of {pack} {reason}"
    return Damaged(text, array=array, pack=pack, offset=rng.start)
