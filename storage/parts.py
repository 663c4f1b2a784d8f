"""All boxes of a checkpoint as columns of integers, and every rule about them as one vectorised check.

Rows are sorted by pack, then by position. Offsets and shapes have as many columns as the array with the most dimensions; an
array with fewer has offset 0 and shape 1 in the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from storage.compress import MAX_EXTRA_BYTES, MIN_STORED_BYTES
from storage.grid import DTYPES, MAX_CHUNK_BYTES
from storage.pack import ALIGNMENT, CRC_BYTES, ArraySpec, Part

__all__ = ["PartTable", "chunk_counts", "spec_problems", "table_problems"]

Ints = NDArray[np.int64]

MAX_NDIM = 8
MAX_ELEMENTS = 1 << 50

LENGTH_BYTES = 4
"""Of each chunk's length in the table behind a compressed part."""

MAX_TABLE_BYTES = 64 << 20
"""Of such a table: 16 million chunks."""


@dataclass(frozen=True, eq=False)
class PartTable:
    """One row per part: which array (index), which pack (index), byte position in it, and the box."""

    array: Ints
    pack: Ints
    position: Ints
    offset: Ints
    """Matrix of rows x dimensions."""
    shape: Ints

    def __len__(self) -> int:
        return len(self.array)

    @cached_property
    def stop(self) -> Ints:
        """First index past each box."""
        return self.offset + self.shape

    @cached_property
    def _by_array(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.array, kind="stable").astype(np.int64)
        return order, self.array[order]

    def rows_of(self, array: int) -> Ints:
        """The rows of one array, in the order they lie."""
        order, sorted_arrays = self._by_array
        first, last = np.searchsorted(sorted_arrays, [array, array + 1])
        return order[first:last]

    def box(self, row: int, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of a row, of an array with `ndim` dimensions."""
        return tuple(self.offset[row, :ndim].tolist()), tuple(self.shape[row, :ndim].tolist())

    def part(self, row: int, arrays: Sequence[ArraySpec]) -> Part:
        """A row as an object."""
        spec = arrays[int(self.array[row])]
        offset, shape = self.box(row, len(spec.shape))
        return Part(array=spec.name, offset=offset, shape=shape, position=int(self.position[row]))

    def renumbered(self, numbers: dict[int, int]) -> PartTable:
        """The same rows with other array indices: `numbers` maps each old one to the new one."""
        new = np.zeros(len(numbers), np.int64)
        new[np.fromiter(numbers.keys(), np.int64)] = np.fromiter(numbers.values(), np.int64)
        array = new[self.array] if len(self) else self.array
        return PartTable(array, self.pack, self.position, self.offset, self.shape)

    @classmethod
    def concatenate(cls, tables: Sequence[PartTable], ndim: int) -> PartTable:
        """Rows of all tables, in order, widened to `ndim` dimensions."""
        return cls(
            array=np.concatenate([t.array for t in tables]),
            pack=np.concatenate([t.pack for t in tables]),
            position=np.concatenate([t.position for t in tables]),
            offset=np.concatenate([_widen(t.offset, ndim, 0) for t in tables]),
            shape=np.concatenate([_widen(t.shape, ndim, 1) for t in tables]),
        )

    @classmethod
    def of(cls, parts: Sequence[Part], indices: dict[str, int], pack: int) -> PartTable:
        """Rows of the parts of one pack."""
        ndim = max((len(p.shape) for p in parts), default=0)
        rows = len(parts)
        return cls(
            array=np.fromiter((indices[p.array] for p in parts), np.int64, rows),
            pack=np.full(rows, pack, np.int64),
            position=np.fromiter((p.position for p in parts), np.int64, rows),
            offset=np.array([p.offset + (0,) * (ndim - len(p.offset)) for p in parts], np.int64).reshape(rows, ndim),
            shape=np.array([p.shape + (1,) * (ndim - len(p.shape)) for p in parts], np.int64).reshape(rows, ndim),
        )


def _widen(matrix: Ints, ndim: int, fill: int) -> Ints:
    return np.pad(matrix, ((0, 0), (0, ndim - matrix.shape[1])), constant_values=fill)


def spec_problems(spec: ArraySpec) -> list[str]:
    """Which rules an array's description breaks."""
    if spec.dtype not in DTYPES:
        return [f"array {spec.name}: unknown dtype {spec.dtype[:40]!r}"]
    if len(spec.shape) > MAX_NDIM or len(spec.tile) != len(spec.shape):
        return [f"array {spec.name}: {len(spec.shape)} dimensions and {len(spec.tile)} tile sizes"]
    if any(not 1 <= t <= n for t, n in zip(spec.tile, spec.shape, strict=True)):
        return [f"array {spec.name}: tile {spec.tile} does not fit shape {spec.shape}"]
    if math.prod(spec.shape) > MAX_ELEMENTS:
        return [f"array {spec.name}: shape {spec.shape} is too large"]
    if math.prod(spec.tile) * spec.itemsize > MAX_CHUNK_BYTES:
        return [f"array {spec.name}: a chunk of {spec.tile} {spec.dtype} has more than {MAX_CHUNK_BYTES} bytes"]
    return []


def table_problems(
    table: PartTable, arrays: Sequence[ArraySpec], pack_nbytes: Sequence[int], stored: Ints | None = None
) -> list[str]:
    """Which rules the boxes break, given valid specs: bounds, grid, order, overlap in a pack, number of elements in all.

    `stored`: the bytes of each part, where they are compressed.
    """
    if table.offset.shape[1] != max((len(s.shape) for s in arrays), default=0):
        return ["the parts have another number of dimensions than the arrays"]
    if not len(table):
        return ["no parts"] if arrays else []
    columns = (table.array, table.pack, table.position, table.offset, table.shape)
    if min(int(c.min(initial=0)) for c in columns) < 0 or max(int(c.max(initial=0)) for c in columns) > MAX_ELEMENTS * 16:
        return ["a part has a number out of range"]
    if int(table.array.max()) >= len(arrays) or int(table.pack.max()) >= len(pack_nbytes):
        return ["a part refers to an array or a pack that is not listed"]
    shape, tile, chunk_nbytes = _spec_matrices(arrays, table.offset.shape[1])
    whole, tiles = shape[table.array], tile[table.array]
    rules = [
        ("has a box outside its array", (table.shape < 1) | (table.offset >= whole) | (table.shape > whole - table.offset)),
        (
            "has a box that cuts through tiles",
            (table.offset % tiles != 0) | ((table.stop % tiles != 0) & (table.stop != whole)),
        ),
    ]
    for text, broken in rules:
        bad = np.flatnonzero(broken.any(axis=1))
        if len(bad):
            return [f"part {bad[0]} of {arrays[int(table.array[bad[0]])].name} {text}"]
    counts = (-(-table.shape // tiles)).prod(axis=1)
    nbytes = counts * (chunk_nbytes[table.array] + CRC_BYTES) if stored is None else stored
    odd = [] if stored is None else _stored_problems(stored, counts, chunk_nbytes[table.array])
    problems = odd or _order_problems(table, nbytes, np.asarray(pack_nbytes, dtype=np.int64))
    return problems or _volume_problems(table, arrays)


def chunk_counts(table: PartTable, arrays: Sequence[ArraySpec]) -> Ints:
    """Chunks of each part."""
    _, tile, _ = _spec_matrices(arrays, table.offset.shape[1])
    counts: Ints = (-(-table.shape // tile[table.array])).prod(axis=1)
    return counts


def _stored_problems(stored: Ints, counts: Ints, chunk_nbytes: Ints) -> list[str]:
    """What is wrong with the sizes of compressed parts: of `counts` chunks, whose values have `chunk_nbytes` each."""
    table = LENGTH_BYTES * counts + CRC_BYTES
    least, most = MIN_STORED_BYTES * counts + table, (chunk_nbytes + MAX_EXTRA_BYTES) * counts + table
    bad = np.flatnonzero((stored < least) | (stored > most) | (table > MAX_TABLE_BYTES))
    return [f"part {bad[0]} has {counts[bad[0]]} chunks in {stored[bad[0]]} bytes"] if len(bad) else []


def _spec_matrices(arrays: Sequence[ArraySpec], ndim: int) -> tuple[Ints, Ints, Ints]:
    shape = np.array([s.shape + (1,) * (ndim - len(s.shape)) for s in arrays], np.int64).reshape(len(arrays), ndim)
    tile = np.array([s.tile + (1,) * (ndim - len(s.tile)) for s in arrays], np.int64).reshape(len(arrays), ndim)
    return shape, tile, np.array([math.prod(s.tile) * s.itemsize for s in arrays], np.int64)


def _order_problems(table: PartTable, nbytes: Ints, pack_nbytes: Ints) -> list[str]:
    end = table.position + nbytes
    if (table.position % ALIGNMENT != 0).any():
        return [f"a part does not start at a multiple of {ALIGNMENT} bytes"]
    if (end > pack_nbytes[table.pack]).any():
        return ["a part reaches past the end of its pack"]
    same = table.pack[1:] == table.pack[:-1]
    if (table.pack[1:] < table.pack[:-1]).any() or (same & (table.position[1:] < end[:-1])).any():
        return ["parts overlap in a pack, or are not sorted by pack and position"]
    return []


def _volume_problems(table: PartTable, arrays: Sequence[ArraySpec]) -> list[str]:
    stored = np.zeros(len(arrays), np.int64)
    np.add.at(stored, table.array, table.shape.prod(axis=1))
    wanted = np.array([math.prod(s.shape) for s in arrays], np.int64)
    return [
        f"array {arrays[i].name}: boxes of {stored[i]} elements for {wanted[i]}" for i in np.flatnonzero(stored != wanted)[:8]
    ]
