"""Axis-aligned rectangles, because a shard is a list of boxes and nothing else.

Every parallel layout (tensor, context, pipeline, data, expert, ZeRO) cuts an array into boxes. If saving, loading, checking and
resharding only ever see boxes, one code path serves all layouts, including those that do not exist yet. Offsets are inclusive,
stops exclusive, both in elements of the whole, unsharded array.

The tiling check works on integer matrices, not on Box objects: a 500B model on 5,120 writers has two million boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Box", "coverage_problems", "tiling_problems"]

MAX_CELLS = 1 << 20
"""Cells counted at once by the tiling check: bounds its memory to about 8 MB."""

MAX_REPORTED = 8
"""Gaps and overlaps named in full; the rest is only counted."""


@dataclass(frozen=True, slots=True)
class Box:
    """`shape` elements from `offset` on, along each dimension of one array."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"box has {len(self.offset)} offsets but {len(self.shape)} sizes")
        if any(n < 1 for n in self.shape) or any(o < 0 for o in self.offset):
            raise ValueError(f"box {self.offset} + {self.shape}: offsets start at 0, sizes at 1")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that holds a whole array."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """First index past the box, along each dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None if there is none."""
        lo = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        hi = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(lo, hi, strict=True)):
            return None
        return Box(lo, tuple(b - a for a, b in zip(lo, hi, strict=True)))

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box."""
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def shift(self, by: Sequence[int]) -> Box:
        """The same box, moved."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def relative_to(self, origin: Box) -> Box:
        """The same elements, counted from the first element of `origin`."""
        return self.shift(tuple(-o for o in origin.offset))

    def slices(self) -> tuple[slice, ...]:
        """For indexing a NumPy array of the whole shape."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


def tiling_problems(shape: Sequence[int], boxes: Sequence[Box]) -> list[str]:
    """Why `boxes` do not tile an array of `shape` exactly once; empty if they do."""
    ndim = len(shape)
    wrong = [f"box {b.offset} + {b.shape} has {b.ndim} dimensions instead of {ndim}" for b in boxes if b.ndim != ndim]
    if wrong:
        return wrong[:MAX_REPORTED]
    starts = np.array([b.offset for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    stops = np.array([b.stop for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    return coverage_problems(Box.whole(shape), starts, stops)


def coverage_problems(whole: Box, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[str]:
    """Why boxes `starts[i]` to `stops[i]` (matrices of n x ndim) do not tile `whole` exactly once; empty if they do."""
    lo, hi = np.array(whole.offset, dtype=np.int64), np.array(whole.stop, dtype=np.int64)
    outside = np.flatnonzero(((starts < lo) | (stops > hi)).any(axis=1))
    problems = [f"outside: box {_text(starts[i], stops[i])} in {_text(lo, hi)}" for i in outside[:MAX_REPORTED]]
    faults: list[tuple[NDArray[np.int64], NDArray[np.int64], int]] = []
    _count(starts, stops, lo, hi, faults)
    for start, stop, count in faults[:MAX_REPORTED]:
        kind = "gap" if count == 0 else f"covered {count} times"
        problems.append(f"{kind}: {_text(start, stop)}")
    hidden = len(outside) + len(faults) - len(problems)
    if hidden > 0:
        problems.append(f"and {hidden} more")
    return problems


def _text(start: NDArray[np.int64], stop: NDArray[np.int64]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(start.tolist(), stop.tolist(), strict=True)) + "]"


def _count(
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    faults: list[tuple[NDArray[np.int64], NDArray[np.int64], int]],
) -> None:
    """Append every cell of `lo` to `hi` that is not covered exactly once.

    The boxes' own edges cut the space into cells, each covered by the same number of boxes throughout. Where there are too many
    cells, the space is halved: each half has fewer boxes and so far fewer edges.
    """
    inside = ((starts < hi) & (stops > lo)).all(axis=1)
    starts, stops = np.maximum(starts[inside], lo), np.minimum(stops[inside], hi)
    edges = [
        np.unique(np.concatenate([[a, b], starts[:, k], stops[:, k]])) for k, (a, b) in enumerate(zip(lo, hi, strict=True))
    ]
    if math.prod(len(e) - 1 for e in edges) <= MAX_CELLS:
        _count_cells(starts, stops, edges, faults)
        return
    longest = max(range(len(edges)), key=lambda k: len(edges[k]))
    middle = edges[longest][len(edges[longest]) // 2]
    below, above = hi.copy(), lo.copy()
    below[longest] = above[longest] = middle
    _count(starts, stops, lo, below, faults)
    _count(starts, stops, above, hi, faults)


def _count_cells(
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    edges: list[NDArray[np.int64]],
    faults: list[tuple[NDArray[np.int64], NDArray[np.int64], int]],
) -> None:
    """Count by differences: +1 and -1 at the corners of each box, then running sums along every dimension."""
    ndim = len(edges)
    count = np.zeros(tuple(len(e) for e in edges), dtype=np.int64)
    first = [np.searchsorted(e, starts[:, k]) for k, e in enumerate(edges)]
    last = [np.searchsorted(e, stops[:, k]) for k, e in enumerate(edges)]
    if ndim == 0:
        count[()] = len(starts)
    else:
        for corner in itertools.product((0, 1), repeat=ndim):
            index = tuple(last[k] if far else first[k] for k, far in enumerate(corner))
            np.add.at(count, index, 1 - 2 * (sum(corner) % 2))
    for k in range(ndim):
        np.cumsum(count, axis=k, out=count)
    cells = count[tuple(slice(0, -1) for _ in range(ndim))]
    for cell in np.argwhere(cells != 1):
        start = np.array([edges[k][i] for k, i in enumerate(cell)], dtype=np.int64)
        stop = np.array([edges[k][i + 1] for k, i in enumerate(cell)], dtype=np.int64)
        faults.append((start, stop, int(cells[tuple(cell)])))
