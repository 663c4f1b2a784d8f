"""Packs: one file per writer, made of checksummed chunks laid back to back.

A pack is planned completely before its first byte is written (`plan_pack` is pure), so that a writer can copy its boxes
straight to their final place in a reused arena, in tile order, at no extra cost; a process without torch then only has to put
a crc32c after each chunk (`seal`) and stream the buffer out. Nothing in a pack is ever rewritten.

- A part is one box of one array: whole chunks, in C order over the box's tile grid. Parts start at multiples of 64 bytes; the
  bytes between two parts are zero.
- A chunk is one whole tile in C order, little endian, followed by its crc32c in four little-endian bytes: exactly what Zarr's
  `bytes` and `crc32c` codecs make, so that a Zarr view can point into packs. A tile that reaches past the array's end is stored
  full size, with zeros there, because Zarr requires it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import google_crc32c
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from storage.box import Box
from storage.grid import DTYPES

__all__ = [
    "ALIGNMENT",
    "CRC_BYTES",
    "ArraySpec",
    "Damage",
    "PackLayout",
    "Part",
    "PartGeometry",
    "bands",
    "bits_dtype",
    "check",
    "iter_chunks",
    "plan_pack",
    "seal",
    "write_part",
]

ALIGNMENT = 64
CRC_BYTES = 4

Attribute = str | int | float | bool | list[str]
Bytes = NDArray[np.uint8]


class ArraySpec(Struct, frozen=True, kw_only=True):
    """One named array of the logical state: full shape, type, and the grid it is stored on."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tile: tuple[int, ...]
    attributes: dict[str, Attribute] = field(default_factory=dict)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the values, without padding and checksums."""
        return math.prod(self.shape) * self.itemsize


class Part(Struct, frozen=True, kw_only=True):
    """One box of one array, and the byte offset of its first chunk in the pack."""

    array: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    position: int

    @property
    def box(self) -> Box:
        """The box, in elements of the whole array."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class PartGeometry:
    """How the chunks of one box lie, counted from the part's first byte."""

    grid: tuple[int, ...]
    """Tiles along each dimension."""
    tile: tuple[int, ...]
    chunk_nbytes: int
    """Bytes of one chunk's values."""

    @property
    def stride(self) -> int:
        """Bytes from one chunk to the next: the values and their crc."""
        return self.chunk_nbytes + CRC_BYTES

    @property
    def num_chunks(self) -> int:
        """Chunks of the part."""
        return math.prod(self.grid)

    @property
    def nbytes(self) -> int:
        """Bytes of the part, from its first chunk to its last crc."""
        return self.num_chunks * self.stride

    @classmethod
    def of(cls, spec: ArraySpec, shape: Sequence[int]) -> PartGeometry:
        """The geometry of a box of `shape` that starts on the grid of `spec`."""
        grid = tuple(-(-n // t) for n, t in zip(shape, spec.tile, strict=True))
        return cls(grid, spec.tile, math.prod(spec.tile) * spec.itemsize)

    def tiles(
        self, buffer: Bytes, start: int, counts: Sequence[int], dtype: np.dtype[np.unsignedinteger]
    ) -> NDArray[np.unsignedinteger]:
        """A view of `counts` tiles that lie back to back from byte `start` of `buffer`: one axis per count, then the tile's."""
        grid_strides = _c_strides(counts, self.stride)
        tile_strides = _c_strides(self.tile, dtype.itemsize)
        return np.ndarray((*counts, *self.tile), dtype, buffer, start, (*grid_strides, *tile_strides))


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Where everything lies in a pack that does not exist yet."""

    specs: dict[str, ArraySpec]
    parts: tuple[Part, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk whose bytes do not have the checksum that follows them."""

    array: str
    offset: int
    """Byte offset of the chunk in the pack."""
    reason: str
    pack: str = ""


def bits_dtype(itemsize: int) -> np.dtype[np.unsignedinteger]:
    """The little-endian unsigned type that holds one element's bits."""
    return np.dtype(f"<u{itemsize}")


def plan_pack(specs: Mapping[str, ArraySpec], boxes: Sequence[tuple[str, Box]]) -> PackLayout:
    """Lay `boxes` (array name, box) one after the other in a pack, in the order given."""
    parts, position = [], 0
    sizes: dict[tuple[object, ...], int] = {}  # of boxes that are alike: most are, with the layers of a model
    for name, box in boxes:
        spec = specs[name]
        alike = (spec.dtype, spec.shape, spec.tile, box.offset, box.shape)
        if alike not in sizes:
            problem = off_grid(spec, box)
            if problem:
                raise ValueError(f"{name}: {problem}")
            sizes[alike] = PartGeometry.of(spec, box.shape).nbytes
        position = -(-position // ALIGNMENT) * ALIGNMENT
        parts.append(Part(array=name, offset=box.offset, shape=box.shape, position=position))
        position += sizes[alike]
    return PackLayout(specs={p.array: specs[p.array] for p in parts}, parts=tuple(parts), nbytes=position)


def off_grid(spec: ArraySpec, box: Box) -> str:
    """Why `box` cannot be stored as whole tiles of `spec`; empty if it can."""
    if box.ndim != len(spec.shape):
        return f"box {box.offset} + {box.shape} has {box.ndim} dimensions, the array {len(spec.shape)}"
    for offset, stop, size, tile in zip(box.offset, box.stop, spec.shape, spec.tile, strict=True):
        if stop > size:
            return f"box {box.offset} + {box.shape} reaches past the shape {spec.shape}"
        if offset % tile or (stop % tile and stop != size):
            return f"box {box.offset} + {box.shape} cuts through the tiles {spec.tile} of shape {spec.shape}"
    return ""


def iter_chunks(part: Part, spec: ArraySpec) -> Iterator[tuple[int, Box]]:
    """The chunks of a part in the order they lie: byte offset in the pack, and the elements that are inside the array."""
    geometry = PartGeometry.of(spec, part.shape)
    for number, cell in enumerate(itertools.product(*(range(n) for n in geometry.grid))):
        offset = tuple(o + c * t for o, c, t in zip(part.offset, cell, spec.tile, strict=True))
        shape = tuple(min(t, n - o) for t, n, o in zip(spec.tile, spec.shape, offset, strict=True))
        yield part.position + number * geometry.stride, Box(offset, shape)


def bands(spec: ArraySpec, part: Part, max_nbytes: int) -> Iterator[Part]:
    """A part in rows of tiles, as many as fit `max_nbytes`, at least one: they lie back to back, and each is a part itself."""
    geometry = PartGeometry.of(spec, part.shape)
    if not part.shape:
        yield part
        return
    row = geometry.stride * (geometry.num_chunks // geometry.grid[0])
    rows = max(1, max_nbytes // row)
    for first in range(0, geometry.grid[0], rows):
        start = first * spec.tile[0]
        yield Part(
            array=part.array,
            offset=(part.offset[0] + start, *part.offset[1:]),
            shape=(min(rows * spec.tile[0], part.shape[0] - start), *part.shape[1:]),
            position=part.position + first * row,
        )


def write_part(buffer: Bytes, spec: ArraySpec, part: Part, source: NDArray[np.generic]) -> None:
    """Write the values of a part (an array of the box's shape and the spec's item size) to its place in a pack."""
    bits = bits_dtype(spec.itemsize)
    geometry = PartGeometry.of(spec, part.shape)
    tiles = geometry.tiles(buffer, part.position, geometry.grid, bits)
    values = source.view(bits).reshape(part.shape)  # NumPy turns 0-d arrays into 1-d ones now and then
    for block in blocks(part.shape, spec.tile):
        if block.partial:
            tiles[block.cells] = 0
        tiles[block.cells + block.inner] = block.of(values)


@dataclass(frozen=True, slots=True)
class Block:
    """A group of tiles of a box that can be copied by one NumPy assignment: along each dimension all whole, or one cut tile."""

    cells: tuple[slice, ...]
    """Which tiles, counted from the first of the grid."""
    inner: tuple[slice, ...]
    """Which elements of each of these tiles."""
    first: tuple[int, ...]
    """First element, counted from the box's."""
    partial: bool

    def of(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """The elements of the block in an array of the box's shape, as a view with the axes of tiles: counts, then elements."""
        counts = tuple(c.stop - c.start for c in self.cells)
        sizes = tuple(s.stop - s.start for s in self.inner)
        slices = tuple(slice(f, f + c * n) for f, c, n in zip(self.first, counts, sizes, strict=True))
        region = values[slices] if slices else values  # a 0-d array indexed by nothing would be a copy
        steps = tuple(s * n for s, n in zip(region.strides, sizes, strict=True))
        return np.lib.stride_tricks.as_strided(region, (*counts, *sizes), (*steps, *region.strides))


def blocks(shape: Sequence[int], tile: Sequence[int], *, skip: Sequence[int] | None = None) -> Iterator[Block]:
    """Cut a box of `shape` into blocks. `skip`: how many elements before the box its first tile starts (default none)."""
    axes = [list(_segments(n, t, s)) for n, t, s in zip(shape, tile, skip or (0,) * len(shape), strict=True)]
    for segments in itertools.product(*axes):
        yield Block(
            cells=tuple(cells for cells, _, _ in segments),
            inner=tuple(inner for _, inner, _ in segments),
            first=tuple(first for _, _, first in segments),
            partial=any(i.stop - i.start < t for (_, i, _), t in zip(segments, tile, strict=True)),
        )


def _segments(size: int, tile: int, skip: int) -> Iterator[tuple[slice, slice, int]]:
    """One dimension: the cut tile at the start, the whole ones, the cut one at the end; (tiles, elements in a tile, first)."""
    cell, done = 0, 0
    if skip:
        done = min(tile - skip, size)
        yield slice(0, 1), slice(skip, skip + done), 0
        cell = 1
    whole = (size - done) // tile
    if whole:
        yield slice(cell, cell + whole), slice(0, tile), done
        cell, done = cell + whole, done + whole * tile
    if done < size:
        yield slice(cell, cell + 1), slice(0, size - done), done


def seal(buffer: Bytes, layout: PackLayout) -> None:
    """Write the crc32c behind each chunk of a filled pack, in place. `buffer` holds exactly the pack's bytes.

    Measured on one core: 0.1 CPU seconds per GiB with chunks of 16 KiB to 4 MiB, 0.2 with 2 to 8 KiB.
    """
    _require_size(buffer, layout)
    for part in layout.parts:
        geometry = PartGeometry.of(layout.specs[part.array], part.shape)
        count = geometry.num_chunks
        stored_crcs(buffer, part.position, geometry, count)[:] = chunk_crcs(buffer, part.position, geometry, count)


def check(buffer: Bytes, layout: PackLayout) -> list[Damage]:
    """Every chunk of a pack whose bytes do not match their crc32c."""
    _require_size(buffer, layout)
    found = []
    for part in layout.parts:
        geometry = PartGeometry.of(layout.specs[part.array], part.shape)
        crcs = chunk_crcs(buffer, part.position, geometry, geometry.num_chunks)
        wrong = np.flatnonzero(crcs != stored_crcs(buffer, part.position, geometry, geometry.num_chunks)).tolist()
        found += [Damage(part.array, part.position + n * geometry.stride, "crc32c does not match") for n in wrong]
    return found


def chunk_crcs(buffer: Bytes, start: int, geometry: PartGeometry, count: int) -> NDArray[np.uint32]:
    """The crc32c of each of `count` chunks that lie back to back from byte `start`."""
    frozen = buffer.view()
    frozen.flags.writeable = False  # google_crc32c accepts read-only arrays only
    value: Callable[[Bytes], int] = google_crc32c.value
    # rows of one array: half of what it takes to cut out small chunks one by one
    chunks = np.ndarray((count, geometry.chunk_nbytes), np.uint8, frozen, start, (geometry.stride, 1))
    return np.fromiter(map(value, chunks), "<u4", count)


def stored_crcs(buffer: Bytes, start: int, geometry: PartGeometry, count: int) -> NDArray[np.uint32]:
    """A view of the checksums that stand behind `count` chunks from byte `start` on."""
    return np.ndarray((count,), np.dtype("<u4"), buffer, start + geometry.chunk_nbytes, (geometry.stride,))


def _require_size(buffer: Bytes, layout: PackLayout) -> None:
    if buffer.nbytes != layout.nbytes:
        raise ValueError(f"the buffer has {buffer.nbytes} bytes, the pack {layout.nbytes}")


def _c_strides(counts: Sequence[int], last: int) -> tuple[int, ...]:
    strides, step = [], last
    for count in reversed(counts):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))
