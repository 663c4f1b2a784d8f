"""How the parameters of a pipeline stage lie in flat buffers, and which part of each buffer a replica owns.

ZeRO-1 cuts every buffer into equal regions, one per replica: a reduce-scatter leaves each replica the summed gradients of
its region, it updates them, an all-gather gives everybody the new weights. Where the cuts fall decides what a checkpoint
looks like, so the plan is *aligned-flat*: each parameter is contiguous, and a cut may go through a matrix only between
multiples of `row_unit` rows. A replica's share is then a list of whole row blocks, ready to be written as tiles.

- Arrays under 4 MiB of fp32 (by their logical size) are never cut: they lie whole in one region.
- A matrix that crosses a cut starts at a multiple of its own `row_unit` rows, and regions are multiples of all of them:
  position and cut are then both on the matrix's row grid.
- `row_unit` is a power of two: the largest for which alignment costs at most 1 % of the bucket, or up to 8 rows for at most
  4 %, because rows are tiles and tiny tiles make too many chunks; if neither can be had, the cheapest of those whose
  tiles are not tiny.
- A bucket holds whole blocks (a layer, the embedding, the head) and never spans virtual stages. A tied embedding whose ends
  lie on two ranks gets its own bucket, so that both ends cut it alike.
- Experts that are shared out get buckets of their own: only the replicas that have the same experts sum and share them. In the
  buffer the matrices of a rank's experts lie one behind the other, as if they were one, and are cut at rows as one would be.

Pure: the same plan is computed by every rank, by the planner and by the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from math import lcm, prod

from ftrain.parallel.layout import Kind, ParameterSpec, is_owner, local_box, row_dim
from ftrain.parallel.shape import Coordinate, MeshShape
from storage.box import Box
from storage.grid import is_small, tile_shape

ALIGN = 32  # elements; parameters start on cache lines in bf16 and fp32
ROW_UNITS = (64, 32, 16, 8, 4, 2, 1)
MAX_TILE = 2**20  # elements of a row block: 4 MiB of fp32
CHEAP_PADDING = 0.01
MIN_TILE_BYTES = 2 << 10  # of fp32: its four checksums are 0.2 % of the 14 bytes per parameter, below it they come to 1 %
MAX_PADDING, WANTED_ROWS = 0.04, 8  # what tiles of up to 8 rows may cost: smaller ones make too many chunks


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place in a bucket."""

    spec: ParameterSpec
    box: Box  # what this place holds of the logical array
    start: int  # first element in the flat buffer

    @property
    def stop(self) -> int:
        """One past the last element in the flat buffer."""
        return self.start + self.box.size


@dataclass(frozen=True, slots=True)
class Part:
    """Whole rows of one parameter inside one region."""

    spec: ParameterSpec
    box: Box  # of the logical array
    start: int  # first element, counted from the start of the region
    stop: int  # one past the last


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat buffer of `num_regions` equal regions of `region` elements."""

    slots: tuple[Slot, ...]
    region: int
    num_regions: int
    row_unit: int
    sharers: int = 1  # experts: neighbours that have others; a region is cut and shared among those that have the same

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.region * self.num_regions

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no parameter."""
        return self.numel - sum(slot.box.size for slot in self.slots)

    def parts(self, index: int) -> tuple[Part, ...]:
        """What the region at `index` holds, in the order of the buffer."""
        first, last = index * self.region, (index + 1) * self.region
        return tuple(
            part
            for slot in self.slots
            if slot.start < last and slot.stop > first
            for part in _parts(slot, max(slot.start, first), min(slot.stop, last), first)
        )

    def region_of(self, shard: int) -> int:
        """The number of the region that a place owns, by its index within its CP x DP group."""
        return shard // self.sharers


def may_be_cut(spec: ParameterSpec) -> bool:
    """Whether ZeRO-1 may cut this array; a property of the logical array, whatever the layout."""
    return len(spec.shape) >= 2 and not is_small(spec.shape)


def plan_buckets(
    specs: Sequence[ParameterSpec], mesh: MeshShape, coordinate: Coordinate, *, bucket_bytes: float
) -> tuple[Bucket, ...]:
    """The buckets of one place in the mesh. `bucket_bytes` is the bf16 size after which a bucket is closed."""
    return tuple(_plan_bucket(group, mesh, coordinate) for group in _groups(specs, mesh, coordinate, bucket_bytes=bucket_bytes))


def row_units(specs: Sequence[ParameterSpec], mesh: MeshShape, *, bucket_bytes: float) -> dict[str, int]:
    """For every parameter that ZeRO-1 may cut: the rows at whose multiples this layout does so."""
    units: dict[str, int] = {}
    for stage in range(mesh.pp):
        here = Coordinate(pp=stage)
        for group in _groups(specs, mesh, here, bucket_bytes=bucket_bytes):
            unit = _row_unit(group, mesh, stage)
            units |= {spec.name: unit for spec in group if may_be_cut(spec)}
    return units


def bucket_key(mesh: MeshShape, coordinate: Coordinate) -> tuple[int, int, int]:
    """What of a place its buckets depend on: those who only hold other tokens have the same."""
    return coordinate.tp, coordinate.pp, mesh.shard(coordinate) % mesh.ep


def state_boxes(buckets: Sequence[Bucket], mesh: MeshShape, coordinate: Coordinate) -> list[tuple[str, Box]]:
    """The boxes of master weights (and moments, and bf16 weights) that one place writes to a checkpoint.

    Over all places of the mesh they tile every array exactly once.
    """
    shard = mesh.shard(coordinate)
    return [
        (part.spec.name, part.box)
        for bucket in buckets
        for part in bucket.parts(bucket.region_of(shard))
        if is_owner(part.spec, coordinate)
    ]


def _parts(slot: Slot, start: int, stop: int, region_start: int) -> Iterator[Part]:
    """The rows of a slot between two places of the buffer; those of a stack of matrices in up to three boxes."""
    columns = _columns(slot.box.shape)
    first, last = (start - slot.start) // columns, (stop - slot.start) // columns
    assert (last - first) * columns == stop - start, "a region cuts a row"
    for box in _row_boxes(slot.box, first, last):
        yield Part(slot.spec, box, start - region_start, start - region_start + box.size)
        start += box.size


def _columns(shape: tuple[int, ...]) -> int:
    """Elements of a row."""
    return prod(shape[row_dim(shape) + 1 :])


def _row_boxes(box: Box, first: int, last: int) -> Iterator[Box]:
    """Rows [first, last) of a box; if it is a stack, counted through its matrices."""
    dim = row_dim(box.shape)
    if dim == 0:
        yield Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.shape[1:]))
        return
    rows = box.shape[dim]
    while first < last:
        matrix, row = divmod(first, rows)
        whole = (last - first) // rows if row == 0 else 0  # matrices
        count = whole * rows or min(last - first, rows - row)
        offset = (box.offset[0] + matrix, box.offset[1] + row, *box.offset[2:])
        yield Box(offset, (max(1, whole), rows if whole else count, *box.shape[2:]))
        first += count


def _groups(
    specs: Sequence[ParameterSpec], mesh: MeshShape, coordinate: Coordinate, *, bucket_bytes: float
) -> list[list[ParameterSpec]]:
    """Whole blocks, in order, collected until a bucket is full; experts that are shared out apart, behind the others.

    The same on every TP index (sizes are those of index 0).
    """
    here = [spec for spec in specs if coordinate.pp in spec.stages]
    by_sharers = ([spec for spec in here if spec.sharers(mesh.ep) == n] for n in sorted({1, mesh.ep}))
    return [group for alike in by_sharers for group in _collected(alike, mesh, coordinate.pp, bucket_bytes) if group]


def _collected(specs: Sequence[ParameterSpec], mesh: MeshShape, stage: int, bucket_bytes: float) -> list[list[ParameterSpec]]:
    largest = Coordinate(pp=stage)
    groups: list[list[ParameterSpec]] = [[]]
    sizes = [0.0]
    for block in _blocks(specs):
        size = sum(2.0 * box.size for spec in block if (box := local_box(spec, mesh, largest)))
        alone = len(block[0].stages) > 1
        if groups[-1] and (alone or sizes[-1] >= bucket_bytes or groups[-1][-1].chunk != block[0].chunk):
            groups.append([])
            sizes.append(0.0)
        groups[-1] += block
        sizes[-1] += float("inf") if alone else size
    return _merge_small(groups, sizes, bucket_bytes / 2)


def _merge_small(groups: list[list[ParameterSpec]], sizes: list[float], least: float) -> list[list[ParameterSpec]]:
    """The last group of a virtual stage goes with the one before if it is small: its padding would not be."""
    merged: list[list[ParameterSpec]] = []
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        is_last = index + 1 == len(groups) or groups[index + 1][0].chunk != group[0].chunk
        joins = index > 0 and groups[index - 1][0].chunk == group[0].chunk and sizes[index - 1] < float("inf")
        if is_last and joins and size < least:
            merged[-1] += group
        else:
            merged.append(group)
    return merged


def _blocks(specs: Sequence[ParameterSpec]) -> Iterator[list[ParameterSpec]]:
    block: list[ParameterSpec] = []
    for spec in specs:
        if block and block[-1].block != spec.block:
            yield block
            block = []
        block.append(spec)
    if block:
        yield block


def _plan_bucket(group: Sequence[ParameterSpec], mesh: MeshShape, coordinate: Coordinate) -> Bucket:
    held, sharers = _held(group, mesh, coordinate), group[0].sharers(mesh.ep)
    num_regions, row_unit = mesh.shards // sharers, _row_unit(group, mesh, coordinate.pp)
    region, starts = _fit(_shapes(held), num_regions, row_unit)
    return Bucket(tuple(Slot(*held[index], start) for start, index in starts), region, num_regions, row_unit, sharers)


def _held(group: Sequence[ParameterSpec], mesh: MeshShape, coordinate: Coordinate) -> list[tuple[ParameterSpec, Box]]:
    return [(spec, box) for spec in group if (box := local_box(spec, mesh, coordinate))]


def _row_unit(group: Sequence[ParameterSpec], mesh: MeshShape, stage: int) -> int:
    """One unit for all TP indices: an array has one tile, although uneven cuts give the indices different plans."""
    distinct = {_shapes(_held(group, mesh, Coordinate(tp=index, pp=stage))) for index in range(mesh.tp)}
    kinds = {(spec.shape, spec.tp): spec for spec in group if may_be_cut(spec)}.values()
    legal = [unit for unit in ROW_UNITS if all(_unit_is_legal(spec, mesh, unit) for spec in kinds)]
    num_regions = mesh.shards // group[0].sharers(mesh.ep)
    costs = {unit: max(_padding(shapes, num_regions, unit) for shapes in distinct) for unit in legal}
    large = [unit for unit in legal if all(_tile_is_large(spec, unit) for spec in kinds)]
    costs = {unit: cost for unit, cost in costs.items() if unit in large} or costs
    cheap = [unit for unit, cost in costs.items() if cost <= (MAX_PADDING if unit <= WANTED_ROWS else CHEAP_PADDING)]
    return max(cheap) if cheap else min(costs, key=lambda unit: (costs[unit], -unit))


def _unit_is_legal(spec: ParameterSpec, mesh: MeshShape, unit: int) -> bool:
    """A row block must not be too large for a tile, and neither TP nor the end of a stacked matrix may cut through one."""
    dim = row_dim(spec.shape)
    if unit > 1 and unit * _columns(spec.shape) > MAX_TILE:
        return False
    if dim and spec.shape[dim] % unit:
        return False
    if spec.tp.kind is not Kind.CUT or spec.tp.dim != dim:
        return True
    starts = (spec.tp.interval(spec.shape[dim], mesh.tp, index) for index in range(mesh.tp))
    return all(start % unit == 0 or start == stop for start, stop in starts)


def _tile_is_large(spec: ParameterSpec, unit: int) -> bool:
    """Whether a row block fills tiles large enough that checksums stay far below the format's 1 %."""
    dim = row_dim(spec.shape)
    tp_dim = spec.tp.dim - dim if spec.tp.kind is Kind.CUT else None
    return 4 * prod(tile_shape(spec.shape[dim:], 4, tp_dim=tp_dim, row_tile=unit)) >= MIN_TILE_BYTES


Shapes = tuple[tuple[tuple[int, ...], bool], ...]
"""Of each array of a bucket: the shape of what a place holds of it, and whether it may be cut."""


def _shapes(held: Sequence[tuple[ParameterSpec, Box]]) -> Shapes:
    return tuple((box.shape, may_be_cut(spec)) for spec, box in held)


@lru_cache(maxsize=256)
def _padding(shapes: Shapes, num_regions: int, row_unit: int) -> float:
    """Which share of a bucket belongs to no parameter."""
    numel = _fit(shapes, num_regions, row_unit)[0] * num_regions
    return (numel - sum(prod(shape) for shape, _ in shapes)) / max(1, numel)


@lru_cache(maxsize=256)
def _fit(shapes: Shapes, num_regions: int, row_unit: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The smallest equal regions that take everything, and (start, which array) in the order of the buffer.

    Try, and grow by the alignment until it fits. Kept, because the layers of a model are alike, and so are most buckets.
    """
    large = [(index, prod(shape), row_unit * _columns(shape)) for index, (shape, cut) in enumerate(shapes) if cut]
    small = sorted(((index, prod(shape)) for index, (shape, cut) in enumerate(shapes) if not cut), key=lambda it: -it[1])
    align = lcm(ALIGN, *{unit for _, _, unit in large}) if num_regions > 1 else ALIGN
    total = sum(prod(shape) for shape, _ in shapes)
    region = _up(max(-(-total // num_regions), small[0][1] if small else 1), align)
    while True:
        starts = _try_fit(large, small, region, num_regions)
        if starts is not None:
            return region, tuple(sorted(starts))
        region += _up(region // 256 + 1, align)


def _try_fit(
    large: Sequence[tuple[int, int, int]], small: Sequence[tuple[int, int]], region: int, num_regions: int
) -> list[tuple[int, int]] | None:
    """Large matrices one after the other, small arrays into the emptiest gap; None if something does not fit.

    `large`: which array, its elements, those between two places where it may be cut; `small`: which, elements.
    """
    starts, gaps, position = [], [], 0
    for index, size, unit in large:
        start = _up(position, ALIGN)
        if start // region != (start + size - 1) // region:  # it crosses a cut
            start = _up(position, unit)
        gaps.append((position, start))
        starts.append((start, index))
        position = start + size
    if position > region * num_regions:
        return None
    spans = (*gaps, (position, region * num_regions))
    free = [(start - stop, start) for span in spans for start, stop in _within_regions(*span, region)]
    heapify(free)  # the largest first; of two equal ones the lower
    for index, size in small:
        left, start = free[0] if free else (0, 0)
        if -left < size:
            return None
        starts.append((start, index))
        taken = min(_up(size, ALIGN), -left)
        heapreplace(free, (left + taken, start + taken))
    return starts


def _within_regions(start: int, stop: int, region: int) -> Iterator[tuple[int, int]]:
    """A free span, cut at region boundaries; starts are aligned."""
    start = _up(start, ALIGN)
    while start < stop:
        end = min(stop, (start // region + 1) * region)
        yield start, end
        start = end


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
