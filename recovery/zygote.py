"""The zygote: one process that has imported everything, and whose forks are workers within milliseconds.

    python -P -m recovery.zygote --preload MODULE --socket-fd N

Importing torch takes seconds, a fork of a process that has done so takes milliseconds. Why our own and not multiprocessing's
forkserver: its environment is frozen at its first start and silently changes after an automatic restart, its exit statuses are
made up, and its workers outlive everybody.

Rules that keep a fork sound: exactly one thread (asserted before each fork: a lock held by another thread would stay locked
in the child for ever), no tensor operation here (a parallel region before the fork hangs the first matmul in the child), the
collector frozen (or each child would copy every page by touching its objects' headers).

A worker is forked twice, so that it is the agent's child and not ours: our death takes nobody along, and the agent's own
waitpid says how the worker ended. The worker waits for its adoption, asks to die with the agent, checks that it is still the
agent's, and only then says hello.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from recovery.launch import die_with_parent
from recovery.messages import Fork, Forked, ForkFailed, ToWorkerProcess, ToZygote, ZygoteReady
from recovery.wire import Channel, Frame, channel, close_all
from recovery.worker import run_worker

ADOPTION_LIMIT_S = 10.0
ADOPTION_POLL_S = 0.0005
RESULT = struct.Struct("<ii")


class ThreadsError(RuntimeError):
    """Something imported by the preload started a thread: no fork is safe any more."""


def num_threads() -> int:
    """Threads of this process as the kernel counts them."""
    return len(os.listdir("/proc/self/task"))


def check_one_thread() -> None:
    """Refuse to fork a process with several threads."""
    if num_threads() != 1:
        raise ThreadsError(
            f"the zygote has {num_threads()} threads after its imports; a forked worker could wait for ever for a lock that "
            "one of them holds. Start threads in the worker's entry function, not when a module is imported"
        )


def serve(agent: Channel[Fork]) -> None:
    """Fork the workers of each request, until the agent hangs up."""
    while (first := agent.receive()) is not None:
        batch = [first]
        while len(batch) < first.message.batch and (more := agent.receive()) is not None:
            batch.append(more)
        check_one_thread()
        for answer in fork_workers(batch, agent):
            agent.send(answer)
        for frame in batch:
            close_all(frame.fds)
        agent.drain(ADOPTION_LIMIT_S)


def fork_workers(batch: Sequence[Frame[Fork]], agent: Channel[Fork]) -> list[Forked | ForkFailed]:
    """Fork one process in the middle, and from it all workers: it only reports their pids and leaves.

    One for all, because a fork copies the page tables of everything imported: n + 1 copies rather than 2 n.
    """
    reader, writer = os.pipe()
    flush()
    reason, told = "the process in the middle died", b""
    try:
        middle = os.fork()
        if middle == 0:
            os.close(reader)
            _middle(batch, agent, writer)
        os.close(writer)
        writer = -1
        told = read_all(reader)
        os.waitpid(middle, 0)
    except OSError as error:
        reason = f"fork: {error.strerror}"
    finally:
        close_all([fd for fd in (reader, writer) if fd >= 0])
    results = [*RESULT.iter_unpack(told[: len(told) - len(told) % RESULT.size])]
    results += [(0, 0)] * (len(batch) - len(results))
    return [_answer(frame.message, pid, number, reason) for frame, (pid, number) in zip(batch, results, strict=True)]


def _answer(request: Fork, pid: int, number: int, reason: str) -> Forked | ForkFailed:
    if pid > 0:
        return Forked(attempt=request.attempt, rank=request.rank, pid=pid)
    reason = f"fork: {os.strerror(number)}" if number else reason
    return ForkFailed(attempt=request.attempt, rank=request.rank, reason=reason)


def read_all(fd: int) -> bytes:
    """Everything until the end of the stream."""
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def _middle(batch: Sequence[Frame[Fork]], agent: Channel[Fork], writer: int) -> NoReturn:
    for frame in batch:
        try:
            worker = os.fork()
        except OSError as error:
            os.write(writer, RESULT.pack(0, error.errno or 0))
            continue
        if worker == 0:
            try:
                os.close(writer)
                for other in batch:
                    if other is not frame:
                        close_all(other.fds)
                _become_worker(frame.message, frame.fds, agent)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.write(writer, RESULT.pack(worker, 0))
    os._exit(0)


def _become_worker(request: Fork, fds: Sequence[int], agent: Channel[Fork]) -> NoReturn:
    agent.close()
    named = dict(zip(request.fd_names, fds, strict=True))
    output = named.pop("log")
    os.dup2(output, 1, inheritable=True)
    os.dup2(output, 2, inheritable=True)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)  # whatever this worker starts can be killed with it
    wait_for_adoption(request.agent_pid)
    die_with_parent(request.agent_pid)
    gc.enable()
    link: Channel[ToWorkerProcess] = channel(socket.socket(fileno=named.pop("channel")), ToWorkerProcess)
    run_worker(request, link, named)


def wait_for_adoption(agent_pid: int) -> None:
    """Return once the agent is our parent; exit if it is gone or does not adopt us."""
    deadline = time.monotonic() + ADOPTION_LIMIT_S
    while os.getppid() != agent_pid:
        if time.monotonic() > deadline or not os.path.exists(f"/proc/{agent_pid}"):
            sys.stderr.write(f"worker {os.getpid()}: not adopted by agent {agent_pid}\n")
            os._exit(1)
        time.sleep(ADOPTION_POLL_S)


def flush() -> None:
    """What is buffered now would be written by each child once more."""
    sys.stdout.flush()
    sys.stderr.flush()


def main(argv: Sequence[str]) -> int:
    """Import, freeze, serve."""
    parser = argparse.ArgumentParser(prog="recovery.zygote")
    parser.add_argument("--preload", default="")
    parser.add_argument("--socket-fd", type=int, required=True)
    options = parser.parse_args(argv)
    began = time.monotonic()
    agent: Channel[Fork] = channel(socket.socket(fileno=options.socket_fd), ToZygote)
    os.set_inheritable(options.socket_fd, False)
    if options.preload:
        importlib.import_module(options.preload)
    check_one_thread()
    gc.collect()
    gc.disable()
    gc.freeze()
    agent.send(ZygoteReady(pid=os.getpid(), seconds=time.monotonic() - began))
    serve(agent)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
