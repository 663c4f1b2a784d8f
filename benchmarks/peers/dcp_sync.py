"""PyTorch Distributed Checkpoint, synchronous: to local files or to any fsspec URL, of one process or a process group.

In its fastest honest form here: files are synced (as ours are), tensors are contiguous, nothing is staged. The S3 form is
torch's own fsspec writer with s3fs, in 50 MiB parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter


def save(
    state: dict[str, torch.Tensor], path: Path, *, threads: int = 1, group: dist.ProcessGroup | None = None, alone: bool = True
) -> None:
    """Store `state` in a folder. `alone`: of this process only."""
    writer = dcp.FileSystemWriter(path, single_file_per_rank=threads == 1, thread_count=threads, sync_files=True)
    dcp.save(state, storage_writer=writer, process_group=group, no_dist=alone)


def load(state: dict[str, torch.Tensor], path: Path, *, group: dist.ProcessGroup | None = None, alone: bool = True) -> None:
    """Fill `state` from a folder."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), process_group=group, no_dist=alone)


def save_url(state: dict[str, torch.Tensor], url: str, options: dict[str, Any]) -> None:
    """Store `state` at an fsspec URL."""
    dcp.save(state, storage_writer=FsspecWriter(url, sync_files=False, **options), no_dist=True)


def load_url(state: dict[str, torch.Tensor], url: str, options: dict[str, Any]) -> None:
    """Fill `state` from an fsspec URL."""
    dcp.load(state, storage_reader=FsspecReader(url, **options), no_dist=True)
