"""The one shape that all formats have in common: a named array that is read box by box.

bfloat16 values travel as their uint16 bits everywhere in this package, because NumPy has no such type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.grid import DTYPES

__all__ = ["SLAB_BYTES", "Tensor", "bfloat16_bits", "from_checkpoint", "index", "slabs", "stack", "widened"]

SLAB_BYTES = 32 << 20
"""What is read and written at a time: rows up to this size, or one row."""

Values = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array of another format, or one to be written in it. `read` gives the values of a box, bfloat16 as uint16 bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[Box], Values]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * DTYPES[self.dtype]

    def slabs(self) -> Iterator[Values]:
        """All values, as slabs of rows in order."""
        return (self.read(box) for box in slabs(self.shape, DTYPES[self.dtype]))


def from_checkpoint(checkpoint: Checkpoint, array: str, name: str) -> Tensor:
    """An array of a checkpoint, called `name` on the other side. Reads check every chunk's crc32c."""
    spec = checkpoint.array(array)
    return Tensor(name, spec.dtype, spec.shape, lambda box: checkpoint.read(array, box))


def index(tensor: Tensor, number: int, name: str) -> Tensor:
    """`tensor[number]` along its first dimension, called `name`; only what is asked for is read."""

    def read(box: Box) -> Values:
        values: Values = tensor.read(Box((number, *box.offset), (1, *box.shape)))[0]
        return values

    return Tensor(name, tensor.dtype, tensor.shape[1:], read)


def stack(tensors: Sequence[Tensor], name: str) -> Tensor:
    """The opposite: tensors of one shape and type along a new first dimension, read one after the other."""
    first = tensors[0]

    def read(box: Box) -> Values:
        part = Box(box.offset[1:], box.shape[1:])
        return np.stack([tensor.read(part) for tensor in tensors[box.offset[0] : box.stop[0]]])

    return Tensor(name, first.dtype, (len(tensors), *first.shape), read)


def slabs(shape: Sequence[int], itemsize: int, *, most: int = SLAB_BYTES, rows: int = 1) -> Iterator[Box]:
    """Boxes of whole rows that tile an array in order, each of at most `most` bytes where `rows` rows allow.

    `rows`: cuts lie at multiples of this many.
    """
    if not shape:
        yield Box((), ())
        return
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    height = max(1, most // (row_bytes * rows)) * rows
    for start in range(0, shape[0], height):
        stop = min(start + height, shape[0])
        yield Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))


def widened(values: Values, dtype: str) -> NDArray[np.float32]:
    """As float32: exact for bfloat16 and float16."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest bfloat16, ties to even, as PyTorch rounds; every NaN becomes 0x7FC0."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
