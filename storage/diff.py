"""Which arrays differ between two checkpoints, and by how much.

The digests already say which arrays are equal bit for bit, whatever the layouts that wrote them, so only the others are read: a
slab of rows at a time, never a whole array of a large model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.pack import ArraySpec, bits_dtype

if TYPE_CHECKING:
    from storage.checkpoint import Checkpoint

__all__ = ["ArrayDiff", "diff"]

SLAB_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class ArrayDiff:
    """How one array differs."""

    array: str
    kind: str
    """missing (only in the second), extra (only in the first), spec (other shape or type), values."""
    text: str
    num_different: int = 0
    """Elements with other bits."""
    max_abs: float = 0.0
    """Largest absolute difference, in float64; NaN if a NaN is on one side only."""


def diff(a: Checkpoint, b: Checkpoint) -> list[ArrayDiff]:
    """Every array that is not the same, bit for bit, in both; sorted by name. Tiles and layouts do not matter."""
    found = []
    for name in sorted(set(a.names) | set(b.names)):
        if name not in a.manifest.index:
            found.append(ArrayDiff(name, "missing", f"{name} is only in the second"))
        elif name not in b.manifest.index:
            found.append(ArrayDiff(name, "extra", f"{name} is only in the first"))
        else:
            found += _compare(a, b, a.array(name), b.array(name))
    return found


def _compare(a: Checkpoint, b: Checkpoint, left: ArraySpec, right: ArraySpec) -> list[ArrayDiff]:
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        text = f"{left.name}: {left.dtype} {left.shape} in the first, {right.dtype} {right.shape} in the second"
        return [ArrayDiff(left.name, "spec", text)]
    if a.manifest.digests[left.name] == b.manifest.digests[left.name]:
        return []
    different, largest = 0, 0.0
    for box in _slabs(left):
        one, other = a.read(left.name, box), b.read(left.name, box)
        bits = bits_dtype(left.itemsize)
        changed = one.view(bits) != other.view(bits)
        different += int(changed.sum())
        if changed.any():
            gap = np.abs(_wide(one[changed], left.dtype) - _wide(other[changed], left.dtype))
            largest = float(np.maximum(largest, gap.max()))
    text = f"{left.name}: {different} of {math.prod(left.shape)} elements differ, by at most {largest:.6g}"
    return [ArrayDiff(left.name, "values", text, different, largest)]


def _slabs(spec: ArraySpec) -> Iterator[Box]:
    """Boxes of whole rows, at most 32 MiB each where a row allows, cut between tiles."""
    if not spec.shape:
        yield Box.whole(spec.shape)
        return
    row_bytes = spec.nbytes // spec.shape[0]
    rows = max(1, SLAB_BYTES // max(1, row_bytes) // spec.tile[0]) * spec.tile[0]
    for start in range(0, spec.shape[0], rows):
        stop = min(start + rows, spec.shape[0])
        yield Box((start, *(0 for _ in spec.shape[1:])), (stop - start, *spec.shape[1:]))


def _wide(values: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return values.astype(np.float64)
