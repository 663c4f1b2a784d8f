"""Who may talk to the coordinator: the agent and clients of the same user, told apart by their first frame."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recovery.loop import Loop, Port
from recovery.messages import AgentHello, ClientReply, ClientRequest, ToCoordinator
from recovery.wire import Frame, channel, listen, peer_uid

log = logging.getLogger(__name__)

MAX_GUESTS = 64
GUEST_LIMIT_S = 30.0
PAUSE_S = 1.0


class Reception:
    """The coordinator's listener and those who have not yet been handed on."""

    def __init__(
        self,
        loop: Loop,
        path: Path,
        on_agent: Callable[[Port, AgentHello], None],
        on_client: Callable[[ClientRequest], ClientReply],
    ) -> None:
        """Listen at once."""
        self._loop = loop
        self._path = path
        self._on_agent = on_agent
        self._on_client = on_client
        self._guests: set[Port] = set()
        self._listener = listen(path)
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
        if len(self._guests) >= MAX_GUESTS or not _welcome(sock):
            sock.close()
            return
        port = Port(self._loop, channel(sock, ToCoordinator), lambda frame: self._frame(port, frame), lambda: self._gone(port))
        self._guests.add(port)
        self._loop.after(GUEST_LIMIT_S, lambda: self._show_out(port))

    def _show_out(self, port: Port) -> None:
        if port in self._guests:
            self._guests.discard(port)
            port.close()

    def _gone(self, port: Port) -> None:
        self._guests.discard(port)

    def _frame(self, port: Port, frame: Frame[Any]) -> None:
        match frame.message:
            case AgentHello() as hello:
                self._guests.discard(port)
                self._on_agent(port, hello)
            case ClientRequest() as request:
                port.send(self._answer(request))
            case other:
                log.warning("unexpected %s from a stranger", type(other).__name__)
                self._guests.discard(port)
                port.close()

    def _answer(self, request: ClientRequest) -> ClientReply:
        try:
            return self._on_client(request)
        except Exception as error:  # a client's question must never end the run
            log.exception("request %s failed", request.kind)
            return ClientReply(ok=False, error=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Hang up on everybody and free the path."""
        for port in list(self._guests):
            port.close()
        self._loop.remove(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _welcome(sock: socket.socket) -> bool:
    return peer_uid(sock) in (0, os.getuid())
