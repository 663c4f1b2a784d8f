"""Frames between the processes of a run: length-prefixed msgspec messages that may carry file descriptors.

Why not pickle, multiprocessing or gRPC: a frame is decoded against a closed set of types with a size cap, so a broken or
hostile peer can at worst be disconnected; descriptors (arenas, logs, the rendezvous listener) travel by SCM_RIGHTS, because
inheriting them would leak them into every later child.

A frame is `length: u32, descriptors: u32` (little endian), then a msgpack body. Descriptors are attached to the first byte of
their frame and never shared between frames, so the n-th frame that announces k of them owns the next k received.

Sockets live in a 0700 folder with mode 0600 and accept only peers of the same user. A Unix socket's path is limited to 107
bytes; `listen` and `connect` reach the folder through `/proc/self/fd`, so a run's folder may be as deep as it likes.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

HEADER = struct.Struct("<II")
MAX_FRAME = 64 << 20
MAX_DESCRIPTORS = 200
MAX_QUEUED = 256 << 20
MAX_TOGETHER = 64  # frames of one system call
READ_SIZE = 1 << 16
MAX_LAST_READS = 4096  # of a peer that is gone: more than any socket holds
ANCILLARY_SIZE = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)  # as plain numbers: each call would make the enum anew
SEND_FLAGS = int(socket.MSG_NOSIGNAL)
CONNECT_LIMIT_S = 1.0

T = TypeVar("T")


class WireError(Exception):
    """A peer broke the protocol, or cannot be reached; the connection is of no further use."""


@dataclass(frozen=True, slots=True)
class Frame(Generic[T]):
    """One received message and the descriptors that came with it (the receiver owns and closes them)."""

    message: T
    fds: tuple[int, ...] = ()


@dataclass(slots=True)
class Outgoing:
    """Bytes not yet sent; `fds` are duplicates of our own, closed once the first byte is on its way."""

    data: memoryview
    fds: tuple[int, ...] = ()


@dataclass(slots=True)
class Channel(Generic[T]):
    """A connected stream socket that speaks frames of one closed union of message types.

    Non-blocking for the event loops of agent and coordinator (`send` queues, `flush` and `read` when the selector says so);
    `receive` waits, for processes that have nothing else to do. Not thread-safe.
    """

    sock: socket.socket
    decoder: msgspec.msgpack.Decoder[T]
    encoder: msgspec.msgpack.Encoder = field(default_factory=msgspec.msgpack.Encoder)
    max_frame: int = MAX_FRAME
    closed: bool = False
    queued_bytes: int = 0
    _out: deque[Outgoing] = field(default_factory=deque)
    _in: bytearray = field(default_factory=bytearray)
    _fds: deque[int] = field(default_factory=deque)
    _ready: deque[Frame[T]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Make the socket non-blocking: a stuck peer must never stop a supervisor."""
        self.sock.setblocking(False)

    def fileno(self) -> int:
        """Descriptor for a selector."""
        return self.sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether frames are queued that the socket did not take yet."""
        return bool(self._out) and not self.closed

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Queue a frame and send what the socket takes now. Silently drops it if the peer is gone (`closed` says so)."""
        self.queue(message, fds)
        self.flush()

    def queue(self, message: object, fds: Sequence[int] = ()) -> None:
        """Queue a frame; it leaves with the next `flush`."""
        if self.closed:
            return
        body = self.encoder.encode(message)
        if len(body) > self.max_frame:
            raise WireError(
                f"message {type(message).__name__} of {len(body)} bytes is over the frame limit of {self.max_frame}"
            )
        if len(fds) > MAX_DESCRIPTORS:
            raise WireError(f"{len(fds)} descriptors in one frame, at most {MAX_DESCRIPTORS}")
        data = HEADER.pack(len(body), len(fds)) + body
        self.queued_bytes += len(data)
        self._out.append(Outgoing(memoryview(data), tuple(os.dup(fd) for fd in fds)))
        if self.queued_bytes > MAX_QUEUED:
            self.close()

    def flush(self) -> None:
        """Send queued bytes until the socket is full. If the peer is gone, what it said before can still be read."""
        while self._out and not self.closed:
            try:
                sent = self._send_some(self._out[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._take_last_words()
                self.close()
                return
            self._sent(sent)

    def _take_last_words(self) -> None:
        with contextlib.suppress(WireError):
            for _ in range(MAX_LAST_READS):
                if self.closed or not (self._fill() or (not self.closed and wait_readable(self.fileno(), 0.0))):
                    return

    def _sent(self, nbytes: int) -> None:
        """So much of the front of the queue is on its way."""
        self.queued_bytes -= nbytes
        while nbytes:
            item = self._out[0]
            part = min(nbytes, len(item.data))
            item.data = item.data[part:]
            nbytes -= part
            if not item.data:
                self._out.popleft()

    def _send_some(self, item: Outgoing) -> int:
        """From the front: a frame with descriptors alone, others together, as one system call."""
        if not item.fds:
            plain = itertools.takewhile(lambda it: not it.fds, itertools.islice(self._out, MAX_TOGETHER))
            return self.sock.sendmsg([it.data for it in plain], [], SEND_FLAGS)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", item.fds))]
        sent = self.sock.sendmsg([item.data], rights, SEND_FLAGS)
        close_all(item.fds)
        item.fds = ()
        return sent

    def read(self) -> list[Frame[T]]:
        """All frames that have arrived; at the end of the stream `closed` becomes true, after the last frames were returned."""
        while not self.closed and self._fill():
            pass
        frames = list(self._ready)
        self._ready.clear()
        return frames

    def receive(self, timeout_s: float | None = None) -> Frame[T] | None:
        """The next frame, waiting for it; None at the end of the stream or when the time is up (see `closed`)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready and not self.closed:
            self.flush()
            if self.fileno() < 0:  # the peer is gone, and that was noticed by writing
                break
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0 and not wait_readable(self.fileno(), 0.0):
                return None
            if wait_readable(self.fileno(), left):
                self._fill()
        return self._ready.popleft() if self._ready else None

    def drain(self, timeout_s: float, *, full: Callable[[], None] = lambda: None) -> bool:
        """Wait until everything queued is sent; False if the peer is gone or the time is up.

        `full` is called whenever the socket takes no more: the peer may have to be told that it must read.
        """
        deadline = time.monotonic() + timeout_s
        while self.wants_write and time.monotonic() < deadline:
            full()
            wait_writable(self.fileno(), max(0.0, deadline - time.monotonic()))
            self.flush()
        return not self._out and not self.closed

    def _fill(self) -> bool:
        """Read once; True if there may be more."""
        try:
            data, ancillary, flags, _ = self.sock.recvmsg(READ_SIZE, ANCILLARY_SIZE, RECEIVE_FLAGS)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.close()
            return False
        self._fds.extend(received_fds(ancillary))
        if flags & socket.MSG_CTRUNC:
            self._fail("descriptors were cut off (the limit of open files?)")
        if not data:
            self.close()
            return False
        self._in += data
        self._parse()
        return len(data) == READ_SIZE

    def _parse(self) -> None:
        start = 0
        while len(self._in) - start >= HEADER.size:
            length, count = HEADER.unpack_from(self._in, start)
            if length > self.max_frame or count > MAX_DESCRIPTORS:
                self._fail(f"a frame of {length} bytes with {count} descriptors is over the limit of {self.max_frame}")
            stop = start + HEADER.size + length
            if len(self._in) < stop:
                break
            body = bytes(self._in[start + HEADER.size : stop])
            start = stop
            self._ready.append(Frame(self._decode(body), self._take(count)))
        del self._in[:start]

    def _decode(self, body: bytes) -> T:
        try:
            return self.decoder.decode(body)
        except msgspec.DecodeError as error:
            self._fail(f"not a message of this protocol: {error}")
            raise

    def _take(self, count: int) -> tuple[int, ...]:
        if count > len(self._fds):
            self._fail(f"{count} descriptors announced, {len(self._fds)} received")
        return tuple(self._fds.popleft() for _ in range(count))

    def _fail(self, reason: str) -> None:
        self.close()
        raise WireError(reason)

    def close(self) -> None:
        """Close the socket and every descriptor in flight; frames already read stay readable."""
        if self.closed:
            return
        self.closed = True
        self.sock.close()
        for item in self._out:
            close_all(item.fds)
        self._out.clear()
        close_all(self._fds)
        self._fds.clear()


def received_fds(ancillary: Sequence[tuple[int, int, bytes]]) -> Iterator[int]:
    """The descriptors in recvmsg's ancillary data."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            yield from fds


def close_all(fds: Sequence[int] | deque[int]) -> None:
    """Close descriptors, whatever state they are in."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def wait_readable(fd: int, timeout_s: float | None) -> bool:
    """Whether `fd` has bytes or its end within the time."""
    return _poll(fd, write=False, timeout_s=timeout_s)


def wait_writable(fd: int, timeout_s: float | None) -> bool:
    """Whether `fd` takes bytes within the time."""
    return _poll(fd, write=True, timeout_s=timeout_s)


def _poll(fd: int, *, write: bool, timeout_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT if write else select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0, round(timeout_s * 1000 + 0.499))))


def channel(sock: socket.socket, messages: Any, *, max_frame: int = MAX_FRAME) -> Channel[Any]:
    """A channel that accepts the union `messages` and nothing else."""
    return Channel(sock, msgspec.msgpack.Decoder(messages), max_frame=max_frame)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of Unix stream sockets, both close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """The same path in a few bytes, whatever the folder's depth."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, mode 0600, replacing whatever stood there (the caller owns the folder)."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o177)
        try:
            with short_path(path) as name:
                sock.bind(name)
        finally:
            os.umask(mask)
        sock.listen(64)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise WireError(f"cannot listen at {path}: {error.strerror}; run.local_dir must be on a local disk") from error
    return sock


def connect(path: Path) -> socket.socket:
    """A connection to the listener at `path`; OSError if there is none, or if it takes nobody in."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_LIMIT_S)
    try:
        with short_path(path) as name:
            sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


def peer_uid(sock: socket.socket) -> int:
    """User of the process at the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
