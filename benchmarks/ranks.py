"""A world of Gloo processes for a benchmark: `work(rank, *arguments)` on each, one thread a rank."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 300


def world(work: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What `work` returned on each rank; a rank's error is raised here. `work` is at module level: it is sent by name."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ftrain.train.step"])
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=_rank, args=(r, size, store, work, arguments, answers)) for r in range(size)]
        for process in ranks:
            process.start()
        try:
            found = _collect(answers, ranks)
        except Exception:
            for process in ranks:
                process.kill()
            raise
        finally:
            for process in ranks:
                process.join()
    return [found[rank] for rank in range(size)]


def _collect(answers: Any, ranks: Sequence[Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        gone = [rank for rank, process in enumerate(ranks) if rank not in found and process.exitcode is not None]
        try:
            rank, error, value = answers.get(timeout=5.0)
        except queue.Empty:
            if gone:  # before we asked: what it had to say would have been there
                raise RuntimeError(f"rank {gone[0]} ended without an answer") from None
            continue
        if error:
            raise RuntimeError(f"rank {rank} failed:\n{error}")
        found[rank] = value
    return found


def _rank(rank: int, size: int, store: str, work: Callable[..., Any], arguments: tuple[Any, ...], answers: Any) -> None:
    torch.set_num_threads(1)
    try:
        if size > 1:
            timeout = timedelta(seconds=TIMEOUT_S)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        answers.put((rank, "", work(rank, *arguments)))
    except Exception:
        answers.put((rank, traceback.format_exc(), None))
        return
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
