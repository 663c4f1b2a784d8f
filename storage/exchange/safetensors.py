"""safetensors, in and out, by its own short definition: a length, a JSON header, then the values.

The library of that name hands over whole files or whole tensors; the format itself needs forty lines, and these read and write
any object store a slab at a time. A model is cut into files as Hugging Face cuts it, with an index beside them.

    8 bytes   length of the header, little endian
    header    JSON: name -> {"dtype", "shape", "data_offsets": [start, stop)}, counted from the header's end
    values    C order, little endian, without gaps
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from storage.box import Box
from storage.checkpoint import native_dtype
from storage.errors import FormatError, ObjectMissing
from storage.exchange.tensor import Tensor, Values
from storage.grid import DTYPES
from storage.objects import ByteRange, ObjectStore
from storage.record import decode_json

__all__ = ["INDEX", "read_safetensors", "write_safetensors"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""What the library itself accepts."""
FILE_BYTES = 5 * 10**9
"""Hugging Face's own limit for a file of a model."""

TYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
NAMES = {ours: theirs for theirs, ours in TYPES.items()}

Natural = Annotated[int, Meta(ge=0, le=1 << 53)]


class Entry(Struct, frozen=True):
    """One tensor of a header."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


class Index(Struct, frozen=True):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


def write_safetensors(store: ObjectStore, tensors: Sequence[Tensor], *, file_bytes: int = FILE_BYTES) -> list[str]:
    """Write `tensors` as one or several files and return their names. An index is written, last, if there are several."""
    files = _files(tensors, file_bytes)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    names = names if len(files) > 1 else [SINGLE]
    for name, held in zip(names, files, strict=True):
        store.put_stream(name, _stream(held))
    if len(files) > 1:
        where = {tensor.name: name for name, held in zip(names, files, strict=True) for tensor in held}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": where}
        store.put(INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2))
    return names


def _files(tensors: Sequence[Tensor], file_bytes: int) -> list[list[Tensor]]:
    files: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def _stream(tensors: Sequence[Tensor]) -> Iterator[memoryview | bytes]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses files that do not say so
    ends = list(itertools.accumulate((tensor.nbytes for tensor in tensors), initial=0))
    for tensor, (start, stop) in zip(tensors, itertools.pairwise(ends), strict=True):
        header[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, stop)}
    raw = msgspec.json.encode(header)
    raw += b" " * (-len(raw) % 8)  # so that values are aligned for whoever maps the file
    yield struct.pack("<Q", len(raw)) + raw
    for tensor in tensors:
        for slab in tensor.slabs():
            yield np.ascontiguousarray(slab).reshape(-1).view(np.uint8).data


def read_safetensors(store: ObjectStore) -> dict[str, Tensor]:
    """The tensors of all files that the index names, or of every .safetensors file if there is no index."""
    try:
        index = decode_json(store.get(INDEX, max_bytes=MAX_HEADER_BYTES), Index, key=INDEX).weight_map
    except ObjectMissing:
        index = {}
    files = sorted(set(index.values())) or [i.key for i in store.list() if i.key.endswith(".safetensors") and "/" not in i.key]
    if not files:
        raise ObjectMissing(f"{store.url} holds no .safetensors file", SINGLE)
    found: dict[str, Tensor] = {}
    for file in files:
        for tensor in _read_file(store, file):
            if tensor.name in found:
                raise FormatError(f"{store.url}: the tensor {tensor.name} is in two files, one of them {file}", file)
            found[tensor.name] = tensor
    missing = sorted(set(index) - set(found))
    if missing:
        raise FormatError(f"{store.url}: the index names tensors that no file holds: {', '.join(missing[:8])}", INDEX)
    return found


def _read_file(store: ObjectStore, file: str) -> Iterator[Tensor]:
    size = store.size(file)
    (length,) = struct.unpack("<Q", store.get_range(file, ByteRange(0, 8))) if size >= 8 else (size,)
    if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise FormatError(f"{file} is no safetensors file: a header of {length} bytes in a file of {size}", file)
    entries = decode_json(store.get_range(file, ByteRange(8, 8 + length)), dict[str, Any], key=file)
    entries.pop("__metadata__", None)
    spans = []
    for name, raw in entries.items():
        entry = _entry(raw, name, file)
        spans.append((*entry.data_offsets, name))
        yield _tensor(store, file, name, entry, 8 + length)
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise FormatError(f"{file}: the values of {name} begin at byte {start} instead of {end}", file)
        end = stop
    if end != size - 8 - length:
        raise FormatError(f"{file} has {size - 8 - length} bytes of values, its header says {end}", file)


def _entry(raw: object, name: str, file: str) -> Entry:
    try:
        entry = msgspec.convert(raw, Entry)
    except msgspec.ValidationError as problem:
        raise FormatError(f"{file}: the entry of {name} cannot be read: {problem}", file) from problem
    dtype = TYPES.get(entry.dtype)
    if dtype is None:
        raise FormatError(f"{file}: {name} has the type {entry.dtype[:20]}; known are {', '.join(TYPES)}", file)
    start, stop = entry.data_offsets
    if stop - start != math.prod(entry.shape) * DTYPES[dtype]:
        raise FormatError(f"{file}: {name} has {stop - start} bytes, its shape {entry.shape} of {dtype} needs others", file)
    return entry


def _tensor(store: ObjectStore, file: str, name: str, entry: Entry, base: int) -> Tensor:
    dtype, shape, first = TYPES[entry.dtype], entry.shape, base + entry.data_offsets[0]
    row_bytes = math.prod(shape[1:]) * DTYPES[dtype]

    def read(box: Box) -> Values:
        """Whole rows are read, and cut to the box."""
        start, count = (box.offset[0], box.shape[0]) if shape else (0, 1)
        data = store.get_range(file, ByteRange(first + start * row_bytes, first + (start + count) * row_bytes))
        values = np.frombuffer(data, native_dtype(dtype)).reshape((count, *shape[1:]) if shape else ())
        return values[(slice(None), *box.slices()[1:])] if shape else values

    return Tensor(name, dtype, shape, read)
