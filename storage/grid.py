"""Tile shapes: which chunks an array is stored in, chosen so that no parallel layout ever cuts through one.

A chunk is the unit of reading and of checksums, so a layout that cuts inside a chunk reads more than it needs. Megatron's old
Zarr format took the rank grid as chunk grid and ended with millions of files; here chunks lie back to back in one pack per
writer, so they may be as small as the cuts of *any* likely layout ask for:

- The dimension that tensor parallelism may cut is tiled even when this layout does not cut it, at most 512 elements wide, by a
  width that divides every even cut into 2 to 16 pieces (11 and 13 apart: ADR 0008). Dimensions without such a cut (prime
  numbers, odd vocabularies) are cut at multiples of `tp_tile(dim)` instead, and pad less than 0.8 %.
- Arrays under 4 MiB of fp32 are never cut by data parallelism; `row_tile` is None for them and their tile depends on nothing
  but their shape. For larger ones the engine's bucket plan says on which rows data parallelism may cut.
- Everything else is one tile wide, until the chunk would exceed 4 MiB (google_crc32c holds the GIL while it works).

Sizes are reckoned at four bytes an element at least, so that a parameter's bfloat16 weights and its fp32 masters and moments
have the same grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["DTYPES", "MAX_CHUNK_BYTES", "SMALL_BYTES", "TP_SIZES", "is_small", "tile_shape", "tp_tile"]

DTYPES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}
"""Bytes per element of the types an array may have. The names are Zarr's (bfloat16 excepted, which stock Zarr lacks)."""

MAX_CHUNK_BYTES = 4 << 20
SMALL_BYTES = 4 << 20
"""Arrays with fewer bytes of fp32 than this are never cut by data parallelism."""

MAX_TP = 16
TP_SIZES = tuple(n for n in range(2, MAX_TP + 1) if n not in (11, 13))
"""Tensor parallel sizes that cut on tile boundaries where the dimension divides evenly. 11 and 13 are left out: nobody uses
them, and a feed-forward width such as 2816 = 256 x 11 would get tiles 16 elements wide, too narrow to copy at full speed."""
MAX_TP_TILE = 512
MAX_PADDING = 1 / 128


def is_small(shape: Sequence[int]) -> bool:
    """Whether an array is under 4 MiB of fp32, and so never cut by data parallelism."""
    return 4 * math.prod(shape) < SMALL_BYTES


def tile_shape(shape: Sequence[int], itemsize: int, *, tp_dim: int | None, row_tile: int | None) -> tuple[int, ...]:
    """The tile of an array of `shape`.

    `tp_dim` is the dimension that tensor (or expert) parallelism may cut, None if there is none; `row_tile` the number of rows
    (dimension 0) on whose multiples data parallelism may cut, None if it never does.
    """
    width = max(itemsize, 4)
    tile, fixed = list(shape), set()
    if tp_dim is not None:
        tile[tp_dim] = tp_tile(shape[tp_dim], element_bytes=width * math.prod(shape[tp_dim + 1 :]))
        fixed.add(tp_dim)
    if row_tile is not None and shape and row_tile < shape[0]:
        tile[0] = math.gcd(tile[0], row_tile) if tp_dim == 0 else row_tile
        fixed.add(0)
    for dim in range(len(tile)):
        limit = max(1, MAX_CHUNK_BYTES // (width * math.prod(tile[dim + 1 :])))
        if tile[dim] > limit:
            tile[dim] = _largest_divisor(tile[dim], limit) if dim in fixed else _even_cut(shape[dim], limit)
    return tuple(tile)


def tp_tile(dim: int, *, element_bytes: int = 4) -> int:
    """The width on whose multiples tensor parallelism may cut a dimension of `dim` elements of `element_bytes` each.

    It divides `dim / n` for every n of `TP_SIZES` that divides `dim`. If there is none, it is a power of two that pads the
    dimension by less than 1/128. (A dimension such as 3 x 691 gets tiles one wide: right, but costly. Choose rounder sizes.)
    """
    limit = max(1, min(MAX_TP_TILE, MAX_CHUNK_BYTES // element_bytes))
    cuts = [dim // n for n in TP_SIZES if dim % n == 0]
    if cuts:
        return _largest_divisor(math.gcd(*cuts), limit)
    width = 1
    while 2 * width <= min(limit, dim // MAX_TP) and _padded(dim, 2 * width) - dim <= dim * MAX_PADDING:
        width *= 2
    return width


def _padded(dim: int, width: int) -> int:
    return -(-dim // width) * width


def _even_cut(dim: int, limit: int) -> int:
    """The smallest equal pieces of at most `limit`: they pad by less than one element each."""
    return -(-dim // -(-dim // limit))


def _largest_divisor(n: int, limit: int) -> int:
    return max(d for d in range(1, min(n, limit) + 1) if n % d == 0)
