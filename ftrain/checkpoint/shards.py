"""Which boxes of an array a rank holds, for any list of shardings over a device mesh. Pure arithmetic, no torch.

A sharding of a dim over a mesh axis keeps the c-th of n equal chunks (the last ones shorter or empty, as `torch.chunk` has it).
Several axes may cut one dim; PyTorch then describes FSDP over tensor parallelism, where the *right* axis cut first, by a
"strided" shard on the left one. Followed to the letter, from left to right, that gives the right rows only where everything
divides evenly; what the ranks really hold is found by cutting in the order in which it was done. So both orders are computed
and the one that has the shape of what the rank holds is taken.

A rank may hold several intervals of a dim; they lie one after the other in its local tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from storage.box import Box
from storage.grid import MAX_CHUNK_BYTES

Intervals = tuple[tuple[int, int], ...]

TILE_BYTES = 256 << 10
"""What a tile of a large array should have: small enough that another cut wastes little, large enough to copy fast."""
SMALL_TILED_BYTES = 1 << 20
"""Arrays under this size are one tile unless somebody cuts them: reading one whole costs nothing."""
FEWEST_ROWS, FEWEST_TILES = 8, 32
"""A cut that lies in a tile has it read twice: with 32 tiles along the rows, cuts into three or five cost 6 or 12 %."""
LIKELY_CUTS = (8, 4, 2)
NARROWEST, WIDEST = 64, 512


@dataclass(frozen=True, slots=True)
class Cut:
    """A mesh axis of `size` cuts `dim`; `split_factor` is above 1 for PyTorch's strided shards."""

    axis: int
    size: int
    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class Region:
    """A box of the array, and where it lies in the local tensor."""

    box: Box
    local: Box


def take(held: Intervals, count: int, index: int) -> Intervals:
    """The `index`-th of `count` chunks of what is held."""
    total = sum(stop - start for start, stop in held)
    size = -(-total // count)
    first, last = min(index * size, total), min((index + 1) * size, total)
    found, at = [], 0
    for start, stop in held:
        lo, hi = max(first, at), min(last, at + stop - start)
        if lo < hi:
            found.append((start + lo - at, start + hi - at))
        at += stop - start
    return tuple(found)


def take_strided(held: Intervals, count: int, index: int, split_factor: int) -> Intervals:
    """The `index`-th of `count` chunks of each of `split_factor` chunks of what is held."""
    pieces = (take(take(held, split_factor, part), count, index) for part in range(split_factor))
    return tuple(itertools.chain.from_iterable(pieces))


def in_cutting_order(cuts: Sequence[Cut]) -> list[Cut] | None:
    """The cuts of one dim in the order in which they were made, all plain; None if no such order explains them."""
    order: list[Cut] = []
    for cut in reversed(cuts):
        done = math.prod(other.size for other in order)
        if cut.split_factor == 1:
            order.insert(0, cut)
        elif cut.split_factor == done:
            order.append(Cut(cut.axis, cut.size, cut.dim))
        else:
            return None
    return order


def held_intervals(extent: int, cuts: Sequence[Cut], place: Sequence[int], *, literally: bool = False) -> Intervals:
    """What the rank at `place` of the mesh holds of a dim of `extent`; `literally`: from left to right, as torch says it."""
    held: Intervals = ((0, extent),) if extent else ()
    order = None if literally else in_cutting_order(cuts)
    for cut in order if order is not None else cuts:
        index = place[cut.axis]
        held = take(held, cut.size, index) if cut.split_factor == 1 else take_strided(held, cut.size, index, cut.split_factor)
    return held


def regions(
    shape: Sequence[int], cuts: Sequence[Cut], place: Sequence[int], local_shape: Sequence[int]
) -> tuple[list[Region], bool]:
    """What the rank at `place` holds of an array of `shape`, and whether the cuts were to be taken literally.

    Raises ValueError if neither order of the cuts gives the shape of what the rank holds.
    """
    for literally in (False, True):
        held = [_of_dim(shape, cuts, place, dim, literally) for dim in range(len(shape))]
        if [sum(stop - start for start, stop in each) for each in held] == list(local_shape):
            return list(_boxes(held)), literally
    raise ValueError(f"an array of shape {tuple(shape)} cut by {list(cuts)} has no part {tuple(local_shape)} at {place}")


def _of_dim(shape: Sequence[int], cuts: Sequence[Cut], place: Sequence[int], dim: int, literally: bool) -> Intervals:
    return held_intervals(shape[dim], [cut for cut in cuts if cut.dim == dim], place, literally=literally)


def _boxes(held: Sequence[Intervals]) -> Iterator[Region]:
    """The product of all dims' intervals, with where each lies locally."""
    placed = [list(zip(each, itertools.accumulate((b - a for a, b in each), initial=0), strict=False)) for each in held]
    for chosen in itertools.product(*placed):
        shape = tuple(stop - start for (start, stop), _ in chosen)
        box = Box(tuple(start for (start, _), _ in chosen), shape)
        yield Region(box, Box(tuple(at for _, at in chosen), shape))


def edges(extent: int, cuts: Sequence[Cut], *, literally: bool = False) -> set[int]:
    """Where any rank's part of a dim begins or ends."""
    axes = {cut.axis: cut.size for cut in cuts}
    width = 1 + max(axes, default=-1)
    found: set[int] = set()
    for chosen in itertools.product(*(range(size) for size in axes.values())):
        place = [0] * width
        for axis, index in zip(axes, chosen, strict=True):
            place[axis] = index
        for start, stop in held_intervals(extent, cuts, place, literally=literally):
            found |= {start, stop}
    return found | {0, extent}


def tile_of(shape: Sequence[int], itemsize: int, cuts: Sequence[set[int]]) -> tuple[int, ...]:
    """The tile of an array, given where it is cut along each dim: no tile crosses a cut, and the first two dims are tiled even
    where nobody cuts them now, because the next layout may."""
    units = [math.gcd(*(edge for edge in each if edge != extent)) or extent for each, extent in zip(cuts, shape, strict=True)]
    tile = list(units)
    if math.prod(shape) * itemsize >= SMALL_TILED_BYTES:
        inner = itemsize * math.prod(shape[2:])
        if len(shape) > 1:
            height = inner * min(shape[0], TILE_BYTES // (WIDEST * itemsize))
            tile[1] = _divisor(_unit(units[1], shape[1]), max(WIDEST, TILE_BYTES // height))
        across = inner * math.prod(tile[1:2])
        rows = min(TILE_BYTES // across, shape[0] // FEWEST_TILES) if len(shape) > 1 else TILE_BYTES // across
        tile[0] = _divisor(_unit(units[0], shape[0]), max(FEWEST_ROWS, rows))
    return _bounded(units, shape, itemsize, tile)


def _unit(unit: int, extent: int) -> int:
    """What a tile must divide: the cuts there are or, where nobody cuts, equal parts of a likely number. Narrower tiles would
    serve more layouts, but copying runs of a few elements is what a save would then wait for."""
    if unit != extent:
        return unit
    parts = next((count for count in LIKELY_CUTS if extent % count == 0 and extent // count >= NARROWEST), 1)
    return extent // parts if parts > 1 else min(extent, 2 * NARROWEST)


def _divisor(unit: int, wanted: int) -> int:
    """The divisor of `unit` nearest below `wanted`, or if there is none of any use, the next one above."""
    below = next(size for size in range(min(unit, wanted), 0, -1) if unit % size == 0)
    if below >= FEWEST_ROWS or unit <= FEWEST_ROWS:
        return below
    return next(size for size in range(FEWEST_ROWS, unit + 1) if unit % size == 0)


def _bounded(units: Sequence[int], shape: Sequence[int], itemsize: int, tile: Sequence[int]) -> tuple[int, ...]:
    """The same, made smaller until a chunk is small enough to be stored."""
    bounded = list(tile)
    for dim in range(len(bounded)):
        limit = max(1, MAX_CHUNK_BYTES // (itemsize * math.prod(bounded[dim + 1 :])))
        if bounded[dim] > limit:
            free = units[dim] == shape[dim]
            even = -(-bounded[dim] // -(-bounded[dim] // limit))
            bounded[dim] = even if free else max(size for size in range(1, limit + 1) if units[dim] % size == 0)
    return tuple(bounded)
