"""run_world: a world of Gloo processes for a test, forked from a parent that has torch loaded.

The parent (multiprocessing's forkserver, preloaded once per test session) has run no tensor operation, so that its children
are clean; a world of 8 is up in well under a second. The function is sent by name: it must be at module level. The error of a
rank is raised in the test with the rank's number and traceback; the others are given up at once.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

TIMEOUT_S = 60  # of a collective: a deadlock becomes an error that names the rank

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed", "ftrain.train.step", "ftrain.checkpoint.checkpointer"])


class RankError(AssertionError):
    """A rank raised; the message names it and holds its traceback."""


def run_world(fn: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Run `fn(rank, *args)` on `size` ranks of one process group and return what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_rank, args=(fn, rank, size, str(Path(folder) / "store"), pipe[1], args), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        try:
            results = _collect([receiver for receiver, _ in pipes])
            for rank in ranks:
                rank.join(timeout=TIMEOUT_S)
            return results
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _collect(receivers: list[multiprocessing.connection.Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(receivers))
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting.values()))
        for rank in [rank for rank, receiver in waiting.items() if receiver in ready]:
            try:
                ok, value = waiting.pop(rank).recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} of {len(receivers)} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _rank(fn: Callable[..., Any], rank: int, size: int, store: str, sender: Any, args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ForkingPickler.register(torch.Tensor, _as_bytes)  # torch would share memory with a process that is about to end
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
        )
        result = fn(rank, *args)
        dist.barrier()  # nobody leaves while somebody still talks to them
        sender.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _as_bytes(tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _from_bytes, (raw, tensor.dtype, tuple(tensor.shape))


def _from_bytes(raw: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(raw).view(dtype).reshape(shape)
