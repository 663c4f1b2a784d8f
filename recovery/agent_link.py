"""The coordinator's hold on the agent: start one, find a living one again, notice its death, talk to it.

An agent is alive if and only if its lock is held; the record beside it says which process that is, so that a pidfd can be had
of an agent that a previous coordinator started. On many machines the agents are placed by the scheduler and come over TLS;
what remains the same is this interface.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from recovery import paths
from recovery.agent_record import AgentRecord
from recovery.launch import Spawn, python, spawn
from recovery.loop import Loop, Port
from recovery.messages import Ack, AgentHello, Lasting, Numbered, Ping, Welcome
from recovery.spec import AgentSpec
from recovery.wire import Frame

log = logging.getLogger(__name__)

ACK_DELAY_S = 0.02


class AgentLink:
    """One agent, from its start or adoption to its death."""

    def __init__(self, loop: Loop, on_message: Callable[[Any], None], on_death: Callable[[int, int | None, bool], None]):
        """`on_message` gets everything but the hello; `on_death` gets (pid, status if known, whether we did it)."""
        self._loop = loop
        self._on_message = on_message
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._port: Port | None = None
        self._epoch = 0
        self._seen = 0
        self._ack_due = False
        self._ours = False
        self.pid = 0
        self.hello: AgentHello | None = None

    @property
    def alive(self) -> bool:
        """Whether the process lives, connected or not."""
        return self._pidfd >= 0

    @property
    def ready(self) -> bool:
        """Whether it lives and has said hello."""
        return self.alive and self.hello is not None and self._port is not None

    def start(self, spec: AgentSpec, epoch: int) -> None:
        """A new agent in a session of its own: what is typed at a terminal is not for it. Main thread only."""
        path = paths.agent_spec(Path(spec.local_dir))
        path.write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
        how = Spawn(
            argv=python("recovery.agent", str(path)),
            log=paths.process_log(Path(spec.local_dir), "agent"),
            env=spec.env,
            new_session=True,
        )
        self._process = spawn(how)
        self._watch(self._process.pid, epoch)

    def adopt(self, record: AgentRecord, epoch: int) -> bool:
        """An agent that an earlier coordinator left behind; False if it has died meanwhile."""
        try:
            self._watch(record.pid, epoch)
        except ProcessLookupError:
            return False
        return True

    def _watch(self, pid: int, epoch: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        self.pid, self._epoch, self.hello, self._seen, self._ours = pid, epoch, None, 0, False
        self._loop.add(self._pidfd, self._died)

    def _died(self) -> None:
        self._loop.remove(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        port, self._port = self._port, None
        if port is not None:
            port.poll()  # its last words
            port.close()
        status = self._process.wait() if self._process is not None else None
        self._process = None
        self._on_death(self.pid, status, self._ours)

    def offered(self, port: Port, hello: AgentHello) -> None:
        """Somebody says it is the agent. It is, if its pid is the one we watch; any other is a left-over and is hung up on."""
        if not self.alive or hello.pid != self.pid:
            log.warning("agent with pid %d refused, ours is %d", hello.pid, self.pid)
            port.close()
            return
        if self._port is not None:
            self._port.close()
        self._port = port
        port.take_over(self._frame, self._hung_up)
        self.hello = hello
        port.send(Welcome(epoch=self._epoch))

    def _hung_up(self) -> None:
        self._port = None  # it reconnects, or its death is told by the pidfd

    def _frame(self, frame: Frame[Any]) -> None:
        message = frame.message
        if isinstance(message, Numbered):
            self._numbered(message)
        else:
            self._on_message(message)

    def _numbered(self, numbered: Numbered) -> None:
        if numbered.seq <= self._seen:
            return
        message: Lasting = numbered.message
        self._on_message(message)
        self._seen = numbered.seq
        if not self._ack_due:
            self._ack_due = True
            self._loop.after(ACK_DELAY_S, self._acknowledge)

    def _acknowledge(self) -> None:
        self._ack_due = False
        self.send(Ack(seq=self._seen))

    def ping(self) -> None:
        """Renew the lease."""
        self.send(Ping())

    def send(self, message: object) -> None:
        """To the agent; dropped if it is not connected (whoever needs an answer has a time limit)."""
        if self._port is not None:
            self._port.send(message)

    def will_leave(self) -> None:
        """Its death is expected from now on."""
        self._ours = True

    def kill(self) -> None:
        """End it, and with it everything on its node."""
        if self.alive:
            self._ours = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
