"""The agent's connection to its coordinator: made, lost, made again, with nothing important lost in between.

On the coordinator's own machine it is a Unix socket, elsewhere TLS (recovery.identity). Dialling over a network may take
seconds, and an agent never waits for anybody, so a thread does it that lives only for this. After a loss the agent dials again
at once, then less and less often, at times of its own: hundreds of agents must not knock in one volley.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from recovery.identity import IdentityError
from recovery.loop import Loop, Port
from recovery.messages import Ack, AgentHello, Lasting, Ping, Pong, ToAgent, Welcome
from recovery.outbox import Outbox
from recovery.rendezvous import dial_coordinator
from recovery.wire import Channel, Frame, channel, connect

log = logging.getLogger("recovery.agent")

RECONNECT_S = 0.05
LONGEST_PAUSE_S = 2.0
DIAL_LIMIT_S = 5.0

Arrived = Callable[[Channel[ToAgent] | None], None]


class Owner(Protocol):
    """What the connection asks of its agent."""

    def hello(self) -> AgentHello:
        """Who it is and all it holds."""

    def obey(self, command: ToAgent) -> None:
        """A command of the coordinator."""

    def push_back(self, full: bool) -> None:
        """Stop reading from workers and keeper, or go on."""


class Uplink:
    """One agent's connection. `silent_s` is what its lease is measured by."""

    def __init__(self, loop: Loop, coordinator: str, control: str, owner: Owner) -> None:
        """`coordinator`: path of the Unix socket; `control`: folder with the run's key and address, if it is reached by TLS."""
        self._loop, self._owner = loop, owner
        self._coordinator, self._control = coordinator, control
        self.outbox = Outbox()
        self._port: Port | None = None
        self._linked = False
        self._dialling = False
        self._closed = False
        self._epoch = 0
        self._failures = 0
        self._contact = time.monotonic()
        self.met = False
        """Whether there ever was a coordinator."""

    @property
    def silent_s(self) -> float:
        """Seconds since the coordinator was last heard of."""
        return time.monotonic() - self._contact

    def connect(self) -> None:
        """Have a connection, now or as soon as somebody answers."""
        if self._port is not None or self._dialling or self._closed:
            return
        if self._control:
            self._dialling = True
            threading.Thread(target=self._dial, name="dial", daemon=True).start()
            return
        try:
            self._arrived(channel(connect(Path(self._coordinator)), ToAgent))
        except OSError:
            self._loop.after(RECONNECT_S, self.connect)

    def _dial(self) -> None:
        made: Channel[ToAgent] | None = None
        try:
            made = dial_coordinator(Path(self._control), ToAgent, limit_s=DIAL_LIMIT_S)
        except (OSError, IdentityError) as error:
            log.debug("the coordinator does not answer: %s", error)
        self._loop.call_soon(lambda: self._dialled(made))

    def _dialled(self, made: Channel[ToAgent] | None) -> None:
        self._dialling = False
        if made is not None and not self._closed:
            self._arrived(made)
            return
        if made is not None:
            made.close()
        self._failures += 1
        self._loop.after(self._pause_s(), self.connect)

    def _pause_s(self) -> float:
        return min(LONGEST_PAUSE_S, RECONNECT_S * 2.0 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)

    def _arrived(self, made: Channel[ToAgent]) -> None:
        self._linked = False
        self._port = Port(self._loop, made, self._frame, self._lost)
        self._port.send(self._owner.hello())

    def _lost(self) -> None:
        log.warning("coordinator lost")
        self._port = None
        self._linked = False
        self._failures += 1  # a coordinator that lets nobody in must not be asked without end
        self._loop.after(self._pause_s() if self._control else RECONNECT_S, self.connect)

    def report(self, message: Lasting) -> None:
        """Tell the coordinator, now or as soon as there is one; it is kept until acknowledged."""
        numbered = self.outbox.add(message)
        if self._linked and self._port is not None:
            self._port.send(numbered)
        self._owner.push_back(self.outbox.full)

    def answer(self, message: object) -> None:
        """Tell the coordinator if it is there; it will ask again otherwise."""
        if self._linked and self._port is not None:
            self._port.send(message)

    def _frame(self, frame: Frame[ToAgent]) -> None:
        self._contact = time.monotonic()
        match frame.message:
            case Welcome(epoch=epoch):
                self._welcome(epoch)
            case Ping():
                self.answer(Pong())
            case Ack(seq=seq):
                self.outbox.acknowledge(seq)
                self._owner.push_back(self.outbox.full)
            case command if self._linked:
                self._owner.obey(command)
                self._contact = time.monotonic()  # a command may take long (large memory), and meanwhile we were deaf

    def _welcome(self, epoch: int) -> None:
        if epoch < self._epoch and self._port is not None:
            log.warning("coordinator of epoch %d refused: epoch %d is known", epoch, self._epoch)
            self._port.close()
            self._lost()
            return
        self._epoch = epoch
        self._linked = self.met = True
        self._failures = 0
        for numbered in self.outbox:
            if self._port is not None:
                self._port.send(numbered)

    def close(self) -> None:
        """Send what is queued, for a moment, and connect no more."""
        self._closed = True
        if self._port is not None and not self._port.closed:
            self._port.channel.drain(1.0)
