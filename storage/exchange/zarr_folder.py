"""A plain Zarr v3 group: files that zarr-python, TensorStore and everybody else open without a reference view.

For handing a model on, not for training: one object per chunk. Chunks are slabs of rows with the `crc32c` codec, so that what
is handed on can still prove itself. bfloat16 is stored as its uint16 bits with the attribute dtype="bfloat16", because stock
zarr has no such type and refuses to list a group that holds one.

Compression is lossless and off by default: bits of like weight together and then LZ4 (`numcodecs`), named in the metadata like
every codec. On real Adam state it saves about a sixth of the bytes, so it pays where the link carries less than about 0.2 GB/s.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import google_crc32c
import msgspec
import numpy as np

from storage.compress import Compressor
from storage.compress import compress as press
from storage.exchange.tensor import SLAB_BYTES, Tensor, slabs
from storage.grid import DTYPES
from storage.objects import ObjectStore
from storage.pack import ArraySpec
from storage.zarr_view import array_metadata, group_metadata

__all__ = ["write_zarr"]

COMPRESSOR = Compressor()  # higher levels take longer and save nothing on numbers


def write_zarr(
    store: ObjectStore, tensors: Sequence[Tensor], *, attributes: dict[str, object] | None = None, compress: bool = False
) -> None:
    """Write `tensors` as arrays of one group; "/" in a name makes inner groups. The root's metadata comes last."""
    metadata = {}
    for tensor in tensors:
        spec = _spec(tensor)
        for number, box in enumerate(slabs(tensor.shape, DTYPES[tensor.dtype])):
            cell = [str(number), *("0" for _ in tensor.shape[1:])] if tensor.shape else []
            store.put("/".join([tensor.name, "c", *cell]), _chunk(tensor.read(box), spec, compress))
        metadata[tensor.name] = array_metadata(spec, COMPRESSOR if compress else None)
        store.put(f"{tensor.name}/zarr.json", msgspec.json.encode(metadata[tensor.name]))
    for group in sorted({t.name[:i] for t in tensors for i, c in enumerate(t.name) if c == "/"}):
        metadata[group] = group_metadata({})
        store.put(f"{group}/zarr.json", msgspec.json.encode(metadata[group]))
    root = group_metadata(dict(attributes or {}))
    consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(sorted(metadata.items()))}
    store.put("zarr.json", msgspec.json.encode({**root, "consolidated_metadata": consolidated}))


def _spec(tensor: Tensor) -> ArraySpec:
    """The array with the first slab as its chunk."""
    first = next(slabs(tensor.shape, DTYPES[tensor.dtype], most=SLAB_BYTES))
    return ArraySpec(name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, tile=first.shape)


def _chunk(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], spec: ArraySpec, compress: bool) -> bytes:
    """A whole chunk (the last one padded with zeros) and its checksum."""
    raw = np.ascontiguousarray(values).tobytes()
    raw += bytes(math.prod(spec.tile) * spec.itemsize - len(raw))
    if compress:
        return press(np.frombuffer(raw, np.uint8), COMPRESSOR, spec.itemsize)
    return raw + struct.pack("<I", google_crc32c.value(raw))
