"""The copy of live state into an arena slot: the only thing the training loop ever waits for.

The arena is filled in tile order, each chunk followed by four bytes for its crc32c. That is a strided view of the
payload, so each interior and edge region of a box is a few `copy_`, at the speed of a memcpy. Weights are the rounded
masters: on a CPU both are copied block by block, so that the second one finds the masters in the cache. Views are made
once per slot and reused: a snapshot allocates nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ftrain.device import copy_stream
from ftrain.parallel.arrays import StatePiece
from storage.grid import DTYPES
from storage.pack import ArraySpec, PackLayout, Part, PartGeometry

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}

CopyPair = tuple[torch.Tensor, torch.Tensor]
BLOCK_BYTES = 4 << 20
"""Of a source that is copied twice: it stays in a core's share of the last cache, and the calls are still few."""
RUN_BYTES = 32 << 20
"""Between two words about how far the copy has come."""


class CopyRun(NamedTuple):
    """Some of the copies of a snapshot, in order, and up to which byte the payload is final after them."""

    pairs: list[CopyPair]
    filled: int


def copy_pairs(
    payload: np.ndarray[Any, np.dtype[np.uint8]], layout: PackLayout, pieces: Sequence[StatePiece]
) -> list[CopyPair]:
    """(destination, source) views that, copied in order, put `pieces` where `layout` says. Parts and pieces match
    one to one.

    State on a GPU is put into tile order there, in one staging buffer as large as the largest part, and crosses the
    bus as one contiguous copy a part: a strided copy to the host would be very many small ones.
    """
    if len(pieces) != len(layout.parts):
        raise ValueError(f"{len(pieces)} pieces of state for {len(layout.parts)} parts of the layout")
    buffer = torch.from_numpy(payload)
    staging = _staging(layout, pieces)
    pairs: list[CopyPair] = []
    for part, piece in zip(layout.parts, pieces, strict=True):
        if (part.array, tuple(part.offset), tuple(part.shape)) != (piece.array, piece.box.offset, piece.box.shape):
            raise ValueError(f"piece {piece.array} {piece.box} does not match part {part}")
        spec, nbytes = layout.specs[part.array], PartGeometry.of(layout.specs[part.array], part.shape).nbytes
        host = buffer[part.position : part.position + nbytes]
        if staging is None:
            pairs += _part_pairs(host, spec, part, piece.tensor)
        else:
            pairs += _staged_pairs(host, staging[:nbytes], spec, part, piece.tensor)
    return pairs if staging is not None else list(_by_block(pairs))


def _by_block(pairs: Sequence[CopyPair]) -> Iterator[CopyPair]:
    """The same copies, those from one source side by side and at most about `BLOCK_BYTES` of it at a time."""
    groups: dict[tuple[object, ...], list[CopyPair]] = {}
    for pair in pairs:
        source = pair[1]
        groups.setdefault((source.data_ptr(), *source.shape, *source.stride()), []).append(pair)
    for group in groups.values():
        length, source = group[0][1].shape[0], group[0][1]
        rows = max(1, BLOCK_BYTES * length // max(1, source.nbytes))
        for start in range(0, length, rows):
            yield from ((destination[start : start + rows], source[start : start + rows]) for destination, source in group)


def _staged_pairs(
    host: torch.Tensor, staging: torch.Tensor, spec: ArraySpec, part: Part, source: torch.Tensor
) -> Iterator[CopyPair]:
    """By way of a staging buffer that other parts use too: what lies past the array's end must be zeros again."""
    if any(n % t for n, t in zip(part.shape, spec.tile, strict=True)):
        yield staging, torch.zeros(1, dtype=torch.uint8, device=staging.device).expand(staging.numel())
    yield from _part_pairs(staging, spec, part, source)
    yield host, staging


def _staging(layout: PackLayout, pieces: Sequence[StatePiece]) -> torch.Tensor | None:
    """A buffer on the pieces' device in which a part is put into tile order before it crosses the bus; None on CPU."""
    device = pieces[0].tensor.device if pieces else torch.device("cpu")
    if device.type == "cpu":
        return None
    largest = max(PartGeometry.of(layout.specs[part.array], part.shape).nbytes for part in layout.parts)
    return torch.zeros(largest, dtype=torch.uint8, device=device)


def _part_pairs(chunks: torch.Tensor, spec: ArraySpec, part: Part, source: torch.Tensor) -> Iterator[CopyPair]:
    """Views that fill `chunks`, the bytes of one part, from its values."""
    dtype, tile, shape = TORCH_DTYPES[spec.dtype], tuple(spec.tile), tuple(part.shape)
    source = source.detach().reshape(shape)
    if not shape:
        shape, tile, source = (1,), (1,), source.reshape(1)
    if dtype.itemsize == 8:
        # the crc's four bytes break 8-byte alignment: move such elements as pairs of 4-byte words
        if source.dtype != dtype:
            raise ValueError(
                f"{part.array}: the live tensor is {source.dtype}, the array {dtype}; 8-byte elements are not converted"
            )
        source = source.view(torch.int32)
        dtype, tile, shape = torch.int32, (*tile[:-1], tile[-1] * 2), tuple(source.shape)
    grid = [math.ceil(n / t) for n, t in zip(shape, tile, strict=True)]
    stride = math.prod(tile) + 4 // dtype.itemsize
    chunks = chunks.view(dtype)
    for region in itertools.product(*[_regions(n, t) for n, t in zip(shape, tile, strict=True)]):
        yield _region_pair(chunks, source, grid=grid, tile=tile, stride=stride, region=region)


def _regions(length: int, tile: int) -> list[tuple[int, int, int]]:
    """A dim as (first element, number of tiles, elements used of each): the full tiles, then the edge."""
    full, rest = divmod(length, tile)
    return [(0, full, tile)] * (full > 0) + [(full * tile, 1, rest)] * (rest > 0)


def _region_pair(
    chunks: torch.Tensor,
    source: torch.Tensor,
    *,
    grid: Sequence[int],
    tile: Sequence[int],
    stride: int,
    region: Sequence[tuple[int, int, int]],
) -> CopyPair:
    """One destination view [tiles of each dim..., elements of each dim...] and the source in the same order."""
    counts, used = [count for _, count, _ in region], [n for _, _, n in region]
    grid_strides = [stride * math.prod(grid[d + 1 :]) for d in range(len(grid))]
    tile_strides = [math.prod(tile[d + 1 :]) for d in range(len(tile))]
    first = sum((start // t) * s for (start, _, _), t, s in zip(region, tile, grid_strides, strict=True))
    destination = chunks.as_strided((*counts, *used), (*grid_strides, *tile_strides), chunks.storage_offset() + first)
    for dim, (start, count, n) in enumerate(region):
        source = source.narrow(dim, start, count * n)
    split = source.view([size for pair in zip(counts, used, strict=True) for size in pair])
    ndim = len(counts)
    return destination, split.permute(*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2))


def copy_runs(payload: np.ndarray[Any, np.dtype[np.uint8]], pairs: Sequence[CopyPair]) -> list[CopyRun]:
    """The copies cut into runs. What is final after a run is all that lies in front of what later ones write."""
    base, nbytes = payload.ctypes.data, payload.nbytes
    starts = [to.data_ptr() - base if to.device.type == "cpu" else nbytes for to, _ in pairs]
    final = list(itertools.accumulate(reversed(starts), min, initial=nbytes))[::-1]
    most = min(RUN_BYTES, sum(to.nbytes for to, _ in pairs) // 2)  # at least two: a small copy has a middle, too
    runs, begin, size = list[CopyRun](), 0, 0
    for stop, (destination, _) in enumerate(pairs, start=1):
        size += destination.nbytes
        if size >= most or stop == len(pairs):
            runs.append(CopyRun(list(pairs[begin:stop]), final[stop]))
            begin, size = stop, 0
    return runs


def run_copy(pairs: Sequence[CopyPair]) -> None:
    """Copy everything, in order, and return when it is done. Releases the GIL.

    On the host in one call: who copies beside the thread that trains would else take the GIL from it for each copy, and wake it
    to give it back. A GPU must be told of one after the other: they share a staging buffer.
    """
    if not pairs:
        return
    device = pairs[0][1].device
    with torch.no_grad(), copy_stream(device):
        if device.type == "cpu":
            torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
        else:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
