"""Reads a DCP folder without torch: the child process says what lies where, the values are plain bytes.

Each chunk of a tensor is a zip archive that torch.save wrote: a small pickle (for the child again) and the raw storage, stored
without compression. The zip's own CRC-32 of the storage is checked, which DCP itself does not do: a flipped bit ends in an
error here.
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from storage.box import Box, tiling_problems
from storage.checkpoint import native_dtype
from storage.errors import Damaged, FormatError
from storage.exchange.tensor import Tensor, Values
from storage.grid import DTYPES
from storage.objects import ByteRange, ObjectStore, check_key

__all__ = ["read_dcp"]

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
ANSWER_S = 600.0

T = TypeVar("T")
Natural = Annotated[int, Meta(ge=0, le=1 << 53)]
Shape = tuple[Natural, ...]


class Chunk(Struct, frozen=True, kw_only=True):
    """A box of a tensor, and the bytes of a file that hold it."""

    offset: Shape
    shape: Shape
    file: str
    start: Natural
    length: Natural


class Entry(Struct, frozen=True, kw_only=True):
    """One tensor of the metadata."""

    dtype: str
    shape: Shape
    chunks: list[Chunk]


class Metadata(Struct, frozen=True, kw_only=True):
    """What the child found in the metadata."""

    tensors: dict[str, Entry]
    others: list[str]


class Place(Struct, frozen=True, kw_only=True):
    """What the child found in a chunk's pickle: where in the storage `key` the values lie, in elements."""

    dtype: str
    key: str
    offset: Natural
    shape: Shape
    stride: Shape


class Unpickler:
    """The child process. One request at a time."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("unpickle.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
        )

    def ask(self, kind: bytes, data: bytes, *, key: str) -> dict[str, Any]:
        """What a pickle says; `FormatError` naming `key` if it cannot be read, or does not behave."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(kind + struct.pack("<Q", len(data)) + data)
            self._process.stdin.flush()
        except BrokenPipeError as gone:
            raise FormatError(f"{key}: the process that reads pickles is gone", key) from gone
        head = self._process.stdout.read(8)
        if len(head) < 8:
            raise FormatError(f"{key}: the process that reads pickles died of this one (it has limits of memory and time)", key)
        found: dict[str, Any] = json.loads(self._process.stdout.read(struct.unpack("<Q", head)[0]))
        if "error" in found:
            raise FormatError(f"{key} cannot be read: {found['error']}", key)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def read_dcp(store: ObjectStore) -> Iterator[dict[str, Tensor]]:
    """The tensors of a DCP folder, by name; they can be read until the block ends. What is no tensor is passed over."""
    child = Unpickler()
    try:
        raw = store.get(METADATA, max_bytes=MAX_METADATA_BYTES)
        found = _converted(child.ask(b"m", raw, key=METADATA), Metadata, METADATA)
        yield {name: _tensor(store, child, name, entry) for name, entry in found.tensors.items()}
    finally:
        child.close()


def _converted(found: dict[str, Any], kind: type[T], key: str) -> T:
    try:
        return msgspec.convert(found, kind, strict=False)
    except msgspec.ValidationError as problem:
        raise FormatError(f"{key} is not what DCP writes: {problem}", key) from problem


def _tensor(store: ObjectStore, child: Unpickler, name: str, entry: Entry) -> Tensor:
    if entry.dtype not in DTYPES:
        raise FormatError(f"{name} has the type {entry.dtype[:20]!r}; known are {', '.join(DTYPES)}", name)
    try:
        boxes = [Box(chunk.offset, chunk.shape) for chunk in entry.chunks]
        files = {check_key(chunk.file) for chunk in entry.chunks}
    except ValueError as problem:
        raise FormatError(f"{name}: {problem}", name) from problem
    problems = tiling_problems(entry.shape, boxes)
    if problems or not files:
        raise FormatError(f"{name} is not whole: {'; '.join(problems)}", name)
    held: list[tuple[Box, Values]] = []

    def read(box: Box) -> Values:
        """Whole chunks are read, one at a time, and the last one is kept: slabs ask for the same one again and again."""
        values = np.empty(box.shape, native_dtype(entry.dtype))
        for chunk, place in zip(entry.chunks, boxes, strict=True):
            common = place.intersect(box)
            if common is None:
                continue
            if not held or held[0][0] != place:
                held[:] = []
                held[:] = [(place, _chunk(store, child, name, entry.dtype, chunk))]
            part = _part(held[0][1], common.relative_to(place))
            _part(values, common.relative_to(box))[...] = part
        return values

    return Tensor(name, entry.dtype, entry.shape, read)


def _part(values: Values, box: Box) -> Values:
    """The box as a view; a 0-d array indexed by nothing would be a copy."""
    return values[box.slices()] if box.ndim else values


def _chunk(store: ObjectStore, child: Unpickler, name: str, dtype: str, chunk: Chunk) -> Values:
    """The values of one chunk, out of its zip archive."""
    where = f"{name} in {chunk.file}"
    data = store.get_range(chunk.file, ByteRange(chunk.start, chunk.start + chunk.length))
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {info.filename: info for info in archive.infolist()}
            root = next((m for m in members if m.endswith("/data.pkl")), "/data.pkl").removesuffix("/data.pkl")
            if any(info.compress_type != zipfile.ZIP_STORED for info in members.values()):
                raise FormatError(f"{where}: torch stores its values without compression, this archive does not", chunk.file)
            found = _converted(child.ask(b"t", archive.read(f"{root}/data.pkl"), key=where), Place, where)
            if f"{root}/byteorder" in members and archive.read(f"{root}/byteorder") != b"little":
                raise FormatError(f"{where}: the values are big endian", chunk.file)
            raw = archive.read(f"{root}/data/{found.key}")
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, NotImplementedError, struct.error) as problem:
        raise Damaged(
            f"{where} does not match its checksum or cannot be unpacked: {problem}", chunk.file, array=name
        ) from problem
    return _view(raw, found, chunk, dtype, where)


def _view(raw: bytes, found: Place, chunk: Chunk, dtype: str, where: str) -> Values:
    """The values as an array: a view of the storage with the tensor's own strides."""
    if found.dtype != dtype or found.shape != chunk.shape or len(found.stride) != len(found.shape):
        raise FormatError(f"{where}: {found.dtype} {found.shape} instead of {dtype} {chunk.shape}", chunk.file)
    last = found.offset + sum((n - 1) * s for n, s in zip(found.shape, found.stride, strict=True))
    storage = np.frombuffer(raw[: len(raw) // DTYPES[dtype] * DTYPES[dtype]], native_dtype(dtype))
    if last >= len(storage):
        raise FormatError(f"{where}: its values reach past the end of their storage", chunk.file)
    steps = tuple(stride * storage.itemsize for stride in found.stride)
    return np.lib.stride_tricks.as_strided(storage[found.offset :], found.shape, steps, writeable=False)
