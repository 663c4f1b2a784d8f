"""Writes a DCP folder in a stream: one file of chunks, each a `torch.save` of some rows, and torch's own metadata.

DCP's own writer keeps every tensor of a file in memory until the file is closed, so the file is written here: the classes, the
metadata and the archive of each chunk are torch's, only the order of events is ours.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.box import Box
from storage.exchange.tensor import Tensor, slabs
from storage.grid import DTYPES
from storage.objects import ObjectStore

if TYPE_CHECKING:
    import torch

__all__ = ["write_dcp"]

FILE = "__0_0.distcp"
CHUNK_BYTES = 256 << 20

Place = tuple[Tensor, Box, int, int]


def write_dcp(store: ObjectStore, tensors: Sequence[Tensor]) -> None:
    """Write `tensors` so that `torch.distributed.checkpoint.load` fills a state dict with their names, under any layout.

    The metadata comes last: without it the folder is no checkpoint.
    """
    places: list[Place] = []
    store.put_stream(FILE, _stream(tensors, places))
    store.put(".metadata", pickle.dumps(_metadata(tensors, places)))


def _stream(tensors: Sequence[Tensor], places: list[Place]) -> Iterator[memoryview]:
    """The archives of all chunks, one after the other; notes in `places` where each lies."""
    import torch

    start = 0
    for tensor in tensors:
        for box in slabs(tensor.shape, DTYPES[tensor.dtype], most=CHUNK_BYTES):
            archive = io.BytesIO()
            torch.save(_torch(tensor, box), archive)
            data = archive.getbuffer()
            places.append((tensor, box, start, len(data)))
            start += len(data)
            yield data


def _torch(tensor: Tensor, box: Box) -> torch.Tensor:
    import torch

    values = np.array(tensor.read(box))  # torch wants memory it may write
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return torch.from_numpy(values.view(np.int16)).view(dtype) if tensor.dtype == "bfloat16" else torch.from_numpy(values)


def _metadata(tensors: Sequence[Tensor], places: Sequence[Place]) -> Any:
    """torch's own description of what was written."""
    import torch
    from torch.distributed.checkpoint import filesystem, metadata

    storage: dict[metadata.MetadataIndex, Any] = {}
    chunks: dict[str, list[metadata.ChunkStorageMetadata]] = {tensor.name: [] for tensor in tensors}
    for tensor, box, start, length in places:
        held = chunks[tensor.name]
        index = metadata.MetadataIndex(tensor.name, torch.Size(box.offset), len(held))
        storage[index] = filesystem._StorageInfo(relative_path=FILE, offset=start, length=length)
        held.append(metadata.ChunkStorageMetadata(offsets=torch.Size(box.offset), sizes=torch.Size(box.shape)))
    described = {
        tensor.name: metadata.TensorStorageMetadata(
            properties=metadata.TensorProperties(dtype=getattr(torch, tensor.dtype)),
            size=torch.Size(tensor.shape),
            chunks=chunks[tensor.name],
        )
        for tensor in tensors
    }
    return metadata.Metadata(
        state_dict_metadata=dict(described),
        planner_data={tensor.name: (tensor.name,) for tensor in tensors},
        storage_data=storage,
        storage_meta=metadata.StorageMeta(),
    )
