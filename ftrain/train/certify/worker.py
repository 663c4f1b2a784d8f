"""The workers of a certificate: forked once, from a process that has loaded torch and done nothing with it; then one process
group after the other.

Loading torch costs seconds, a process group a fraction of one: with 16 layouts that is the difference. Each worker serves
tasks from its own socket and ends when the other end closes, so nothing outlives its parent.

`python -P -m ftrain.train.certify.worker FD...` is the process that forks: one worker for each descriptor.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta

from ftrain.train.certify.messages import Done, Failed, Job, JobDone, Reply, Steps, Task
from recovery.wire import channel

SEND_S = 60.0


def main(fds: Sequence[int]) -> int:
    """Load everything, fork the workers, wait for them."""
    importlib.import_module("ftrain.train.certify.steps")
    importlib.import_module("torch.distributed")
    children = []
    for fd in fds:
        pid = os.fork()
        if pid == 0:
            for other in fds:
                if other != fd:
                    os.close(other)
            serve(socket.socket(fileno=fd))
            os._exit(0)
        children.append(pid)
    for fd in fds:
        os.close(fd)
    for pid in children:
        os.waitpid(pid, 0)
    return 0


def serve(sock: socket.socket) -> None:
    """Carry out tasks until the parent is gone."""
    import torch

    torch.set_num_threads(1)  # the bits of a reference must not depend on the machine's load
    link = channel(sock, Task)
    while (frame := link.receive()) is not None:
        link.send(_carried_out(frame.message))
        link.drain(SEND_S)


def _carried_out(task: Task) -> Reply:
    try:
        with _defect(task.defect), _group(task):
            return Done(jobs=[_run(job, task) for job in task.jobs])
    except Exception as error:
        return Failed(reason=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())


def _run(job: Job, task: Task) -> JobDone:
    from ftrain.train.certify.steps import run_ring, run_steps

    if isinstance(job, Steps):
        return run_steps(job, task.rank, task.cache)
    return run_ring(job, task.rank, task.cache)


@contextlib.contextmanager
def _group(task: Task) -> Iterator[None]:
    """A process group of this task's ranks; none for one rank."""
    if task.world == 1:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.world,
        timeout=timedelta(seconds=task.timeout_s),
    )
    yield
    dist.barrier()  # nobody leaves while somebody still talks to them
    dist.destroy_process_group()


def _defect(name: str) -> contextlib.AbstractContextManager[None]:
    """What tests break on purpose, for one task."""
    if not name:
        return contextlib.nullcontext()
    module, _, function = name.partition(":")
    broken: contextlib.AbstractContextManager[None] = getattr(importlib.import_module(module), function)()
    return broken


if __name__ == "__main__":
    sys.exit(main([int(fd) for fd in sys.argv[1:]]))
