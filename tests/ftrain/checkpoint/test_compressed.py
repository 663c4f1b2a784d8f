"""Compressed checkpoints of a script: written by `Checkpointer`, read by it and through PyTorch DCP, mixed with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ftrain
from storage.objects import open_store
from storage.run import RunStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant


def state_of(seed: int) -> dict[str, Any]:
    """A matrix of normal numbers and one of zeros, of which more than one chunk is stored."""
    random = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(300, 200, generator=random), "half": torch.randn(99, generator=random).bfloat16(), "n": seed}


def test_what_is_compressed_is_read_by_everything_that_reads_the_rest(tmp_path: Path) -> None:
    url, run = str(tmp_path), RunStore(open_store(str(tmp_path)))
    wanted, options = {}, ("none", "zstd", "lz4")
    for step, compression in enumerate(options, 1):
        checkpointer = ftrain.Checkpointer(url, compression=compression)
        found = state_of(0)
        assert checkpointer.load(found) == step - 1
        if step > 1:
            assert torch.equal(found["w"], wanted[step - 1]["w"])
            assert torch.equal(found["half"], wanted[step - 1]["half"])
            assert found["n"] == step - 1
        wanted[step] = state_of(step)
        checkpointer.save(step, wanted[step])
        checkpointer.close()
    compressors = [run.open(step).manifest.compressor for step in (1, 2, 3)]
    assert [each and each.cname for each in compressors] == [None, "zstd", "lz4"]
    sizes = [run.open(step).manifest.nbytes for step in (1, 2, 3)]
    assert max(sizes[1:]) < 0.95 * sizes[0]
    for step in (1, 2, 3):
        assert run.open(step).verify().ok
        into = {"w": torch.zeros(300, 200), "half": torch.zeros(99).bfloat16()}
        dcp.load(into, storage_reader=ftrain.DcpReader(url, step=step), no_dist=True)
        assert torch.equal(into["w"], wanted[step]["w"])
        assert torch.equal(into["half"], wanted[step]["half"])
