"""The workers of one attempt on one node, from the request to fork them to the last exit status.

The true status of a worker is known only to its parent, so the agent adopts them (it is their subreaper) and reaps them itself.
A worker may die at any moment: before the zygote's answer, before its hello, while it is being killed. Each of them ends as
exactly one `Exited`, whose `ours` says whether a signal of ours did it, because our own teardown must never look like a cause.

Whatever a worker started (data loaders, compilers) shares its process group and is killed with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from recovery import paths
from recovery.bell import Bell
from recovery.evidence import OomWatch
from recovery.heartbeat import RECORD_SIZE, Beat, HeartbeatReader
from recovery.loop import Loop, Port
from recovery.memory import memfd
from recovery.messages import (
    Exited,
    Failing,
    Fork,
    Forked,
    ForkFailed,
    FromWorker,
    FromWorkerProcess,
    Lasting,
    Payload,
    Signalled,
    Spawned,
    StartAttempt,
    WorkerFailing,
    WorkerHello,
    WorkerInfo,
    WorkerSpec,
    WorkerToKeeper,
)
from recovery.wire import Frame, channel, close_all, socket_pair

HELLO_LIMIT_S = 60.0
FORK_LIMIT_S = 2.0
LAST_HELLO_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a crew needs of its agent."""

    loop: Loop
    local_dir: Path
    area_fd: Callable[[str], int]
    control_fd: int
    report: Callable[[Lasting], None]
    to_zygote: Callable[[Fork, tuple[int, ...]], bool]
    to_keeper: Callable[[int, int, bytes], None]
    """(rank, attempt, payload)"""
    kill_zygote: Callable[[], None]
    looked: Callable[[float], None]
    """When the sockets of workers that ring were last read, on the monotonic clock: for them to know."""
    node_env: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker. `pid` is 0 until the zygote or the worker itself has told it."""

    spec: WorkerSpec
    index: int
    port: Port | None = None
    pid: int = 0
    asked: bool = False
    """Whether the zygote has been asked to fork it."""
    hello: bool = False
    rings: bool = False
    """Whether it says when its socket is to be read."""
    ended: bool = False
    status: int | None = None
    t: float = 0.0
    sent: set[int] = field(default_factory=set)

    @property
    def ours(self) -> bool:
        """Whether a signal of ours ended it: killed by it, or left in answer to SIGTERM."""
        if self.status is None:
            return bool(self.sent)
        return -self.status in self.sent if self.status < 0 else signal.SIGTERM in self.sent


class Crew:
    """All workers of one attempt on this node."""

    def __init__(self, around: Surroundings, start: StartAttempt) -> None:
        """Descriptors and folders are made here; `launch` asks for the processes."""
        self.start = start
        self._around = around
        self.workers = {spec.rank: Worker(spec=spec, index=index) for index, spec in enumerate(start.workers)}
        self._page = memfd("heartbeat", max(1, len(self.workers)) * RECORD_SIZE)
        self.reader = HeartbeatReader(self._page)
        self._bell = Bell(around.loop, self.look)
        self._paused = False
        self.order: list[int] = []
        """Ranks in the order of their deaths."""
        self.oom = OomWatch()
        self._unasked: list[tuple[Worker, Fork, tuple[int, ...]]] = []
        self._stopped: tuple[int, str] | None = None  # the last signal to all, also for those who are not there yet
        self.began = time.monotonic()
        paths.log_dir(around.local_dir, start.attempt).mkdir(parents=True, exist_ok=True)

    @property
    def attempt(self) -> int:
        """Its number."""
        return self.start.attempt

    @property
    def all_ended(self) -> bool:
        """Whether no worker is left."""
        return all(worker.ended for worker in self.workers.values())

    def info(self) -> tuple[WorkerInfo, ...]:
        """For a coordinator that was not there from the beginning."""
        return tuple(
            WorkerInfo(rank=rank, pid=it.pid, ended=it.ended, status=it.status, ours=it.ours, t=it.t)
            for rank, it in self.workers.items()
        )

    def beats(self) -> tuple[Beat, ...]:
        """The progress page."""
        return tuple(self.reader.beats())

    def launch(self, meeting: dict[str, Any], listener_fd: int | None) -> None:
        """Ask the zygote for every worker: `meeting` (host and port) is added to their arguments, rank 0 gets the listener."""
        for worker in self.workers.values():
            self._request(worker, meeting, listener_fd if worker.spec.rank == 0 else None)

    def not_launched(self, reason: str) -> None:
        """None of them can be started."""
        for rank in self.workers:
            self.never_started(rank, reason)

    def _request(self, worker: Worker, meeting: dict[str, Any], listener_fd: int | None) -> None:
        around, spec = self._around, worker.spec
        ours, theirs = socket_pair()
        out = os.open(self._path(paths.rank_log, worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fds = {"log": out, "channel": theirs.fileno(), "heartbeat": self._page, "control": around.control_fd}
        fds["bell"] = self._bell.fileno()
        fds |= {"listener": listener_fd} if listener_fd is not None else {}
        fds |= {name: around.area_fd(name) for name in spec.memfds}
        request = Fork(
            attempt=self.attempt,
            epoch=self.start.epoch,
            rank=spec.rank,
            index=worker.index,
            entry=spec.entry,
            args={**spec.args, **meeting},
            env={**spec.env, **around.node_env},
            fd_names=tuple(fds),
            agent_pid=os.getpid(),
            error_file=str(self._path(paths.error_file, worker)),
            batch=len(self.workers),
        )
        worker.port = Port(around.loop, channel(ours, FromWorkerProcess), lambda it: self._frame(worker, it), lambda: None)
        worker.asked = around.to_zygote(request, tuple(fds.values()))
        if not worker.asked:  # it has just died: its successor will be asked
            self._unasked.append((worker, request, tuple(os.dup(fd) for fd in fds.values())))
        theirs.close()
        close_all([out])

    def zygote_started(self) -> None:
        """Ask the new zygote for whom the old one could not be asked any more."""
        unasked, self._unasked = self._unasked, []
        for worker, request, fds in unasked:
            worker.asked = self._around.to_zygote(replace(request, batch=len(unasked)), fds)
            close_all(fds)
            if not worker.asked:
                self.never_started(worker.spec.rank, "there is no zygote to fork it")

    def _path(self, path: Callable[[Path, int, int], Path], worker: Worker) -> Path:
        return path(self._around.local_dir, self.attempt, worker.spec.rank)

    def forked(self, answer: Forked) -> None:
        """The zygote's good news."""
        worker = self.workers[answer.rank]
        if worker.pid == 0 and not worker.ended:
            worker.pid = answer.pid
            if self._stopped is not None:
                self._signal(worker, *self._stopped)
            self._around.loop.after(HELLO_LIMIT_S, lambda: self._check_hello(worker))

    def fork_failed(self, answer: ForkFailed) -> None:
        """The zygote's bad news."""
        self.never_started(answer.rank, answer.reason)

    def zygote_died(self, reason: str) -> None:
        """What it had not answered will not be answered: whoever does not say hello by itself now was never forked."""
        silent = [it for it in self.workers.values() if it.asked and it.pid == 0 and not it.ended]

        def give_up() -> None:
            for worker in silent:
                if worker.pid == 0 and not worker.ended:
                    self.never_started(worker.spec.rank, reason)

        self._around.loop.after(LAST_HELLO_S, give_up)

    def never_started(self, rank: int, reason: str) -> None:
        """Account for a worker that does not exist."""
        self._around.report(Failing(rank=rank, attempt=self.attempt, error=f"not started: {reason}"))
        self._end(self.workers[rank], None)

    def _check_hello(self, worker: Worker) -> None:
        if not worker.hello and not worker.ended:
            self._signal(worker, signal.SIGKILL, f"no hello within {HELLO_LIMIT_S:g} s of its start")

    def _frame(self, worker: Worker, frame: Frame[FromWorkerProcess]) -> None:
        rank = worker.spec.rank
        match frame.message:
            case WorkerHello(pid=pid, rings=rings):
                worker.hello, worker.rings = True, rings
                if rings and worker.port is not None:
                    worker.port.rest()
                told, worker.pid = worker.pid != 0, pid
                if self._stopped is not None and not told:
                    self._signal(worker, *self._stopped)
                self._around.report(Spawned(attempt=self.attempt, rank=rank, pid=pid))
            case Payload(payload=payload):
                self._around.report(FromWorker(rank=rank, attempt=self.attempt, payload=payload))
            case WorkerToKeeper(payload=payload):
                self._around.to_keeper(rank, self.attempt, payload)
            case WorkerFailing(error=error):
                self._around.report(Failing(rank=rank, attempt=self.attempt, error=error))

    def send(self, rank: int, payload: bytes) -> None:
        """To a worker; dropped if it has ended."""
        worker = self.workers.get(rank)
        if worker is not None and worker.port is not None and not worker.ended:
            worker.port.send(Payload(payload=payload))

    def look(self) -> None:
        """Read what those have sent that nobody listens to, unless they are to wait."""
        self._around.looked(time.monotonic())
        for worker in self.workers.values():
            if worker.rings and worker.port is not None and not (worker.ended or self._paused):
                worker.port.poll()

    def pause(self, paused: bool) -> None:
        """Stop or go on reading what the workers send."""
        before, self._paused = self._paused, paused
        for worker in self.workers.values():
            if worker.port is not None and not worker.ended:
                worker.port.pause(paused)
        if before and not paused:
            self.look()

    def by_pid(self, pid: int) -> Worker | None:
        """The living worker with this pid."""
        return next((it for it in self.workers.values() if it.pid == pid and not it.ended), None)

    def exited(self, worker: Worker, status: int) -> None:
        """The agent reaped it: read its last words, then report."""
        if worker.port is not None:
            worker.port.poll()
        self._end(worker, status)

    def _end(self, worker: Worker, status: int | None) -> None:
        if worker.ended:
            return
        worker.ended, worker.status, worker.t = True, status, time.time()
        if worker.port is not None:
            worker.port.close()
        rank = worker.spec.rank
        self.order.append(rank)
        ended = Exited(
            kind="worker", rank=rank, attempt=self.attempt, pid=worker.pid, status=status, t=worker.t, ours=worker.ours
        )
        self._around.report(ended)

    def stop(self, number: int, reason: str) -> None:
        """End every worker by a signal: those alive now, and those the zygote has yet to fork."""
        self._stopped = (number, reason)
        self.signal(number, reason)
        self._forget_unasked(reason)
        self._around.loop.after(FORK_LIMIT_S, self._check_forked)

    def _forget_unasked(self, reason: str) -> None:
        unasked, self._unasked = self._unasked, []
        for worker, _, fds in unasked:
            close_all(fds)
            self.never_started(worker.spec.rank, reason)

    def _check_forked(self) -> None:
        """A zygote that still has not forked what is to be ended (a hanging import?) is ended itself."""
        if any(worker.pid == 0 and not worker.ended for worker in self.workers.values()):
            self._around.kill_zygote()

    def signal(self, number: int, reason: str) -> None:
        """Signal every living worker."""
        for worker in self.workers.values():
            self._signal(worker, number, reason)

    def _signal(self, worker: Worker, number: int, reason: str) -> None:
        if worker.ended or worker.pid == 0:
            return
        if number != signal.SIGUSR1:
            worker.sent.add(number)
            told = Signalled(
                kind="worker",
                pid=worker.pid,
                rank=worker.spec.rank,
                attempt=self.attempt,
                signal=number,
                reason=reason,
                t=time.time(),
            )
            self._around.report(told)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, number)

    def close(self) -> None:
        """Give everything back; no worker may be left."""
        self._forget_unasked("closed")
        for worker in self.workers.values():
            if worker.port is not None:
                worker.port.close()
        self.reader.close()
        self._bell.close()
        close_all([self._page])
