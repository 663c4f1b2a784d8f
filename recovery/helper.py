"""The agent's long-lived children, keeper and zygote: kept running, each with one socket to the agent.

Their death is no interruption: the workers step on while a successor is started in the background. One that dies again and
again (a broken import, say) is restarted with growing pauses and never given up: whoever needs it is told each time that it
is not there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recovery.events import ProcessKind
from recovery.launch import Spawn, spawn
from recovery.loop import Loop, Port, Timer
from recovery.messages import Exited, Started
from recovery.wire import Frame, channel, socket_pair

log = logging.getLogger(__name__)

HEALTHY_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Whom a helper tells what."""

    on_start: Callable[[], None]
    on_frame: Callable[[Frame[Any]], None]
    on_death: Callable[[], None]
    report: Callable[[Started | Exited], None]


class Helper:
    """One such child. `command` makes the way to start it from the number of its socket."""

    def __init__(self, loop: Loop, kind: ProcessKind, command: Callable[[int], Spawn], messages: Any, tell: Callbacks) -> None:
        """Nothing is started yet."""
        self.kind: ProcessKind = kind
        self._loop = loop
        self._command = command
        self._messages = messages
        self._tell = tell
        self._process: subprocess.Popen[bytes] | None = None
        self._port: Port | None = None
        self._began = 0.0
        self._failures = 0
        self._deaths = 0
        self._restart: Timer | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """Its pid, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        """Whether a process runs (it may not be ready yet)."""
        return self._process is not None

    def start(self) -> None:
        """Start it, with a new socket."""
        ours, theirs = socket_pair()
        try:
            self._process = spawn(self._command(theirs.fileno()))
        except OSError as error:
            log.error("%s cannot be started: %s", self.kind, error)
            ours.close()
            self._failed()
            return
        finally:
            theirs.close()
        self._began = time.monotonic()
        self._port = Port(self._loop, channel(ours, self._messages), self._tell.on_frame, lambda: None)
        self._tell.report(Started(kind=self.kind, pid=self._process.pid, restarted=self._deaths > 0))
        self._tell.on_start()

    def send(self, message: object, fds: tuple[int, ...] = ()) -> bool:
        """Queue a message; False if no process is there to get it."""
        if self._port is None or self._port.closed:
            return False
        self._port.send(message, fds)
        return True

    def pause(self, paused: bool) -> None:
        """Stop or go on reading what it sends."""
        if self._port is not None:
            self._port.pause(paused)

    def exited(self, status: int) -> None:
        """The agent reaped it: read its last words, report, and start a successor."""
        process, self._process = self._process, None
        if process is None:
            return
        process.returncode = status
        port, self._port = self._port, None
        if port is not None:
            port.poll()
            port.close()
        self._deaths += 1
        self._tell.report(Exited(kind=self.kind, pid=process.pid, status=status, t=time.time(), ours=self._stopping))
        self._failures = 0 if time.monotonic() - self._began > HEALTHY_S else self._failures + 1
        self._tell.on_death()
        if not self._stopping:
            self._failed()

    def _failed(self) -> None:
        """The first restart is immediate, further ones wait longer and longer."""
        if self._stopping:
            return
        pause_s = 0.0 if self._failures <= 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._failures - 2))
        self._restart = self._loop.after(pause_s, self.start)

    def stop(self) -> None:
        """Hang up: a helper that has nothing left to do leaves by itself. No successor."""
        self._stopping = True
        if self._restart is not None:
            self._restart.cancel()
        if self._port is not None:
            self._port.close()

    def kill(self) -> None:
        """End it now, for good."""
        self._stopping = True
        self.renew()

    def renew(self) -> None:
        """End it now; a successor follows unless it was stopped."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
