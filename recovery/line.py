"""The coordinator's end of one agent's connection, over any number of connections in a row.

An agent numbers what must not be lost and keeps it until it hears that it is on record. So what counts is how far its messages
have been handled, not on which connection they came.

Workers report several times a second, and to acknowledge each report would wake the agent, which costs more than to keep some
of them a second longer: they are acknowledged together, with whatever is sent next, or when one comes a second after the last
acknowledgement. The successor of a coordinator that was killed is told them again, and does not mind (recovery.desk).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from recovery.loop import Loop, Port
from recovery.messages import Ack, AgentHello, FromWorker, Numbered, Welcome
from recovery.outbox import size
from recovery.wire import Frame

OWED_S = 1.0
"""A report is acknowledged at once if the last acknowledgement is so long ago."""
OWED_BYTES = 1 << 20
"""Of reports that the agent keeps for want of an acknowledgement: more are acknowledged at once."""


class Line:
    """One agent process. `hello` is its newest; None before the first."""

    def __init__(self, loop: Loop, on_message: Callable[[Any], None], on_hang_up: Callable[[], None]) -> None:
        """Nobody has called yet. `on_message` gets everything but the hello."""
        self._loop = loop
        self._on_message = on_message
        self._on_hang_up = on_hang_up
        self._port: Port | None = None
        self._seen = 0
        self._acknowledged = 0  # on this connection
        self._owed_bytes = 0
        self._told = time.monotonic()
        self._ack_due = False
        self.hello: AgentHello | None = None
        self.ended: object | None = None
        """The channel of the last connection that was ended by the other side, or by the network."""

    @property
    def connected(self) -> bool:
        """Whether the agent can be told something now."""
        return self._port is not None

    def take(self, port: Port, hello: AgentHello, epoch: int) -> None:
        """The agent has called (again): it is welcome, and this connection is the one that counts."""
        if self._port is not None:
            self._port.close()
        self._port, self._acknowledged = port, 0
        port.take_over(self._frame, self._hung_up)
        self.hello = hello
        port.send(Welcome(epoch=epoch))

    def _hung_up(self) -> None:
        self.ended = self._port.channel if self._port is not None else None
        self._port = None
        self._on_hang_up()

    def _frame(self, frame: Frame[Any]) -> None:
        message = frame.message
        if not isinstance(message, Numbered):
            self._on_message(message)
            return
        if message.seq <= self._seen:
            return
        self._on_message(message.message)
        self._seen = message.seq
        self._owed_bytes += size(message.message)
        early = time.monotonic() - self._told < OWED_S and self._owed_bytes < OWED_BYTES
        can_wait = early and isinstance(message.message, FromWorker)
        if not (can_wait or self._ack_due):
            self._ack_due = True
            self._loop.flush_later(self.acknowledge)  # once for all that came together

    def acknowledge(self) -> None:
        """Tell the agent how far its messages are on record, if it does not know."""
        self._ack_due = False
        if self._port is not None and self._acknowledged < self._seen:
            self._acknowledged, self._owed_bytes, self._told = self._seen, 0, time.monotonic()
            self._port.send(Ack(seq=self._seen))

    def send(self, message: object) -> None:
        """To the agent; dropped if it is not connected (whoever needs an answer has a time limit)."""
        if self._port is not None:
            self.acknowledge()
            self._port.send(message)

    def look(self) -> None:
        """Hear what has already arrived."""
        if self._port is not None:
            self._port.poll()

    def last_words(self) -> None:
        """The process is known to be dead: hear what has already arrived, then hang up."""
        port, self._port = self._port, None
        if port is not None:
            port.poll()
            port.close()

    def hang_up(self) -> None:
        """Say and hear nothing more, without being told of it."""
        port, self._port = self._port, None
        if port is not None:
            port.close()
