"""The memory areas of a node as other nodes see them: they leave copies of their snapshots here, and read what lies here.

A copy is a slot like any other: header, table, progress, payload with its crc32c. It is complete only once every chunk's crc
was computed again from what arrived, and its owner has said that it was not overwritten on the way. Two areas hold the copies
of one rank, so one is always whole while the other is filled; which of them must stay says whoever offers the next copy,
because it alone knows which step is whole on all ranks. It may know an older one than an attempt that has just begun: what that
one reads, no offer overwrites (`ftrain.checkpoint.area_lock`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ftrain.checkpoint.area_lock import AreaLock
from ftrain.checkpoint.arena import ArenaSlot, SlotState, SlotTable
from ftrain.checkpoint.names import PEER, is_peer, of_peer
from ftrain.checkpoint.peer_link import Describe, Described, Fine, Link, Offer, PeerError, Read, Refused, Request, Unchanged
from storage.pack import check

__all__ = ["PEER", "PeerAreas"]


@dataclass(frozen=True, slots=True, eq=False)
class Area:
    """One area: `lock` is among the threads of this process, `file` among processes and taken second."""

    slot: ArenaSlot
    file: AreaLock
    lock: threading.Lock = field(default_factory=threading.Lock)


class PeerAreas:
    """The areas of one node, its own and the copies of others. Safe to use from several threads."""

    def __init__(self) -> None:
        self._areas: dict[str, Area] = {}
        self._choosing = threading.Lock()
        self._lent: set[tuple[int, int]] = set()  # (attempt, step) of copies that are on their way to storage

    def adopt(self, name: str, fd: int) -> None:
        """Know an area."""
        self._areas[name] = Area(ArenaSlot(fd), AreaLock(fd))

    def drop(self, name: str) -> None:
        """Forget an area, after the work on it has ended."""
        area = self._areas.pop(name, None)
        if area is not None:
            with area.lock:
                area.slot.close()
                area.file.close()

    def forget_after(self, step: int) -> None:
        """Copies of later steps than the one the run goes on from mean nothing any more."""
        for name, area in list(self._areas.items()):
            with area.lock:
                if is_peer(name) and self._areas.get(name) and area.slot.header().step > step:
                    area.slot.forget()

    def lend(self, key: tuple[int, int], ranks: Sequence[int]) -> dict[str, ArenaSlot]:
        """The copies of these ranks' shares of a snapshot, by name; no offer overwrites them until they are taken back."""
        with self._choosing:
            self._lent.add(key)
        found: dict[str, ArenaSlot] = {}
        for name, area in list(self._areas.items()):
            with area.lock:  # whoever was let in before is done with it then
                if is_peer(name) and self._areas.get(name) and _key(area.slot) == key and area.slot.header().rank in ranks:
                    found[name] = area.slot
        return found

    def take_back(self, key: tuple[int, int]) -> None:
        """They may be overwritten again."""
        with self._choosing:
            self._lent.discard(key)

    def handle(self, link: Link, request: Request) -> None:
        """Answer one request of another node. Raises what its connection raises."""
        try:
            match request:
                case Offer():
                    self._receive(link, request)
                case Describe(area=area):
                    with self._held(area) as slot:
                        described = _described(slot)
                    link.send(described)
                case Read():
                    self._send(link, request)
                case Unchanged():
                    raise PeerError("unchanged, but nothing was offered")
        except PeerError as error:
            link.send(Refused(reason=str(error)))

    @contextlib.contextmanager
    def _held(self, name: str) -> Iterator[ArenaSlot]:
        area = self._areas.get(name)
        if area is None:
            raise PeerError(f"there is no memory area {name} here")
        with area.lock:
            if name not in self._areas:
                raise PeerError(f"memory area {name} was given back")
            yield area.slot

    def _send(self, link: Link, request: Read) -> None:
        with self._held(request.area) as slot:
            payload = slot.payload().data
            if request.start + request.nbytes > len(payload):
                raise PeerError(
                    f"area {request.area} has {len(payload)} bytes, asked for up to {request.start + request.nbytes}"
                )
            link.send(Fine())
            link.send_bytes(payload[request.start : request.start + request.nbytes])

    def _receive(self, link: Link, offer: Offer) -> None:
        """Take a copy in. If it breaks off or is damaged, the area is empty afterwards, and the other one is as it was."""
        with self._chosen(offer) as slot:
            table = msgspec.msgpack.decode(offer.table, type=SlotTable)
            try:
                payload = slot.prepare(table.layout())
            except ValueError as error:
                raise PeerError(str(error)) from error
            if payload.nbytes != offer.nbytes:
                raise PeerError(f"{offer.nbytes} bytes are offered, the table says {payload.nbytes}")
            slot.compress_with(offer.compressor)
            slot.begin(epoch=offer.epoch, attempt=offer.attempt, step=offer.step, rank=offer.rank, world=offer.world)
            link.send(Fine())
            try:
                link.receive_into(payload.data)
                damaged = check(payload, table.layout())
                if not isinstance(link.request(), Unchanged):
                    raise PeerError(f"the snapshot of step {offer.step} was overwritten while it was sent")
            except BaseException:
                slot.forget()
                raise
            if damaged:
                slot.forget()
                raise PeerError(f"{len(damaged)} chunks arrived damaged: {damaged[0].array}")
            slot.complete(offer.progress, upload=False)
            slot.mark_sealed(slot.header())
        link.send(Fine())

    @contextlib.contextmanager
    def _chosen(self, offer: Offer) -> Iterator[ArenaSlot]:
        """The area for a copy: not the one that must be kept, nor one that is read; of the others the same step's, else the
        oldest.
        """

        def age(area: Area) -> tuple[bool, int]:
            header = area.slot.header()
            same = (header.attempt, header.step) == (offer.attempt, offer.step)
            return (not same, header.step if header.state is SlotState.COMPLETE else -1)

        with self._choosing:
            found = [area for name, area in list(self._areas.items()) if is_peer(name) and of_peer(name) == offer.of]
            free = (area for area in found if (key := _key(area.slot)) is None or key not in {offer.keep, *self._lent})
            area = next((area for area in sorted(free, key=age) if self._take(area)), None)
            if area is None:
                raise PeerError(f"no memory area is free here for a copy of {offer.of} ({len(found)} are there)")
        try:
            yield area.slot
        finally:
            area.file.release()
            area.lock.release()

    def _take(self, area: Area) -> bool:
        if not area.lock.acquire(blocking=False):
            return False
        if area in list(self._areas.values()) and area.file.fill():
            return True
        area.lock.release()
        return False


def _key(slot: ArenaSlot) -> tuple[int, int] | None:
    header = slot.header()
    return (header.attempt, header.step) if header.state is SlotState.COMPLETE else None


def _described(slot: ArenaSlot) -> Described:
    header = slot.header()
    if header.state is not SlotState.COMPLETE:
        raise PeerError("the area holds no complete snapshot")
    slot.seal()
    return Described(
        epoch=header.epoch,
        attempt=header.attempt,
        step=header.step,
        rank=header.rank,
        world=header.world,
        table=msgspec.msgpack.encode(slot.table()),
        progress=msgspec.json.encode(slot.progress()),
    )
