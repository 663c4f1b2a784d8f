"""The one seam to accelerators: which device a rank computes on, how its ranks talk, how its state reaches host memory.

Everything else in ftrain is the same code on CPU and GPU. What this file does on a GPU could not be run where it was written;
`docs/gpu.md` lists the commands that check it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ftrain.config import Machine
from ftrain.parallel.clock import HostTimer, Timer


def choose(machine: Machine, local_rank: int, num_local_ranks: int) -> torch.device:
    """The device of a rank; `auto` is a GPU of its own if there is one for every rank of this machine, else the CPU for all.

    Called before the engine is built: what a process holds by then (interpreter, libraries) is no memory of its training.
    """
    _Before.private = _process()["RssAnon"]
    if machine.device == "cpu" or (machine.device == "auto" and torch.cuda.device_count() < num_local_ranks):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count <= local_rank:
        found = f"machine.device = 'cuda', but local rank {local_rank} finds {count} GPUs"
        raise RuntimeError(
            f"{found}: use fewer ranks on this machine, or machine.device = 'cpu'"
            if count
            else f"{found}: use a machine that has one, or machine.device = 'cpu' or 'auto'"
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


class StreamTimer:
    """Events on a GPU's compute stream: the time between two is what the stream did or waited for."""

    def __init__(self) -> None:
        self.origin = self.now()

    def now(self) -> torch.cuda.Event:
        """An event that the stream will pass."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Waits until the stream has passed both."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def timer(device: torch.device) -> Timer:
    """What the time of a rank's activities is read from."""
    return StreamTimer() if device.type == "cuda" else HostTimer()


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a rank, in bytes. A CPU counts no tensors: private memory beyond what the engine found is nearest."""

    used: int  # CUDA: allocated by torch; CPU: private memory since `choose`, Python's objects included
    reserved: int  # CUDA: taken from the device by torch; CPU: resident memory of the process, arena and libraries included
    peak: int  # the most that was used so far


class _Before:
    """Private bytes of this process when its device was chosen."""

    private = 0


def _process() -> dict[str, int]:
    """The kernel's account of this process, bytes by name: VmHWM, RssAnon, RssFile, RssShmem among others."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines() if line.endswith(" kB"))
    return {row[0].removesuffix(":"): int(row[1]) * 1024 for row in rows}


def memory(device: torch.device) -> Memory:
    """What the rank's memory amounts to now."""
    if device.type == "cuda":
        cuda = torch.cuda
        return Memory(cuda.memory_allocated(device), cuda.memory_reserved(device), cuda.max_memory_allocated(device))
    now = _process()
    shared = now["RssFile"] + now["RssShmem"]  # at the peak as it is now: both only grow, and before training
    used, most = (max(0, private - _Before.private) for private in (now["RssAnon"], now["VmHWM"] - shared))
    return Memory(used, now["RssAnon"] + shared, max(used, most))


def name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def enqueued(device: torch.device) -> Callable[[], None]:
    """What waits, on any thread, until all that this thread has enqueued so far is done. Nothing to wait for on a CPU."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


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
