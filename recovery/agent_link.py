"""The coordinator's hold on the agent of its own machine: start one, find a living one again, notice its death, talk to it.

An agent is alive if and only if its lock is held; the record beside it says which process that is, so that a pidfd can be had
of an agent that a previous coordinator started. On many machines the agents are placed by the scheduler and come over TLS
(recovery.fleet, which offers what is offered here).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from recovery import paths
from recovery.agent_record import AgentRecord, living_agent
from recovery.exits import exit_text
from recovery.launch import Spawn, python, spawn
from recovery.line import Line
from recovery.loop import Loop, Port
from recovery.messages import AgentHello, Ping
from recovery.spec import AgentSpec

log = logging.getLogger(__name__)

OnMessage = Callable[[Any, str], None]
"""(message, node)"""
OnDeath = Callable[[str, int, int | None, bool], None]
"""(node, pid, status if known, whether we did it)"""


class AgentLink:
    """One agent, from its start or adoption to its death, and its successors."""

    def __init__(self, loop: Loop, spec: AgentSpec, on_message: OnMessage, on_death: OnDeath) -> None:
        """`on_message` gets everything but the hello."""
        self._loop = loop
        self._spec = spec
        self._on_message = on_message
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._line = self._new_line()
        self._epoch = 0
        self._ours = False
        self.status: int | None = None
        """How the last one that died ended."""
        self._found: AgentRecord | None = None
        self.pid = 0

    def _new_line(self) -> Line:
        return Line(self._loop, lambda message: self._on_message(message, self._spec.node), lambda: None)

    @property
    def alive(self) -> bool:
        """Whether the process lives, connected or not."""
        return self._pidfd >= 0

    @property
    def gone(self) -> bool:
        """Whether no agent is left."""
        return not self.alive

    @property
    def quiet(self) -> bool:
        """Whether an agent is not heard of, so that nothing can be said of its workers: never here."""
        return False

    @property
    def parting(self) -> bool:
        """Whether it may be dying and nobody knows yet: never here, a pidfd tells at once."""
        return False

    @property
    def expecting(self) -> bool:
        """Whether others of its attempt may come: there is but one."""
        return False

    def ready(self, needed: int, left_out: Sequence[str] = ()) -> bool:
        """Whether it lives and has said hello. This machine is one node, and cannot be left out."""
        return self.alive and self.hello is not None and self._line.connected

    @property
    def hello(self) -> AgentHello | None:
        """Its newest hello."""
        return self._line.hello

    @property
    def hellos(self) -> tuple[AgentHello, ...]:
        """The newest hello of each agent."""
        return (self.hello,) if self.hello is not None else ()

    def available(self, left_out: Sequence[str] = ()) -> tuple[str, ...]:
        """The nodes that can be used now."""
        return (self._spec.node,)

    def place(self, nodes: Mapping[int, str], areas: Mapping[int, Sequence[str]] = {}) -> None:
        """Rank -> node of the attempt to come: all are here."""

    def expect(self, attempt: int, ranks: int) -> None:
        """An earlier coordinator started this attempt: the agent tells all there is to know."""

    def miss(self, nodes: Sequence[str]) -> None:
        """Nodes that had ranks of the attempt that was taken over, and are not here: there is but one."""

    def find(self) -> bool:
        """Whether an agent of an earlier coordinator lives."""
        self._found = living_agent(Path(self._spec.local_dir))
        return self._found is not None

    def give_up(self) -> None:
        """End the agent that was found: the run will not be ours."""
        found, self._found = self._found, None
        if found is not None:
            with contextlib.suppress(ProcessLookupError):
                self._watch(found.pid)
                self.kill()

    def begin(self, epoch: int) -> None:
        """Adopt the agent that was found, or start one. Main thread only."""
        self._epoch = epoch
        found, self._found = self._found, None
        if found is not None:
            with contextlib.suppress(ProcessLookupError):  # it has died meanwhile
                self._watch(found.pid)
                return
        self.start()

    def start(self) -> None:
        """A new agent in a session of its own: what is typed at a terminal is not for it. Main thread only."""
        folder = Path(self._spec.local_dir)
        path = paths.agent_spec(folder)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self._spec)))
        how = Spawn(
            argv=python("recovery.agent", str(path)),
            log=paths.process_log(folder, "agent"),
            env=self._spec.env,
            new_session=True,
        )
        self._process = spawn(how)
        self._watch(self._process.pid)

    def _watch(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)
        self.pid, self._ours, self._line = pid, False, self._new_line()
        self._loop.add(self._pidfd, self._died)

    def _died(self) -> None:
        self._loop.remove(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._line.last_words()
        self.status = self._process.wait() if self._process is not None else None
        self._process = None
        self._on_death(self._spec.node, self.pid, self.status, self._ours)

    def bury(self) -> dict[str, str]:
        """The dead since the last call, node -> what is known. A successor is started at once: it warms up while we think."""
        if self.alive:
            return {}
        self.start()
        return {self._spec.node: f"supervisor: the agent of node {self._spec.node} died ({exit_text(self.status)})"}

    def offered(self, port: Port, hello: AgentHello) -> None:
        """Somebody says it is the agent. It is, if its pid is the one we watch; any other is a left-over and is hung up on."""
        if not self.alive or hello.pid != self.pid:
            log.warning("agent with pid %d refused, ours is %d", hello.pid, self.pid)
            port.close()
            return
        self._line.take(port, hello, self._epoch)

    def ping(self) -> None:
        """Renew the lease."""
        self.send(Ping())

    def send(self, message: object) -> None:
        """To the agent; dropped if it is not connected (whoever needs an answer has a time limit)."""
        self._line.send(message)

    def will_leave(self) -> None:
        """Its death is expected from now on."""
        self._ours = True

    def kill(self) -> None:
        """End it, and with it everything on its node."""
        if self.alive:
            self._ours = True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def describe(self) -> dict[str, Any]:
        """For people."""
        return {"agent_pid": self.pid}

    def close(self) -> None:
        """Nothing is held."""
