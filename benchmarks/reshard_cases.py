"""What benchmarks.reshard stores and who wants which part of it. No torch: parent and ranks share it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.grid import tile_shape
from storage.pack import ArraySpec

WRITERS = 4
ROW_TILE = 64
"""Rows on whose multiples the writers' cuts lie, as the engine's bucket plan would say."""


@dataclass(frozen=True)
class Array:
    """A matrix; `tp_dim` is the dimension that tensor parallelism cuts."""

    name: str
    shape: tuple[int, int]
    tp_dim: int
    number: int

    def spec(self) -> ArraySpec:
        """As storage keeps it."""
        tile = tile_shape(self.shape, 4, tp_dim=self.tp_dim, row_tile=ROW_TILE)
        return ArraySpec(name=self.name, shape=self.shape, dtype="float32", tile=tile)


def arrays(*, tiny: bool) -> list[Array]:
    """1 GiB (tiny: 1 MiB) of matrices that tensor parallelism cuts by columns, as wo and w2, and a quarter as much by rows."""
    shape = (256, 256) if tiny else (4096, 4096)
    count = 4 if tiny else 16
    columns = [Array(f"master/layers.{n}.w2", shape, 1, n) for n in range(count)]
    return columns + [Array(f"master/layers.{n}.w1", shape, 0, count + n) for n in range(count // 4)]


def bits(array: Array, box: Box) -> NDArray[np.int32]:
    """The values, as bits: every element differs from every other one of its array."""
    rows = np.arange(box.offset[0], box.stop[0], dtype=np.int32)[:, None] * np.int32(array.shape[1])
    columns = np.arange(box.offset[1], box.stop[1], dtype=np.int32)[None, :]
    return rows + columns + np.int32(array.number * 7919 + 1)


@dataclass(frozen=True)
class Pair:
    """A layout to load under. Everything was saved by rows over four writers."""

    world: int
    columns: bool = False
    stages: bool = False
    """Two stages of two ranks: half of the arrays each, cut along the dimension of tensor parallelism."""

    def takes(self, array: Array) -> bool:
        """Columns are only ever wanted of what tensor parallelism cuts by columns."""
        return array.tp_dim == 1 or not self.columns

    def dim(self, array: Array) -> int:
        """Along which dimension the ranks cut an array."""
        return array.tp_dim if self.stages else int(self.columns)


PAIRS = {
    "rows_to_columns": Pair(4, columns=True),
    "4_to_2": Pair(2),
    "4_to_3": Pair(3),
    "dp_to_tp_pp": Pair(4, stages=True),
}


def boxes(pair: Pair, rank: int, held: list[Array]) -> list[tuple[Array, Box]]:
    """What a rank wants."""
    if not pair.stages:
        return [(array, part(array, pair.dim(array), pair.world, rank)) for array in held if pair.takes(array)]
    mine = held[rank // 2 :: 2]
    return [(array, part(array, pair.dim(array), 2, rank % 2)) for array in mine]


def part(array: Array, dim: int, world: int, rank: int) -> Box:
    """An even cut, the last part shorter."""
    chunk = -(-array.shape[dim] // world)
    start = min(rank * chunk, array.shape[dim])
    shape, offset = list(array.shape), [0, 0]
    shape[dim], offset[dim] = min(chunk, array.shape[dim] - start), start
    return Box(tuple(offset), tuple(shape))
