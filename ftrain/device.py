"""The one seam to accelerators: which device a rank computes on, how its ranks talk, how its state reaches host memory.

Everything else in ftrain is the same code on CPU and GPU. What this file does on a GPU could not be run where it was written;
`docs/gpu.md` lists the commands that check it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ftrain.config import Machine


def choose(machine: Machine, local_rank: int, num_local_ranks: int) -> torch.device:
    """The device of a rank; `auto` is a GPU of its own if there is one for every rank of this machine, else the CPU for all."""
    if machine.device == "cpu" or (machine.device == "auto" and torch.cuda.device_count() < num_local_ranks):
        return torch.device("cpu")
    if torch.cuda.device_count() <= local_rank:
        raise RuntimeError(
            f"machine.device = 'cuda', but local rank {local_rank} finds {torch.cuda.device_count()} GPUs: use fewer ranks "
            "on this machine, or machine.device = 'cpu'"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """The process group's backend. Host tensors (votes of a restore, digests) always go over Gloo."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def pin(buffer: np.ndarray[Any, np.dtype[np.uint8]], device: torch.device) -> None:
    """Register an arena with the driver, so that copies into it run beside computation. Nothing to do on CPU."""
    if device.type != "cuda":
        return
    code = torch.cuda.cudart().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of {buffer.nbytes} bytes failed with {code}: check the limit of locked memory")


@contextmanager
def copy_stream(device: torch.device) -> Iterator[None]:
    """Copies inside run on a stream of their own, after everything enqueued before; all of them are done at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
