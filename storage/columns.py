"""The integers of a manifest: one zlib stream for each column.

Nothing here is believed: a stream must inflate to exactly the rows that are asked for, and what is asked for is capped before a
byte of it is allocated.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from storage.errors import FormatError
from storage.parts import PartTable

__all__ = ["Column", "read_columns", "write_columns"]

MAX_COLUMN_BYTES = 1 << 30
"""All columns unpacked, as stored: more than 30 million boxes. Against decompression bombs."""

POSITION_UNIT = 64
STORED = "stored"


class Column(Struct, frozen=True, kw_only=True):
    """One column: name, stored type, length of its zlib stream."""

    name: str
    dtype: str
    nbytes: Annotated[int, Meta(ge=0, le=1 << 53)]


def write_columns(table: PartTable, stored: NDArray[np.int64] | None) -> tuple[list[Column], list[bytes]]:
    """The columns of a table of parts, and of the sizes of compressed ones; and their streams."""
    streams, columns = [], []
    for name, values in [*_columns(table), *([] if stored is None else [(STORED, stored)])]:
        dtype = _narrowest(values)
        streams.append(zlib.compress(values.astype(dtype).tobytes()))
        columns.append(Column(name=name, dtype=dtype, nbytes=len(streams[-1])))
    return columns, streams


def _columns(table: PartTable) -> list[tuple[str, NDArray[np.int64]]]:
    """The stored columns, in order. Positions count in units of 64 bytes, offsets and shapes in elements."""
    ndim = table.offset.shape[1]
    boxes = [
        (f"{what}{k}", matrix[:, k]) for what, matrix in (("offset", table.offset), ("shape", table.shape)) for k in range(ndim)
    ]
    return [("array", table.array), ("pack", table.pack), ("position", table.position // POSITION_UNIT), *boxes]


def _narrowest(values: NDArray[np.int64]) -> str:
    top = int(values.max(initial=0))
    return next(f"<u{n}" for n in (1, 2, 4, 8) if top < 1 << (8 * n))


def read_columns(
    streams: memoryview, columns: Sequence[Column], *, ndim: int, num_parts: int, compressed: bool, key: str
) -> tuple[PartTable, NDArray[np.int64] | None]:
    """The table of parts, and the sizes of compressed ones."""
    names = ["array", "pack", "position", *(f"offset{k}" for k in range(ndim)), *(f"shape{k}" for k in range(ndim))]
    wanted = [*names, STORED] if compressed else names
    if [c.name for c in columns] != wanted or any(c.dtype not in ("<u1", "<u2", "<u4", "<u8") for c in columns):
        raise FormatError(f"{key} has unknown columns", key)
    if sum(c.nbytes for c in columns) != len(streams):
        raise FormatError(f"{key} has {len(streams)} bytes of columns, its header says otherwise", key)
    if num_parts * sum(int(c.dtype[2]) for c in columns) > MAX_COLUMN_BYTES:
        raise FormatError(f"{key} claims {num_parts} parts", key)
    values, at = [], 0
    for column in columns:
        values.append(_inflate(streams[at : at + column.nbytes], column, num_parts, key))
        at += column.nbytes
    return _table(values[: len(names)], ndim, num_parts), values[-1] if compressed else None


def _table(values: Sequence[NDArray[np.int64]], ndim: int, rows: int) -> PartTable:
    boxes = values[3:]
    return PartTable(
        array=values[0],
        pack=values[1],
        position=values[2] * POSITION_UNIT,
        offset=np.stack(boxes[:ndim], axis=1) if ndim else np.zeros((rows, 0), np.int64),
        shape=np.stack(boxes[ndim:], axis=1) if ndim else np.zeros((rows, 0), np.int64),
    )


def _inflate(stream: memoryview, column: Column, rows: int, key: str) -> NDArray[np.int64]:
    nbytes = rows * int(column.dtype[2])
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(stream, nbytes + 1)
    except zlib.error as problem:
        raise FormatError(f"{key}: column {column.name} cannot be unpacked: {problem}", key) from problem
    if len(raw) != nbytes or not inflater.eof or inflater.unused_data:
        raise FormatError(f"{key}: column {column.name} does not have {rows} rows", key)
    values = np.frombuffer(raw, column.dtype)
    if values.max(initial=0) > 1 << 56:
        raise FormatError(f"{key}: column {column.name} has a number out of range", key)
    return values.astype(np.int64)
