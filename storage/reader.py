"""Carrying out a read plan: bounded memory, every checksum checked, each value copied once to where it is wanted.

A range is read into a scratch buffer, the crc32c of each of its chunks is compared, and only then anything is copied out: a
destination never holds bytes that failed their check. PyTorch's DCP loads flipped bits silently; here the error names array,
pack and byte.

Runs of chunks are copied as rectangles of tiles by one NumPy assignment each, so that small tiles do not cost a Python call
each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.errors import CoverageError, Damaged
from storage.manifest import Manifest
from storage.objects import ByteRange, ObjectStore
from storage.pack import bits_dtype, blocks, chunk_crcs, stored_crcs
from storage.reshard import PartRead, PlannedRange, ReadLimits, ReadPlan, Span, plan_reads, rectangles

__all__ = ["LIMITS", "LoadReport", "Want", "load", "read_ranges", "wrong_chunks"]

LIMITS = ReadLimits(gap_bytes=64 << 10, max_waste=0.04, range_bytes=8 << 20)
"""Ranges of 8 MiB: s3fs answers them at half the CPU cost of larger ones, and local reads gain nothing beyond."""

IN_FLIGHT_BYTES = 64 << 20
"""What remote ranges that are fetched at the same time may hold together."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Want:
    """A box of an array, and where its values go: a writable array of the box's shape and the array's item size."""

    array: str
    box: Box
    destination: NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load cost."""

    wanted_bytes: int
    read_bytes: int
    num_ranges: int
    num_chunks: int


def load(store: ObjectStore, manifest: Manifest, wants: Sequence[Want], *, prefix: str) -> LoadReport:
    """Fill every destination. `CoverageError` before anything is read, `Damaged` as soon as a chunk fails its check."""
    problems = [text for want in wants for text in _destination_problems(manifest, want)]
    if problems:
        raise CoverageError(f"destinations do not fit: {'; '.join(problems[:8])}", problems=problems)
    plan = plan_reads(manifest, [(want.array, want.box) for want in wants], limits=LIMITS)
    num_chunks = 0
    for planned, buffer in read_ranges(store, manifest, plan.ranges, prefix=prefix):
        for span in planned.spans:
            part = plan.parts[span.part]
            wrong = wrong_chunks(buffer, span.position - planned.start, part, span.count)
            if wrong:
                raise damage(manifest, planned, part, span.position + wrong[0] * part.geometry.stride)
            num_chunks += span.count
            _scatter(buffer[span.position - planned.start :], span, part, [wants[i] for i in part.wants])
    return LoadReport(plan.wanted_bytes, plan.read_bytes, len(plan.ranges), num_chunks)


def _destination_problems(manifest: Manifest, want: Want) -> list[str]:
    if want.array not in manifest.index:
        return []  # the planner lists it together with whatever else is missing
    itemsize, destination = manifest.array(want.array).itemsize, want.destination
    if destination.shape != want.box.shape:
        return [f"{want.array}: the destination has shape {destination.shape} instead of {want.box.shape}"]
    if destination.dtype.itemsize != itemsize or destination.dtype.hasobject:
        return [f"{want.array}: the destination is {destination.dtype}, the stored values have {itemsize} bytes"]
    return [] if destination.flags.writeable else [f"{want.array}: the destination is read-only"]


def damage(manifest: Manifest, planned: PlannedRange, part: PartRead, offset: int) -> Damaged:
    """The error for a chunk at byte `offset` of a pack."""
    array, pack = manifest.arrays[part.array].name, manifest.packs[planned.pack].name
    message = f"{array}: the chunk at byte {offset} of {pack} does not match its crc32c"
    return Damaged(message, array=array, pack=pack, offset=offset)


def wrong_chunks(buffer: Bytes, start: int, part: PartRead, count: int) -> list[int]:
    """Which of `count` chunks from byte `start` of a buffer do not match the crc32c behind them."""
    crcs = chunk_crcs(buffer, start, part.geometry, count)
    wrong: list[int] = np.flatnonzero(crcs != stored_crcs(buffer, start, part.geometry, count)).tolist()
    return wrong


def read_ranges(
    store: ObjectStore, manifest: Manifest, ranges: Sequence[PlannedRange], *, prefix: str
) -> Iterator[tuple[PlannedRange, Bytes]]:
    """Each range with its bytes, which are valid only until the next one is asked for."""
    if store.capabilities.local:
        yield from _read_local(store, manifest, ranges, prefix)
        return
    for batch in _batches(ranges):
        key = prefix + manifest.packs[batch[0].pack].name
        found = store.get_ranges(key, [ByteRange(r.start, r.stop) for r in batch])
        for planned, data in zip(batch, found, strict=True):
            yield planned, np.frombuffer(data, np.uint8)


def _read_local(
    store: ObjectStore, manifest: Manifest, ranges: Sequence[PlannedRange], prefix: str
) -> Iterator[tuple[PlannedRange, Bytes]]:
    """One range after the other into the same warm buffer: fresh pages cost ten times a copy."""
    scratch = np.empty(max((r.stop - r.start for r in ranges), default=0), np.uint8)
    for planned in ranges:
        buffer = scratch[: planned.stop - planned.start]
        store.get_into(prefix + manifest.packs[planned.pack].name, planned.start, buffer.data)
        yield planned, buffer


def _batches(ranges: Sequence[PlannedRange]) -> Iterator[list[PlannedRange]]:
    """Ranges of one pack, together within the memory that may be in flight."""
    batch, nbytes = list[PlannedRange](), 0
    for planned in ranges:
        size = planned.stop - planned.start
        if batch and (planned.pack != batch[0].pack or nbytes + size > IN_FLIGHT_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(planned)
        nbytes += size
    if batch:
        yield batch


def span_rectangles(span: Span, part: PartRead) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """The rectangles of tiles that a span is made of: byte offset from the span's start, first tile, shape in tiles."""
    at = 0
    for first, shape in rectangles(span.first, span.count, part.geometry.grid):
        yield at, first, shape
        at += math.prod(shape) * part.geometry.stride


def _scatter(buffer: Bytes, span: Span, part: PartRead, wants: Sequence[Want]) -> None:
    """Copy what the chunks of a span hold to every destination that wants it."""
    tile = part.geometry.tile
    for at, first, shape in span_rectangles(span, part):
        corner = tuple(o + f * t for o, f, t in zip(part.box.offset, first, tile, strict=True))
        held = Box(corner, tuple(n * t for n, t in zip(shape, tile, strict=True))).intersect(part.box)
        for want in wants:
            region = held.intersect(want.box) if held else None
            if region is None:
                continue
            bits = bits_dtype(want.destination.dtype.itemsize)
            tiles = part.geometry.tiles(buffer, at, shape, bits)
            _copy(tiles, corner, tile, region, _view(want.destination.view(bits), region.relative_to(want.box)))


def _view(values: NDArray[np.unsignedinteger], box: Box) -> NDArray[np.unsignedinteger]:
    """The box as a view; a 0-d array indexed by nothing would be a copy."""
    return values[box.slices()] if box.ndim else values


def _copy(
    tiles: NDArray[np.unsignedinteger],
    corner: Sequence[int],
    tile: Sequence[int],
    region: Box,
    values: NDArray[np.unsignedinteger],
) -> None:
    """Copy a region out of a rectangle of tiles whose first element is at `corner`."""
    inside = [o - c for o, c in zip(region.offset, corner, strict=True)]
    cells = [i // t for i, t in zip(inside, tile, strict=True)]
    source = tiles[tuple(slice(c, None) for c in cells)]
    for block in blocks(region.shape, tile, skip=[i % t for i, t in zip(inside, tile, strict=True)]):
        block.of(values)[...] = source[block.cells + block.inner]


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

__all__ += ["Progress", "ReadPlan", "damage", "span_rectangles"]
