"""What keepers of different nodes say to each other, and workers to keepers of other nodes: requests, and bytes of snapshots.

Mutual TLS by the run's key (recovery.identity), as the control plane has it, on a connection of its own: gigabytes must not
stand in front of a lease's renewal. Messages are msgpack frames against a closed union with a size cap; a payload follows its
message as bare bytes of a number that the message has said. Both ends wait for each other with a time limit: whoever is silent
for longer is given up, and what it was to bring counts as not there.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from ftrain.checkpoint.arena import ArenaSlot, SlotHeader
from recovery.identity import KEY_FILE, context
from recovery.rendezvous import Address, publish, read_address
from recovery.tls import tune
from storage.compress import Compressor
from storage.traffic import PACED_BYTES, traffic

PATIENCE_S = 30.0
"""Without a byte from the other end; it may be checking what it has received, which takes a second for several GiB."""
MAX_MESSAGE = 64 << 20
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


class Described(Message, frozen=True, kw_only=True):
    """A complete snapshot: whose, its table and its progress record."""

    epoch: int
    attempt: int
    step: int
    rank: int
    world: int
    table: bytes
    progress: bytes


class Offer(Described, frozen=True, kw_only=True):
    """A copy of a sealed snapshot is to be kept; its `nbytes` of payload follow once it was accepted."""

    of: str  # generation and rank: "g0000-r00001"
    compressor: Compressor | None = None  # on the way to storage, should this copy have to go there
    keep: tuple[int, int] | None  # (attempt, step) that must not be overwritten
    nbytes: int


class Unchanged(Message, frozen=True, kw_only=True):
    """What was offered was the same snapshot to the last byte; without this word it counts as not there."""


class Describe(Message, frozen=True, kw_only=True):
    """What lies in an area? It is sealed before the answer."""

    area: str


class Read(Message, frozen=True, kw_only=True):
    """Bytes of an area's payload; they follow the answer."""

    area: str
    start: int
    nbytes: int


class Fine(Message, frozen=True, kw_only=True):
    """Accepted, stored, or about to be sent."""


class Refused(Message, frozen=True, kw_only=True):
    """Not done, and why."""

    reason: str


Request = Offer | Unchanged | Describe | Read
Reply = Fine | Refused | Described
_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Request).decode
_reply = msgspec.msgpack.Decoder(Reply).decode


class PeerError(Exception):
    """The other end refused, is gone, or said something that makes no sense; the message is for people."""


class Link:
    """One end of a connection. Blocking, for one thread. Every method raises OSError or PeerError if the other end fails."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def send(self, message: Request | Reply) -> None:
        """A message, whole."""
        body = _encode(message)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def request(self) -> Request | None:
        """The next request; None at the end."""
        body = self._message()
        return _request(body) if body is not None else None

    def ask(self, message: Request) -> Reply:
        """Send a request and wait for its answer; a refusal is raised."""
        self.send(message)
        return self.answer()

    def answer(self) -> Reply:
        """The next answer; a refusal is raised."""
        body = self._message()
        if body is None:
            raise PeerError("the connection ended before the answer")
        reply = _reply(body)
        if isinstance(reply, Refused):
            raise PeerError(reply.reason)
        return reply

    def _message(self) -> bytes | None:
        head = bytearray(_LENGTH.size)
        if not self._fill(memoryview(head)):
            return None
        length = _LENGTH.unpack(head)[0]
        if length > MAX_MESSAGE:
            raise PeerError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE}")
        body = bytearray(length)
        self.receive_into(memoryview(body))
        return bytes(body)

    def send_bytes(self, view: memoryview) -> None:
        """A payload, within this process's cap on bytes in flight and its upload rate (storage.traffic)."""
        for start in range(0, len(view), PACED_BYTES):
            piece = view[start : start + PACED_BYTES]
            traffic.pace(len(piece))
            with traffic.hold(len(piece)):
                self._sock.sendall(piece)

    def receive_into(self, view: memoryview) -> None:
        """Exactly as many bytes as `view` has."""
        if not self._fill(view):
            raise PeerError("the connection ended in the middle of a message")

    def _fill(self, view: memoryview) -> bool:
        at = 0
        while at < len(view):
            got = self._sock.recv_into(view[at:])
            if not got:
                if at:
                    raise PeerError("the connection ended in the middle of a message")
                return False
            at += got
        return True

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


def folder_of(control: Path, node: str) -> Path:
    """Where the keeper of a node says how it is reached."""
    return control / "keepers" / node


def dial_keeper(control: Path, node: str) -> Link:
    """A connection to the keeper of `node`, both ends proven. OSError if nobody answers, IdentityError for a bad key file."""
    address = read_address(folder_of(control, node))
    sock = socket.create_connection((address.host, address.port), timeout=PATIENCE_S)
    try:
        tune(sock)
        return Link(context(control / KEY_FILE, server=False).wrap_socket(sock))
    except OSError:
        sock.close()
        raise


def open_door(control: Path, node: str, host: str) -> socket.socket:
    """A port for other nodes, published where they look for it."""
    listener = socket.create_server((host, 0), backlog=64)
    folder = folder_of(control, node)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    publish(folder, Address(host=host, port=listener.getsockname()[1], node=node))
    return listener


def serve_one(sock: socket.socket, tls: ssl.SSLContext, handle: Callable[[Link, Request], None]) -> None:
    """Answer the requests of one connection, to its end."""
    sock.settimeout(PATIENCE_S)
    tune(sock)
    with tls.wrap_socket(sock, server_side=True) as wrapped:
        link = Link(wrapped)
        while (request := link.request()) is not None:
            handle(link, request)


def offer_of(of: str, slot: ArenaSlot, header: SlotHeader, keep: tuple[int, int] | None) -> Offer:
    """The offer of the sealed snapshot in a slot."""
    return Offer(
        of=of,
        compressor=slot.compressor(),
        epoch=header.epoch,
        attempt=header.attempt,
        step=header.step,
        rank=header.rank,
        world=header.world,
        keep=keep,
        table=msgspec.msgpack.encode(slot.table()),
        progress=msgspec.json.encode(slot.progress()),
        nbytes=len(slot.payload().data),
    )
