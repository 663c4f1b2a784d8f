"""The keeper's share of the peer tier: copies of this node's snapshots go to its buddy, copies of another node's are kept here.

The coordinator names the step that is copied next, one at a time, and which steps must stay (KeepSnapshots): the newest that is
whole on all buddies, and the one on its way. Their slots are held, so that after the loss of a node what the survivors hold
themselves is of the same step as the copies. A slot is held by its own header, which the worker reads before it fills one; if
the worker was faster, the copy is given up, on the other node too, and a later step's will be made.

A push has its own threads: storage may be slow for minutes, and a copy must not wait behind it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from ftrain.checkpoint.arena import ArenaSlot, SlotHeader, SlotState
from ftrain.checkpoint.messages import (
    Buddies,
    CopyFailed,
    KeeperMessage,
    KeepSnapshots,
    PeerCopied,
    Settled,
    StoreSnapshot,
)
from ftrain.checkpoint.names import area_name, is_peer, of_peer
from ftrain.checkpoint.peer_areas import PeerAreas
from ftrain.checkpoint.peer_link import PeerError, Unchanged, dial_keeper, offer_of, open_door, serve_one
from recovery.identity import KEY_FILE, IdentityError, context

log = logging.getLogger(__name__)

THREADS = 2  # pushes at a time; more would only share the same link
CONNECTIONS = 64  # served at a time; the next one waits

Key = tuple[int, int]
"""(attempt, step) of a snapshot."""


class Peers:
    """Of one node's keeper. Its main thread calls; pushes and other nodes' requests have threads of their own."""

    def __init__(self, *, node: str, control: Path, host: str, send: Callable[[KeeperMessage], None]) -> None:
        """Opens the door to other nodes. `send` must be thread-safe. Raises IdentityError or OSError if it cannot."""
        self._node, self._control, self._send = node, control, send
        self._own: dict[str, ArenaSlot] = {}
        self._busy: dict[str, threading.Lock] = {}
        self._kept: set[Key] = set()
        self._keep: Key | None = None
        self._buddy = ""
        self._answers: dict[str, PeerCopied | CopyFailed] = {}
        self._under_way: set[str] = set()
        self._areas = PeerAreas()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="peer")
        self._room = threading.Semaphore(CONNECTIONS)
        self._tls = context(control / KEY_FILE, server=True)
        self._door = open_door(control, node, host)
        threading.Thread(target=self._serve, name="peer door", daemon=True).start()

    # areas

    def adopt(self, name: str, fd: int) -> None:
        """Know an area, of this node's own ranks or for copies."""
        self._areas.adopt(name, fd)
        if not is_peer(name):
            self._own[name], self._busy[name] = ArenaSlot(fd), threading.Lock()

    def drop(self, name: str) -> None:
        """Forget an area, after the work on it has ended."""
        self._areas.drop(name)
        lock = self._busy.pop(name, None)
        if lock is not None:
            with lock:
                self._answers.pop(name, None)
                self._own.pop(name).close()

    # what the coordinator says

    def buddies(self, message: Buddies) -> None:
        """Who keeps whose copies: each node's are with the next one of the ring."""
        ring = message.ring
        self._buddy = ring[(ring.index(self._node) + 1) % len(ring)] if self._node in ring and len(ring) > 1 else ""

    def keep(self, message: KeepSnapshots) -> None:
        """Which snapshots must stay, and which is to be copied now. Safe to repeat."""
        self._keep = message.keep
        self._kept = {key for key in (message.keep, message.copy) if key is not None}
        if message.forget_after is not None:
            self._areas.forget_after(message.forget_after)
        self._hold()
        if message.copy is not None:
            self._copy(message.copy)

    def lend(self, wanted: StoreSnapshot) -> dict[str, ArenaSlot]:
        """The copies here of a snapshot that is to go to storage, of lost nodes' ranks. They stay until it is settled."""
        return self._areas.lend((wanted.attempt, wanted.step), wanted.copies_of) if wanted.copies_of else {}

    def settled(self, message: Settled) -> None:
        """Nobody needs the copies of this snapshot for storage any more."""
        self._areas.take_back((message.attempt, message.step))

    def _hold(self) -> None:
        for slot in self._own.values():
            header = slot.header()
            if header.state is SlotState.COMPLETE:
                slot.hold(_key(header) in self._kept)

    def _copy(self, key: Key) -> None:
        """Push what is here of a snapshot: each rank of this node has one slot with it, or has lost it."""
        newest = max((area_name(name).generation for name in self._own), default=0)
        ranks = {area_name(name).rank for name in self._own if area_name(name).generation == newest}
        for name, slot in list(self._own.items()):
            header = slot.header()
            if header.state is not SlotState.COMPLETE or _key(header) != key:
                continue
            ranks.discard(header.rank)
            known = self._answers.get(name)
            if known is not None and (known.attempt, known.step) == key:
                self._send(known)
            elif name not in self._under_way:
                self._under_way.add(name)
                self._pool.submit(self._push, name, header)
        for rank in ranks:
            self._send(self._failed(key, rank, "its snapshot was overwritten before"))

    def _failed(self, key: Key, rank: int, reason: str) -> CopyFailed:
        return CopyFailed(attempt=key[0], step=key[1], rank=rank, node=self._node, reason=reason)

    # pushes

    def _push(self, name: str, header: SlotHeader) -> None:
        begin, key = time.monotonic(), _key(header)
        try:
            with self._busy[name]:
                nbytes = self._transfer(self._own[name], name, header)
        except Exception as error:  # whatever it is, the coordinator must hear of it: a thread's error has no other listener
            reason = f"{error}" if isinstance(error, PeerError) else f"{type(error).__name__}: {error}"
            answer: PeerCopied | CopyFailed = self._failed(key, header.rank, reason)
        else:
            self._answers[name] = answer = PeerCopied(
                epoch=header.epoch,
                attempt=header.attempt,
                step=header.step,
                rank=header.rank,
                world=header.world,
                nbytes=nbytes,
                seconds=time.monotonic() - begin,
                buddy=self._buddy,
            )
        self._under_way.discard(name)
        self._send(answer)

    def _transfer(self, slot: ArenaSlot, name: str, header: SlotHeader) -> int:
        if not self._buddy:
            raise PeerError("there is no other node to keep a copy")
        slot.seal()
        payload = slot.payload().data
        link = dial_keeper(self._control, self._buddy)
        try:
            link.ask(offer_of(of_peer(name), slot, header, self._keep))
            link.send_bytes(payload)
            now = slot.header()
            if (now.state, now.snapshot) != (header.state, header.snapshot):
                raise PeerError("its snapshot was overwritten meanwhile")
            link.ask(Unchanged())
        finally:
            link.close()
        return len(payload)

    # the door

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._door.accept()
            except OSError:
                return  # closed
            self._room.acquire()
            threading.Thread(target=self._guest, args=(sock,), name="peer guest", daemon=True).start()

    def _guest(self, sock: socket.socket) -> None:
        try:
            serve_one(sock, self._tls, self._areas.handle)
        except (OSError, PeerError, IdentityError, msgspec.DecodeError) as error:
            log.warning("a connection of another node ends: %s", error)
        finally:
            self._room.release()

    def close(self) -> None:
        """Finish nothing: a copy that is under way is of no use to a run that is over."""
        with suppress(OSError):
            self._door.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _key(header: SlotHeader) -> Key:
    return header.attempt, header.step
