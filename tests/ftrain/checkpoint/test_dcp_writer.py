"""torch.distributed.checkpoint with our writer and reader: its calls, our storage."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ftrain
from ftrain.checkpoint.dcp import step_of
from ftrain.checkpoint.record import StateError
from storage.errors import Damaged
from storage.local import LocalStore
from storage.run import RunStore
from tests.world import run_world

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process is meant


def state_of(seed: int) -> dict[str, Any]:
    """A state as scripts have it: nested, several types, plain values of all allowed kinds."""
    torch.manual_seed(seed)
    return {
        "model": nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)).state_dict(),
        "half": torch.randn(33, 9).to(torch.bfloat16),
        "wave": torch.randn(4, 3, dtype=torch.complex64),
        "flags": torch.rand(11) > 0.5,
        "scalar": torch.tensor(seed, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "step": seed,
        "lr": 0.1 + seed,
        "note": f"seed {seed}",
        "meta": {"betas": (0.9, 0.999), "names": ["a", None, True]},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def test_a_save_call_changes_its_writer_and_nothing_else(tmp_path: Path) -> None:
    url = tmp_path / "run"
    written = state_of(1)
    dcp.save(written, storage_writer=ftrain.DcpWriter(url, step=10), no_dist=True)
    found = state_of(2)
    dcp.load(found, storage_reader=ftrain.DcpReader(url), no_dist=True)
    assert same(found, written)
    checkpoint = RunStore(LocalStore(str(url))).open()
    assert checkpoint.step == 10
    assert checkpoint.verify().ok
    assert checkpoint.array("wave").dtype == "float32"


@pytest.mark.parametrize(
    ("checkpoint_id", "step"),
    [("outputs/step-200", 200), (Path("outputs/200/"), 200), ("step_200.ckpt", 200), ("runs/exp-7/latest", 5), (None, 5)],
)
def test_a_step_is_named_by_the_last_part_of_a_path(checkpoint_id: str | Path | None, step: int) -> None:
    assert step_of(checkpoint_id, 5) == step


def test_steps_come_from_the_checkpoint_id_and_a_save_that_goes_back_fences(tmp_path: Path) -> None:
    url = tmp_path / "run"
    writer = ftrain.DcpWriter(url)
    for step in (100, 200, 300):
        dcp.save(state_of(step), checkpoint_id=f"outputs/step-{step}", storage_writer=writer, no_dist=True)
    found = state_of(1)
    dcp.load(found, checkpoint_id="outputs/step-200", storage_reader=ftrain.DcpReader(url), no_dist=True)
    assert found["step"] == 200
    dcp.save(state_of(250), storage_writer=ftrain.DcpWriter(url, step=250), no_dist=True)
    states = {info.step: str(info.state) for info in RunStore(LocalStore(str(url))).checkpoints()}
    assert states == {100: "valid", 200: "valid", 250: "valid", 300: "fenced"}


def test_what_is_no_data_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save({"t": torch.ones(2), "rng": random.Random(1)}, storage_writer=ftrain.DcpWriter(tmp_path / "run"), no_dist=True)
    error = caught.value.failures[0][0]
    assert isinstance(error, StateError)
    assert "rng is a random.Random" in str(error)


def test_a_flipped_bit_is_an_error(tmp_path: Path) -> None:
    url = tmp_path / "run"
    dcp.save(state_of(1), storage_writer=ftrain.DcpWriter(url, step=1), no_dist=True)
    pack = next(url.glob("checkpoints/*/*.pack"))
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(bytes(data))
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.load(state_of(2), storage_reader=ftrain.DcpReader(url), no_dist=True)
    assert isinstance(caught.value.failures[0][0], Damaged)


def rows_to_columns(rank: int, url: str) -> bool:
    """Save cut by rows, load cut by columns."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = torch.randn(45, 21)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": 3}, storage_writer=ftrain.DcpWriter(url, step=1))
    found = {"w": distribute_tensor(torch.zeros(45, 21), mesh, [Shard(1)]), "n": 0}
    dcp.load(found, storage_reader=ftrain.DcpReader(url))
    assert isinstance(found["w"], DTensor)
    return torch.equal(found["w"].full_tensor(), whole) and found["n"] == 3


@pytest.mark.dist
def test_rows_are_read_as_columns(tmp_path: Path) -> None:
    assert run_world(rows_to_columns, 2, str(tmp_path / "run")) == [True, True]


def test_a_checkpointers_tensors_are_read_by_dcp(tmp_path: Path) -> None:
    url = tmp_path / "run"
    model = nn.Linear(4, 3)
    checkpointer = ftrain.Checkpointer(str(url))
    checkpointer.load({"model": model})
    checkpointer.save(5, {"model": model})
    checkpointer.close()
    found = {"model": nn.Linear(4, 3).state_dict()}
    dcp.load(found, storage_reader=ftrain.DcpReader(url), no_dist=True)
    assert same(found["model"], model.state_dict())


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "dcp_writer.py"
    done = subprocess.run([sys.executable, str(example), str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the same" in done.stdout
