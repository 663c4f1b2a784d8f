"""The parent's side of the warm workers: start them, give each rank its task, collect the answers, put a broken pool away.

A rank that raises leaves the others in a collective. So the first failure ends the pool, whose processes are a session of their
own, and the next task gets a new one: a defect in one layout says nothing about the next.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ftrain.data.stdlib import cache_root
from ftrain.train.certify.messages import Done, Failed, Job, JobDone, Reply, Task
from recovery.wire import Channel, channel, socket_pair

TIMEOUT_S = 120.0  # of a collective
LAST_WORDS_S = 0.5  # after one rank has failed: the others' own errors, if they have any


class TaskFailedError(Exception):
    """A task that did not end well on some rank; the message says which and why."""


class Pool:
    """Workers for up to `size` ranks. A context manager; nothing is started before the first task."""

    def __init__(self, size: int, *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """`env`: added to the environment of the workers."""
        self._size, self._env, self._timeout_s = size, dict(env or {}), timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._links: list[Channel[Reply]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ftrain-certify-")
        self._count = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        self._folder.cleanup()

    def run(self, jobs: Sequence[Job], *, world: int, defect: str = "") -> list[list[JobDone]]:
        """Carry out jobs, one after the other, on `world` ranks of a new process group: for each job, what each rank says."""
        self._start()
        self._count += 1
        rendezvous = str(Path(self._folder.name) / f"group-{self._count}")
        for rank, link in enumerate(self._links[:world]):
            link.send(
                Task(
                    rank=rank,
                    world=world,
                    rendezvous=rendezvous,
                    cache=cache_root(),
                    timeout_s=self._timeout_s,
                    defect=defect,
                    jobs=list(jobs),
                )
            )
        ranks = self._collect(self._links[:world])
        return [[rank.jobs[index] for rank in ranks] for index in range(len(jobs))]

    def stop(self) -> None:
        """End the workers."""
        for link in self._links:
            link.close()
        self._links = []
        if self._process is not None:
            try:
                self._process.wait(LAST_WORDS_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process = None

    def _start(self) -> None:
        if self._process is not None:
            return
        pairs = [socket_pair() for _ in range(self._size)]
        self._links = [channel(ours, Reply) for ours, _ in pairs]
        fds = [theirs.fileno() for _, theirs in pairs]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ftrain.train.certify.worker", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,  # the parent's stdout is for the answer
                start_new_session=True,
                env={**os.environ, **self._env},
            )
        finally:
            for _, theirs in pairs:
                theirs.close()

    def _collect(self, links: Sequence[Channel[Reply]]) -> list[Done]:
        """Everybody's answer; after a failure the pool is stopped and the failure raised."""
        waiting, answers = dict(enumerate(links)), dict[int, Reply]()
        deadline = float("inf")
        while waiting and time.monotonic() < deadline:
            for rank in self._ready(waiting, deadline):
                reply = _answer(waiting.pop(rank))
                answers[rank] = reply
                if isinstance(reply, Failed):
                    deadline = min(deadline, time.monotonic() + LAST_WORDS_S)
        failed = {rank: reply for rank, reply in answers.items() if isinstance(reply, Failed)}
        if failed:
            self.stop()
            first = next((r for r in failed.items() if "Connection" not in r[1].reason), next(iter(failed.items())))
            raise TaskFailedError(f"rank {first[0]}: {first[1].reason}") from RuntimeError(first[1].traceback)
        return [answer for _, answer in sorted(answers.items()) if isinstance(answer, Done)]

    def _ready(self, waiting: Mapping[int, Channel[Reply]], deadline: float) -> list[int]:
        for link in waiting.values():
            link.flush()
        if gone := [rank for rank, link in waiting.items() if link.closed]:  # a socket that is closed cannot be waited for
            return gone
        poll = select.poll()
        numbers = {link.fileno(): rank for rank, link in waiting.items()}
        for rank, link in waiting.items():
            poll.register(link.fileno(), select.POLLIN | (select.POLLOUT if link.wants_write else 0))
            numbers[link.fileno()] = rank
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic()) * 1000
        return [numbers[fd] for fd, event in poll.poll(left) if event & ~select.POLLOUT]


def _answer(link: Channel[Any]) -> Reply:
    frame = link.receive()
    if frame is None:
        return Failed(reason="died without a word", traceback="")
    reply: Reply = frame.message
    return reply
