"""The same frames over TLS, for agents and clients on other machines.

A channel is a channel: only the two calls that touch the socket differ, and no descriptor can travel. The handshake is not a
phase of its own: the first read or write carries it on, so neither end ever waits for a peer that says nothing.
"""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from recovery.wire import MAX_FRAME, READ_SIZE, Channel, Outgoing, WireError

T = TypeVar("T")

USER_TIMEOUT_MS = 30_000  # unacknowledged bytes for so long: the connection is dead, whatever the kernel still hopes


@dataclass(slots=True)
class TlsChannel(Channel[T]):
    """A channel whose socket is an SSLSocket. Not thread-safe, as every channel."""

    by_peer: bool = False
    """Whether the other end's machine ended it: the process is dead, or has hung up. False after a mere silence."""

    def _send_some(self, item: Outgoing) -> int:
        if item.fds:
            raise WireError("descriptors cannot travel between machines")
        try:
            return self.sock.send(item.data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError(errno.EAGAIN, "not now") from error
        except (BrokenPipeError, ConnectionResetError):
            self.by_peer = True
            raise

    def _fill(self) -> bool:
        """Read once; True if there may be more: bytes that TLS has already taken from the socket wake no selector."""
        try:
            data = self.sock.recv(READ_SIZE)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError, InterruptedError):
            return False
        except OSError as error:  # a failed handshake too: whoever that was, it is not of this run
            self.by_peer = self.by_peer or isinstance(error, ConnectionResetError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
            self.close()
            return False
        if not data:
            self.by_peer = True
            self.close()
            return False
        self._in += data
        self._parse()
        return True


def tls_channel(sock: socket.socket, context: ssl.SSLContext, messages: Any, *, server: bool) -> TlsChannel[Any]:
    """A channel over the connected TCP socket `sock`, which it owns from now on; the handshake has not been made yet."""
    tune(sock)
    wrapped = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False)
    return TlsChannel(wrapped, msgspec.msgpack.Decoder(messages), max_frame=MAX_FRAME)


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a peer that vanished is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def dial(host: str, port: int, context: ssl.SSLContext, messages: Any, *, limit_s: float) -> TlsChannel[Any]:
    """Connect and shake hands, waiting at most `limit_s` for each; OSError (ssl.SSLError is one) if it does not work out."""
    sock = socket.create_connection((host, port), timeout=limit_s)
    try:
        made = tls_channel(sock, context, messages, server=False)
    except OSError:
        sock.close()
        raise
    try:
        made.sock.settimeout(limit_s)
        made.sock.do_handshake()  # type: ignore[attr-defined]  # an SSLSocket
        made.sock.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
