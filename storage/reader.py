"""Carrying out a read plan: bounded memory, every checksum checked, each value copied once to where it is wanted.

A range is read into a scratch buffer, the crc32c of each of its chunks is compared, and only then anything is copied out: a
destination never holds bytes that failed their check. PyTorch's DCP loads flipped bits silently; here the error names array,
pack and byte.

Runs of chunks are copied as rectangles of tiles by one NumPy assignment each, so that small tiles do not cost a Python call
each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.errors import CoverageError, Damaged
from storage.fetch import Batch, TileBlock, fetch, tile_blocks
from storage.inflate import Inflater
from storage.lengths import starts_reader
from storage.manifest import Manifest
from storage.objects import ObjectStore
from storage.pack import bits_dtype, blocks, chunk_crcs, stored_crcs
from storage.reshard import PartRead, ReadLimits, plan_reads

__all__ = ["LIMITS", "SCRATCH_BYTES", "LoadReport", "Progress", "Want", "block_corner", "damage", "load", "wrong_chunks"]

LIMITS = ReadLimits(gap_bytes=64 << 10, max_waste=0.04, range_bytes=8 << 20)
"""Ranges of 8 MiB: s3fs answers them at half the CPU cost of larger ones, and local reads gain nothing beyond."""

SCRATCH_BYTES = 8 << 20
"""Bytes that are read before they are checked and copied: enough for a few thousand tiles, and still in the third-level cache..

"""

Bytes = NDArray[np.uint8]

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


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
    find = starts_reader(store, manifest, prefix=prefix)
    plan = plan_reads(manifest, [(want.array, want.box) for want in wants], limits=LIMITS, find=find)
    num_chunks, inflater = 0, Inflater(scratch_bytes=SCRATCH_BYTES)
    for stored in fetch(store, manifest, plan.ranges, prefix=prefix, scratch_bytes=SCRATCH_BYTES):
        for batch in inflater.batches(stored, plan.parts):
            for block in tile_blocks(batch, plan.parts):
                part = plan.parts[block.part]
                wrong = wrong_chunks(batch, block, part)
                if wrong:
                    raise damage(manifest, batch, part, block.start + wrong[0] * part.geometry.stride)
                num_chunks += math.prod(block.shape)
                _scatter(batch.buffer, block, part, [wants[i] for i in part.wants])
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


def damage(manifest: Manifest, batch: Batch, part: PartRead, position: int) -> Damaged:
    """The error for a chunk that begins at byte `position` of a batch."""
    if batch.wrong is None:
        (number, offset), reason = batch.origin(position), "does not match its crc32c"
    else:
        found = batch.wrong[position]
        number, offset, reason = found.pack, found.offset, found.reason
    array, pack = manifest.arrays[part.array].name, manifest.packs[number].name
    return Damaged(f"{array}: the chunk at byte {offset} of {pack} {reason}", array=array, pack=pack, offset=offset)


def wrong_chunks(batch: Batch, block: TileBlock, part: PartRead) -> list[int]:
    """Which chunks of a block do not match the crc32c behind them, or could not be inflated."""
    if batch.wrong is not None:
        return [(at - block.start) // part.geometry.stride for at in batch.wrong if block.start <= at < block.stop]
    count = math.prod(block.shape)
    crcs = chunk_crcs(batch.buffer, block.start, part.geometry, count)
    wrong: list[int] = np.flatnonzero(crcs != stored_crcs(batch.buffer, block.start, part.geometry, count)).tolist()
    return wrong


def block_corner(block: TileBlock, part: PartRead) -> tuple[int, ...]:
    """The block's first element, in the whole array."""
    return tuple(o + f * t for o, f, t in zip(part.box.offset, block.first, part.geometry.tile, strict=True))


def _scatter(buffer: Bytes, block: TileBlock, part: PartRead, wants: Sequence[Want]) -> None:
    """Copy what a block of tiles holds to every destination that wants it."""
    tile, corner = part.geometry.tile, block_corner(block, part)
    held = Box(corner, tuple(n * t for n, t in zip(block.shape, tile, strict=True))).intersect(part.box)
    for want in wants:
        region = held.intersect(want.box) if held else None
        if region is None:
            continue
        bits = bits_dtype(want.destination.dtype.itemsize)
        tiles = part.geometry.tiles(buffer, block.start, block.shape, bits)
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
