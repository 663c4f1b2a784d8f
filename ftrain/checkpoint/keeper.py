"""The keeper: a torch-free process that seals snapshots and streams them to storage while training goes on.

It holds nothing that it could not find again: the slots are the agent's memfds and describe themselves, so a keeper
that dies is simply replaced, and the new one looks through the headers for what storage is still owed. It also
outlives the workers: a snapshot that was complete when its worker died is still stored, within the epoch in which it
was taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ftrain.checkpoint.arena import ArenaSlot, SlotHeader, SlotState, Upload
from ftrain.checkpoint.memory import pack_manifest
from ftrain.checkpoint.messages import KeeperMessage, PackFailed, PackStored, Settled
from storage.digest import digest_part
from storage.keys import pack_name, step_folder
from storage.objects import ObjectStore

BLOCK_NBYTES = 4 * 2**20
THREADS = 2  # seal or stream two ranks' slots at once; more would only take cores from training


class Pacer:
    """Holds a stream of bytes to a rate, shared by all uploads of this process."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` 0 means no limit."""
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self, nbytes: int) -> None:
        """Sleep until `nbytes` more may pass."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._next)
            self._next = begin + nbytes / self._rate
        time.sleep(max(0.0, begin - now))


class Keeper:
    """Seals every complete snapshot, stores those that are wanted, and says what came of it."""

    def __init__(
        self,
        store: Callable[[], ObjectStore],
        send: Callable[[KeeperMessage], None],
        *,
        bytes_per_s: float = 0.0,
        reached: Callable[[str, int], None] = lambda point, step: None,
    ) -> None:
        """`store` opens the run's store, on first use: a keeper that only seals needs none. `send` must be thread-safe."""
        self._open, self._send, self._reached = store, send, reached
        self._store: ObjectStore | None = None
        self._pacer = Pacer(bytes_per_s)
        self._slots: dict[str, ArenaSlot] = {}
        self._answers: dict[str, KeeperMessage] = {}
        self._busy: dict[str, threading.Lock] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="keeper")

    def adopt(self, name: str, fd: int) -> None:
        """Take a slot; if it holds a complete snapshot, whatever is owed for it is done."""
        self._slots[name] = ArenaSlot(fd)
        self._busy[name] = threading.Lock()
        self.snapshot_ready(name)

    def drop(self, name: str) -> None:
        """Forget a slot, after the work on it has ended."""
        with self._busy.pop(name):
            self._slots.pop(name).close()

    def snapshot_ready(self, name: str) -> None:
        """Queue what a slot needs. Returns at once; safe to repeat."""
        if name in self._slots and self._slots[name].header().state is SlotState.COMPLETE:
            self._pool.submit(self._serve, name)

    def settled(self, message: Settled) -> None:
        """A step needs nothing more: its slots may be filled again."""
        for name, slot in self._slots.items():
            header = slot.header()
            if (header.attempt, header.step) == (message.attempt, message.step):
                self._answers.pop(name, None)
                slot.upload_ended()

    def resend(self) -> None:
        """Say again what came of each slot that is not settled."""
        for answer in list(self._answers.values()):
            self._send(answer)

    def close(self) -> None:
        """Finish everything queued, then return."""
        self._pool.shutdown(wait=True)

    def _serve(self, name: str) -> None:
        lock = self._busy.get(name)
        if lock is None:
            return
        with lock:
            slot = self._slots[name]
            header = slot.header()
            if header.state is not SlotState.COMPLETE:
                return
            slot.seal()
            if header.upload is Upload.WANTED and not self._answered(name, header):
                self._answers[name] = self._store_slot(slot, header)
                self._send(self._answers[name])

    def _answered(self, name: str, header: SlotHeader) -> bool:
        answer = self._answers.get(name)
        return answer is not None and (answer.epoch, answer.attempt, answer.step) == (header.epoch, header.attempt, header.step)

    def _store_slot(self, slot: ArenaSlot, header: SlotHeader) -> KeeperMessage:
        begin = time.monotonic()
        key = step_folder(header.step) + pack_name(header.epoch, header.attempt, header.rank)
        identity = {
            "epoch": header.epoch,
            "attempt": header.attempt,
            "step": header.step,
            "rank": header.rank,
            "world": header.world,
        }
        try:
            digests = slot_digests(slot)
            self._run_store().put_stream(key, self._blocks(slot, header.step))
        except Exception as error:  # whatever it is, the coordinator must hear of it: a thread's error has no other listener
            return PackFailed(**identity, reason=f"{type(error).__name__}: {error}")
        manifest = pack_manifest(slot, key.rsplit("/", 1)[1], digests)
        return PackStored(**identity, manifest=manifest, progress=slot.progress(), seconds=time.monotonic() - begin)

    def _run_store(self) -> ObjectStore:
        if self._store is None:
            self._store = self._open()
        return self._store

    def _blocks(self, slot: ArenaSlot, step: int) -> Iterator[memoryview]:
        payload = slot.payload().data
        for start in range(0, len(payload), BLOCK_NBYTES):
            block = payload[start : start + BLOCK_NBYTES]
            self._pacer.wait(len(block))
            yield block
            self._reached("upload", step)


def slot_digests(slot: ArenaSlot) -> dict[str, int]:
    """This slot's share of each array's layout-free digest, modulo 2**64."""
    table, payload = slot.table(), slot.payload()
    specs = {spec.name: spec for spec in table.specs}
    digests = dict.fromkeys(specs, 0)
    for part in table.parts:
        digests[part.array] = (digests[part.array] + digest_part(payload, specs[part.array], part)) % 2**64
    return digests
