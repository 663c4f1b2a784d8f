"""What the storage tests draw: boxes, cuts that tile, arrays on grids, random bits."""

import numpy as np
from hypothesis import strategies as st

from storage.box import Box
from storage.pack import ArraySpec


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile the shape: cut again and again at random places."""
    pieces = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, piece.shape[dim]))
        for start, stop in ((0, at), (at, piece.shape[dim])):
            if start < stop:
                offset, sizes = list(piece.offset), list(piece.shape)
                offset[dim], sizes[dim] = offset[dim] + start, stop - start
                pieces.append(Box(tuple(offset), tuple(sizes)))
    return draw(st.permutations(pieces))


shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def spec_of(name: str, shape: tuple[int, ...], tile: tuple[int, ...], dtype: str = "float32") -> ArraySpec:
    return ArraySpec(name=name, shape=shape, dtype=dtype, tile=tile)


@st.composite
def grids(draw: st.DrawFn) -> tuple[ArraySpec, Box]:
    """An array, and a box of it that lies on its grid."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    tile = tuple(draw(st.integers(1, n)) for n in shape)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float64", "uint8"]))
    cells = [-(-n // t) for n, t in zip(shape, tile, strict=True)]
    first = [draw(st.integers(0, c - 1)) for c in cells]
    last = [draw(st.integers(f + 1, c)) for f, c in zip(first, cells, strict=True)]
    offset = tuple(f * t for f, t in zip(first, tile, strict=True))
    stop = tuple(min(n, b * t) for n, b, t in zip(shape, last, tile, strict=True))
    return spec_of("a", shape, tile, dtype), Box(offset, tuple(s - o for s, o in zip(stop, offset, strict=True)))


def random_bits(shape: tuple[int, ...], itemsize: int, seed: int = 0) -> np.ndarray:
    size = int(np.prod(shape)) * itemsize
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).view(f"<u{itemsize}").reshape(shape)
