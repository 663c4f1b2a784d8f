"""Getting planned ranges into memory, in batches that lie back to back.

Back to back matters twice. A warm scratch buffer that is used again and again costs a tenth of fresh pages; and runs of chunks
that are far apart in a pack (a column of tiles) become one rectangle of tiles in the buffer, which NumPy checks and copies in
a few calls instead of a few hundred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.flights import flights
from storage.manifest import Manifest
from storage.objects import ByteRange, ObjectStore
from storage.reshard import PartRead, PlannedRange, rectangles

__all__ = ["Batch", "TileBlock", "WrongChunk", "fetch", "tile_blocks"]

IN_FLIGHT_BYTES = 64 << 20
"""What remote ranges that are fetched at the same time may hold together."""

JOIN_BYTES = 1 << 20
"""Small remote ranges are joined up to this size: a copy costs less than checking each on its own."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WrongChunk:
    """Why a compressed chunk could not be had, and where it lies."""

    pack: int
    offset: int
    reason: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Some ranges in one buffer, which is valid only until the next batch is asked for."""

    buffer: Bytes
    placed: tuple[tuple[PlannedRange, int], ...]
    """Each range, and where in the buffer it begins; in order."""
    wrong: Mapping[int, WrongChunk] | None = None
    """Of chunks that were compressed: those that are wrong, by where in the buffer they should be. None: nobody has looked."""

    def bytes_of(self, planned: PlannedRange, start: int) -> Bytes:
        """The bytes of one of its ranges."""
        return self.buffer[start : start + planned.stop - planned.start]

    def origin(self, position: int) -> tuple[int, int]:
        """Pack (index) and byte in it that a byte of the buffer came from."""
        planned, start = max((p for p in self.placed if p[1] <= position), key=lambda p: p[1])
        return planned.pack, planned.start + position - start


@dataclass(slots=True)
class TileBlock:
    """A rectangle of a part's tiles that lie back to back in a buffer."""

    part: int
    start: int
    """Byte in the buffer."""
    first: tuple[int, ...]
    """First tile, counted in the part's grid."""
    shape: tuple[int, ...]
    """In tiles."""
    stop: int


def fetch(
    store: ObjectStore, manifest: Manifest, ranges: Sequence[PlannedRange], *, prefix: str, scratch_bytes: int
) -> Iterator[Batch]:
    """All ranges, in order, a batch of at most `scratch_bytes` (or one range) at a time."""
    if not store.capabilities.local:
        yield from _fetch_remote(store, manifest, ranges, prefix)
        return
    batches = list(flights(ranges, scratch_bytes, size=_size))
    scratch = np.empty(max((sum(map(_size, batch)) for batch in batches), default=0), np.uint8)
    for batch in batches:
        placed, at = [], 0
        for planned in batch:
            size = _size(planned)
            store.get_into(prefix + manifest.packs[planned.pack].name, planned.start, scratch[at : at + size].data)
            placed.append((planned, at))
            at += size
        yield Batch(scratch[:at], tuple(placed))


def _fetch_remote(store: ObjectStore, manifest: Manifest, ranges: Sequence[PlannedRange], prefix: str) -> Iterator[Batch]:
    """Many requests at a time, all of one object; large answers are used as they are."""
    for flight in flights(ranges, IN_FLIGHT_BYTES, size=_size, of=lambda planned: planned.pack):
        key = prefix + manifest.packs[flight[0].pack].name
        answers = dict(zip(flight, store.get_ranges(key, [ByteRange(r.start, r.stop) for r in flight]), strict=True))
        for group in flights(flight, JOIN_BYTES, size=_size):
            data = answers[group[0]] if len(group) == 1 else b"".join([answers[planned] for planned in group])
            starts = np.cumsum([0, *(r.stop - r.start for r in group[:-1])]).tolist()
            yield Batch(np.frombuffer(data, np.uint8), tuple(zip(group, starts, strict=True)))


def _size(planned: PlannedRange) -> int:
    return planned.stop - planned.start


def tile_blocks(batch: Batch, parts: Sequence[PartRead] | Mapping[int, PartRead]) -> Iterator[TileBlock]:
    """The chunks of a batch as few rectangles of tiles, in the order they lie."""
    last: TileBlock | None = None
    for block in _plain_blocks(batch, parts):
        if last is not None and _follows(block, last):
            last.shape = (last.shape[0] + block.shape[0], *last.shape[1:])
            last.stop = block.stop
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def _follows(block: TileBlock, last: TileBlock) -> bool:
    """Whether a block continues the one before it downwards."""
    return (
        block.part == last.part
        and block.start == last.stop
        and bool(block.shape)
        and block.shape[1:] == last.shape[1:]
        and block.first[1:] == last.first[1:]
        and block.first[0] == last.first[0] + last.shape[0]
    )


def _plain_blocks(batch: Batch, parts: Sequence[PartRead] | Mapping[int, PartRead]) -> Iterator[TileBlock]:
    for planned, start in batch.placed:
        for span in planned.spans:
            geometry = parts[span.part].geometry
            at = start + span.position - planned.start
            for first, shape in rectangles(span.first, span.count, geometry.grid):
                size = geometry.stride
                for n in shape:
                    size *= n
                yield TileBlock(span.part, at, first, shape, at + size)
                at += size
