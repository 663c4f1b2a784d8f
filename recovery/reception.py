"""Who may talk to the coordinator: agents and clients, told apart by their first frame.

On this machine they come through a Unix socket, and must be of the same user. From other machines they come over TLS, and must
hold the run's key (recovery.identity).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recovery.identity import context, make_identity
from recovery.loop import Loop, Port
from recovery.messages import AgentHello, ClientReply, ClientRequest, Ping, ToCoordinator
from recovery.rendezvous import Address, publish
from recovery.spec import FleetSpec
from recovery.tls import tls_channel
from recovery.wire import Channel, Frame, channel, listen, peer_uid

log = logging.getLogger(__name__)

MAX_GUESTS = 64
MAX_REMOTE_GUESTS = 2048  # hundreds of nodes may knock at once, and each takes a moment to prove who it is
GUEST_LIMIT_S = 30.0
PAUSE_S = 1.0

Enter = Callable[[socket.socket], Channel[Any] | None]
"""Makes a channel of an accepted socket, or closes it."""


class Reception:
    """The coordinator's listeners, and those who have not yet been handed on."""

    def __init__(
        self, loop: Loop, on_agent: Callable[[Port, AgentHello], None], on_client: Callable[[ClientRequest], ClientReply | None]
    ) -> None:
        """Nobody can come in yet. Clients whom `on_client` gives no answer are asked in again when the run is ours."""
        self._loop = loop
        self._on_agent = on_agent
        self._on_client = on_client
        self._guests: set[Port] = set()
        self._doors: list[_Door] = []
        self._path: Path | None = None
        self._early: list[tuple[Port, AgentHello | ClientRequest]] | None = []

    def listen(self, path: Path) -> None:
        """Let in processes of this machine and user, by a Unix socket at `path`."""
        self._path = path
        self._doors.append(_Door(self._loop, listen(path), _enter_here, self._guest, MAX_GUESTS))

    def listen_to_nodes(self, spec: FleetSpec, *, node: str) -> None:
        """Let in whoever holds the run's key, and say where in the folder that all nodes see. OSError if the port is taken."""
        secured = context(make_identity(spec.control), server=True)
        listener = socket.create_server((spec.host, spec.port), backlog=4096)
        listener.setblocking(False)

        def enter(sock: socket.socket) -> Channel[Any] | None:
            try:
                return tls_channel(sock, secured, ToCoordinator, server=True)
            except OSError:  # it has hung up already
                return None

        self._doors.append(_Door(self._loop, listener, enter, self._guest, MAX_REMOTE_GUESTS))
        publish(spec.control, Address(host=spec.host, port=listener.getsockname()[1], node=node))

    def open(self) -> None:
        """The run is ours: whoever came before is met now."""
        early, self._early = self._early or [], None
        for port, message in early:
            if not port.closed:
                self._meet(port, message)

    def ping(self) -> None:
        """The run is not ours yet, and storage may be slow to say so: agents that an earlier coordinator left behind keep their
        workers for as long as they hear from somebody.
        """
        for port, message in self._early or ():
            if isinstance(message, AgentHello):
                port.send(Ping())

    def _guest(self, made: Channel[Any]) -> Port:
        port = Port(self._loop, made, lambda frame: self._frame(port, frame), lambda: self._gone(port))
        self._guests.add(port)
        self._loop.after(GUEST_LIMIT_S, lambda: self._show_out(port))
        return port

    def _show_out(self, port: Port) -> None:
        if port in self._guests:
            self._gone(port)
            port.close()

    def _gone(self, port: Port) -> None:
        self._guests.discard(port)
        for door in self._doors:
            door.guests.discard(port)

    def _frame(self, port: Port, frame: Frame[Any]) -> None:
        match frame.message:
            case AgentHello() as message if self._early is not None:
                self._gone(port)
                self._early.append((port, message))
            case AgentHello() | ClientRequest() as message:
                self._meet(port, message)
            case other:
                log.warning("unexpected %s from a stranger", type(other).__name__)
                self._gone(port)
                port.close()

    def _meet(self, port: Port, message: AgentHello | ClientRequest) -> None:
        if isinstance(message, AgentHello):
            self._gone(port)
            self._on_agent(port, message)
        elif (answer := self._answer(message)) is not None:
            port.send(answer)
        elif self._early is not None:
            self._early.append((port, message))

    def _answer(self, request: ClientRequest) -> ClientReply | None:
        try:
            return self._on_client(request)
        except Exception as error:  # a client's question must never end the run
            log.exception("request %s failed", request.kind)
            return ClientReply(ok=False, error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Hang up on everybody and free the path."""
        for port in list(self._guests):
            port.close()
        for door in self._doors:
            door.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


class _Door:
    """One listening socket."""

    def __init__(
        self, loop: Loop, listener: socket.socket, enter: Enter, guest: Callable[[Channel[Any]], Port], limit: int
    ) -> None:
        self._loop, self._listener, self._enter, self._guest, self._limit = loop, listener, enter, guest, limit
        self.guests: set[Port] = set()
        self._open()

    def _open(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: do not spin on a caller that cannot be let in
            log.error("cannot accept a connection: %s", error)
            self._loop.remove(self._listener.fileno())
            self._loop.after(PAUSE_S, self._open)
            return
        made = self._enter(sock) if len(self.guests) < self._limit else None
        if made is None:
            sock.close()
            return
        self.guests.add(self._guest(made))

    def close(self) -> None:
        self._loop.remove(self._listener.fileno())
        self._listener.close()


def _enter_here(sock: socket.socket) -> Channel[Any] | None:
    return channel(sock, ToCoordinator) if peer_uid(sock) in (0, os.getuid()) else None
