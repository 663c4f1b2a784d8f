"""Which bytes to read for which boxes: a pure function from a manifest and wanted boxes to a list of ranges.

Resharding is nothing else: what is wanted is boxes, what is stored is boxes, the plan is their intersection in whole chunks.
No I/O happens here, so the plan can be counted (bytes, requests), compared with a bound, and tested without a store.

Chunks are numbered in C order over their part's tile grid, which is also the order in which they lie. Each chunk that any box
touches is read once, whole, because its checksum covers it whole. Neighbouring runs of chunks are merged into one range while
the bytes in between are few.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.box import Box, coverage_problems
from storage.errors import CoverageError
from storage.manifest import Manifest
from storage.pack import CRC_BYTES, PartGeometry
from storage.parts import LENGTH_BYTES

__all__ = [
    "PartRead",
    "PlannedRange",
    "ReadLimits",
    "ReadPlan",
    "Span",
    "cut_spans",
    "group_spans",
    "part_read",
    "plan_reads",
    "rectangles",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """How ranges are merged and cut."""

    gap_bytes: int
    """Two runs with at most this many unwanted bytes between them may be read as one."""
    max_waste: float
    """Unwanted bytes that merging may add, as a share of the wanted ones."""
    range_bytes: int
    """No range is longer, unless a single chunk is."""


@dataclass(frozen=True, slots=True)
class PartRead:
    """A stored part that some wanted boxes touch."""

    array: int
    """Index in the manifest's arrays."""
    box: Box
    geometry: PartGeometry
    wants: tuple[int, ...]
    """Which of the wanted boxes."""
    starts: NDArray[np.int64] | None = None
    """Of compressed chunks: where each begins in the pack, and where the last one ends. Else all have the same size."""


@dataclass(frozen=True, slots=True)
class Span:
    """Chunks `first` to `first + count` of a part, which lie back to back from byte `position` of the pack."""

    part: int
    """Index in the plan's parts."""
    first: int
    count: int
    position: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """Bytes `start` to `stop` of a pack, and the runs of chunks in them."""

    pack: int
    start: int
    stop: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All that has to be read, sorted by pack and position."""

    parts: tuple[PartRead, ...]
    ranges: tuple[PlannedRange, ...]
    wanted_bytes: int
    """Bytes of the values in the wanted boxes."""

    @property
    def read_bytes(self) -> int:
        """Bytes that will be read, and of compressed parts the tables that have been."""
        tables = sum(LENGTH_BYTES * part.geometry.num_chunks + CRC_BYTES for part in self.parts if part.starts is not None)
        return sum(r.stop - r.start for r in self.ranges) + tables


def plan_reads(
    manifest: Manifest,
    wants: Sequence[tuple[str, Box]],
    *,
    limits: ReadLimits,
    find: Callable[[Iterable[int]], Mapping[int, NDArray[np.int64]]] = lambda rows: {},
) -> ReadPlan:
    """The ranges that hold every box of `wants` (array name, box). `CoverageError` lists all that are not stored.

    `find` says where the chunks of compressed parts begin (`storage.lengths`), given the rows that are needed.
    """
    touched, problems = _touched_rows(manifest, wants)
    if problems:
        raise CoverageError(f"the checkpoint does not hold what is wanted: {'; '.join(problems[:8])}", problems=problems)
    parts, spans, starts = list[PartRead](), list[tuple[int, Span]](), find(sorted(touched))
    for row in sorted(touched):
        part = part_read(manifest, row, starts.get(row), tuple(touched[row]))
        pack, position = int(manifest.table.pack[row]), int(manifest.table.position[row])
        boxes = [wants[i][1] for i in part.wants]
        spans += [(pack, span) for span in _part_spans(len(parts), part, position, boxes, limits.range_bytes)]
        parts.append(part)
    wanted = sum(box.size * manifest.array(name).itemsize for name, box in wants)
    return ReadPlan(tuple(parts), tuple(group_spans(spans, limits)), wanted)


def part_read(manifest: Manifest, row: int, starts: NDArray[np.int64] | None = None, wants: tuple[int, ...] = ()) -> PartRead:
    """A row of the part table, to be read."""
    number = int(manifest.table.array[row])
    spec = manifest.arrays[number]
    box = Box(*manifest.table.box(row, len(spec.shape)))
    return PartRead(number, box, PartGeometry.of(spec, box.shape), wants, starts)


def _touched_rows(manifest: Manifest, wants: Sequence[tuple[str, Box]]) -> tuple[dict[int, list[int]], list[str]]:
    """Row of the part table -> the wants that touch it; and what is wanted but not there."""
    touched: dict[int, list[int]] = defaultdict(list)
    problems: list[str] = []
    table = manifest.table
    for number, (name, box) in enumerate(wants):
        index = manifest.index.get(name)
        if index is None:
            problems.append(f"array {name} is missing")
            continue
        shape = manifest.arrays[index].shape
        if len(shape) != box.ndim or not Box.whole(shape).contains(box):
            problems.append(f"array {name} has shape {shape}: box {box.offset} + {box.shape} does not lie in it")
            continue
        rows = table.rows_of(index)
        starts = np.maximum(table.offset[rows, : box.ndim], np.array(box.offset, np.int64))
        stops = np.minimum(table.stop[rows, : box.ndim], np.array(box.stop, np.int64))
        hit = (starts < stops).all(axis=1)
        problems += [f"array {name}: {text}" for text in coverage_problems(box, starts[hit], stops[hit])]
        for row in rows[hit].tolist():
            touched[row].append(number)
    return touched, problems


def _part_spans(index: int, part: PartRead, position: int, boxes: Sequence[Box], range_bytes: int) -> Iterator[Span]:
    """Runs of wanted chunks of one part, none longer than a range."""
    for start, stop in _runs(part, boxes):
        yield from cut_spans(index, part, position, range(start, stop), range_bytes)


def cut_spans(index: int, part: PartRead, position: int, chunks: range, most_bytes: int) -> Iterator[Span]:
    """A run of chunks of a part that begins at `position`, in pieces of at most `most_bytes`, or of one chunk."""
    first, stride, starts = chunks.start, part.geometry.stride, part.starts
    while first < chunks.stop:
        if starts is None:
            last = first + max(1, most_bytes // stride)
        else:
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + most_bytes, "right")) - 1)
        last = min(last, chunks.stop)
        if starts is None:
            yield Span(index, first, last - first, position + first * stride, position + last * stride)
        else:
            yield Span(index, first, last - first, int(starts[first]), int(starts[last]))
        first = last


def _runs(part: PartRead, boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """Numbers of the wanted chunks, as runs: start inclusive, stop exclusive."""
    if any(box.contains(part.box) for box in boxes):
        return [(0, part.geometry.num_chunks)]
    wanted = np.zeros(part.geometry.grid, dtype=bool)
    for box in boxes:
        wanted[tuple(slice(lo, hi) for lo, hi in zip(*tile_range(part, box), strict=True))] = True
    edges = np.flatnonzero(np.diff(wanted.reshape(-1), prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def tile_range(part: PartRead, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First (inclusive) and last (exclusive) tile of a part's grid that a box touches. They must intersect."""
    common = part.box.intersect(box)
    assert common is not None  # the plan only keeps parts that a want touches
    inside = common.relative_to(part.box)
    first = tuple(o // t for o, t in zip(inside.offset, part.geometry.tile, strict=True))
    return first, tuple(-(-s // t) for s, t in zip(inside.stop, part.geometry.tile, strict=True))


def group_spans(spans: list[tuple[int, Span]], limits: ReadLimits) -> Iterator[PlannedRange]:
    """Merge spans (pack, span) that lie close together into ranges."""
    open_pack, group, useful = -1, list[Span](), 0
    for pack, span in sorted(spans, key=lambda item: (item[0], item[1].position)):
        size = span.stop - span.position
        if group:
            gap, length = span.position - group[-1].stop, span.stop - group[0].position
            waste = length - useful - size
            close = gap <= limits.gap_bytes and waste <= limits.max_waste * (useful + size)
            if pack != open_pack or not close or length > limits.range_bytes:
                yield PlannedRange(open_pack, group[0].position, group[-1].stop, tuple(group))
                group, useful = [], 0
        open_pack = pack
        group.append(span)
        useful += size
    if group:
        yield PlannedRange(open_pack, group[0].position, group[-1].stop, tuple(group))


def rectangles(first: int, count: int, grid: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A run of chunks in C order as rectangles of the grid, each of which lies back to back: (first tile, shape), in order."""
    if not grid:
        yield (), ()
        return
    row = math.prod(grid[1:])
    stop = first + count
    head = min(-(-first // row) * row, stop)
    tail = max(stop // row * row, head)
    if first < head:
        yield from _in_row(first // row, first % row, head - first, grid)
    if head < tail:
        yield (head // row, *(0,) * (len(grid) - 1)), ((tail - head) // row, *grid[1:])
    if tail < stop:
        yield from _in_row(tail // row, 0, stop - tail, grid)


def _in_row(index: int, first: int, count: int, grid: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for start, shape in rectangles(first, count, grid[1:]):
        yield (index, *start), (1, *shape)
