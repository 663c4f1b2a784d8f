"""The worker's side of supervision: what an entry function is given, and what surrounds its call.

The supervised function gets everything through one WorkerContext and imports nothing of the agent. Signals that ask for a stop
only set a flag, because a step must never be cut in the middle; an uncaught exception is written as JSON *before* the process
exits, because "exit status 1" explains nothing, and the agent is told at once, because tearing down a large process takes time.

What a worker says is in the kernel's hands at once, and survives it. Whether the agent is woken to read it is another question:
a process that is woken for each of many short steps takes the processor from those who train. So the agent does not listen to
the socket; it reads when a bell rings (an eventfd), a worker has died, or a second is over. Reports that can wait ring it if it
has read nothing for half a second and the worker is not just beginning, everything else rings at once.

Must stay importable without torch or numpy: the zygote imports it before the preloaded module.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from recovery.command import COMMAND, become
from recovery.evidence import ErrorReport
from recovery.heartbeat import ControlReader, HeartbeatWriter
from recovery.messages import (
    Fork,
    Payload,
    ToWorkerProcess,
    WorkerFailing,
    WorkerHello,
    WorkerToKeeper,
)
from recovery.wire import Channel, close_all

OOM_SCORE_ADJ = 500
RING_S = 0.5
"""Reports that can wait are read after so long, as long as others follow them."""
EAGER_S = 10.0
"""Nothing waits so soon after the start: who started a run, or has just seen it fall, looks at its first steps."""
SEND_LIMIT_S = 600.0


class AgentGoneError(Exception):
    """The agent closed its end; the kernel is about to kill this worker."""


class WorkerContext:
    """Everything a worker knows of its surroundings. `send` and its like, and `receive`, are safe from any of its threads."""

    def __init__(self, fork: Fork, channel: Channel[ToWorkerProcess], fds: dict[str, int]) -> None:
        """Take over the descriptors that came with `fork`."""
        self.rank = fork.rank
        self.attempt = fork.attempt
        self.epoch = fork.epoch
        self.args = fork.args
        self.error_file = Path(fork.error_file)
        page, control = fds.pop("heartbeat"), fds.pop("control")
        self.heartbeat = HeartbeatWriter(page, fork.index, rank=fork.rank, attempt=fork.attempt)
        self.control = ControlReader(control)
        close_all((page, control))  # mapped; the mappings hold what they need
        self.bell: int | None = fds.pop("bell", None)
        """Rung when the agent should read; without one it is woken by every message."""
        self._rung, self._began = 0.0, time.monotonic()
        self.listener_fd: int | None = fds.pop("listener", None)
        """Listening TCP socket of the rendezvous, only in rank 0; its port is `args["port"]` in every rank."""
        self.fds = fds
        """The agent's memory areas, by name."""
        self.terminated = False
        """Whether SIGTERM or SIGINT has arrived: finish the step, save, return."""
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, payload: bytes) -> None:
        """To the coordinator's delegate. Waits only if the agent is far behind."""
        self._send(Payload(payload=payload))

    def send_soon(self, payload: bytes) -> None:
        """The same for what is said often and need not be heard at once: it is, if the agent has read nothing for `RING_S`."""
        self._send(Payload(payload=payload), ring=self._is_time())

    def send_later(self, payload: bytes) -> None:
        """To the coordinator's delegate, with whatever is sent next: what is not worth waking anybody for."""
        with self._lock:
            self._channel.queue(Payload(payload=payload))

    def send_keeper(self, payload: bytes, *, soon: bool = False) -> None:
        """To the keeper of this node, through the agent; lost if none is running at that moment. `soon`: as `send_soon`."""
        self._send(WorkerToKeeper(payload=payload), ring=not soon or self._is_time())

    def receive(self) -> bytes | None:
        """The next payload of the delegate, None if there is none now."""
        with self._lock:
            frame = self._channel.receive(0.0)
        return frame.message.payload if frame is not None else None

    def hello(self) -> None:
        """The first message."""
        self._send(WorkerHello(pid=os.getpid(), rings=self.bell is not None))

    def _send(self, message: object, *, ring: bool = True) -> None:
        with self._lock:
            self._channel.send(message)
            if ring:
                self._ring()
            if self._channel.wants_write:
                self._channel.drain(SEND_LIMIT_S, full=self._ring)
                self._ring()  # the rest went after the last ring: who heard that one may have read before it came
            if self._channel.closed:
                raise AgentGoneError(f"rank {self.rank}: the agent's socket is closed")

    def _is_time(self) -> bool:
        """Whether what can wait has waited long enough: also where a clock makes no sense."""
        now = time.monotonic()
        return now - self._began < EAGER_S or not 0.0 <= now - max(self._rung, self.control.looked) < RING_S

    def _ring(self) -> None:
        if self.bell is not None:
            self._rung = time.monotonic()
            with contextlib.suppress(BlockingIOError):  # it rings already
                os.eventfd_write(self.bell, 1)

    def fail(self, error: BaseException) -> None:
        """Write the error file, then tell the agent."""
        report = ErrorReport(
            type=type(error).__qualname__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            t=time.time(),
            rank=self.rank,
            attempt=self.attempt,
        )
        with contextlib.suppress(OSError):
            self.error_file.write_bytes(msgspec.json.encode(report))
        with contextlib.suppress(AgentGoneError):
            self._send(WorkerFailing(error=f"{report.type}: {report.message}"[:2000]))


def run_worker(fork: Fork, channel: Channel[ToWorkerProcess], fds: dict[str, int]) -> NoReturn:
    """Life of a worker from its adoption to its exit. Never returns: the zygote's stack and exit handlers are not ours."""
    _prepare(fork)
    if fork.entry == COMMAND:
        become(fork, channel, fds)
    context = WorkerContext(fork, channel, fds)
    _install_signals(context)
    context.hello()
    status = 1
    try:
        resolve(fork.entry)(context)
        status = 0
    except AgentGoneError as gone:  # no fault of this worker: a traceback would be read as one
        sys.stderr.write(f"{gone}: leaving\n")
    except SystemExit as leaving:
        status = _status(leaving)
    except BaseException as error:
        traceback.print_exception(error)
        context.fail(error)
    finally:
        _leave(status)


def resolve(entry: str) -> Callable[[WorkerContext], Any]:
    """The function named by `module:function`."""
    module, _, name = entry.partition(":")
    function = getattr(import_module(module), name, None)
    if not callable(function):
        raise TypeError(f"{entry!r} is not a function: an entry is `module:function`")
    return function  # type: ignore[no-any-return]


def _prepare(fork: Fork) -> None:
    os.environ.update(fork.env)
    with contextlib.suppress(OSError):  # the kernel should rather take a worker than the agent that holds the memory tier
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)


def _install_signals(context: WorkerContext) -> None:
    def note(number: int, frame: FrameType | None) -> None:
        context.terminated = True

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)


def _status(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
