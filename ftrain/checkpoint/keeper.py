"""The keeper: a torch-free process that seals snapshots and streams them to storage while training goes on.

It holds nothing that it could not find again: the slots are the agent's memfds and describe themselves, so a keeper
that dies is simply replaced, and the new one looks through the headers for what storage is still owed. It also
outlives the workers: a snapshot that was complete when its worker died is still stored, within the epoch in which it
was taken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from ftrain.checkpoint.arena import ArenaSlot, SlotHeader, SlotState, Upload
from ftrain.checkpoint.memory import pack_manifest
from ftrain.checkpoint.messages import Answer, KeeperMessage, Owed, PackFailed, PackStored, Settled, Share, StoreSnapshot
from ftrain.checkpoint.names import is_peer
from ftrain.checkpoint.stream import SlotStream
from storage.errors import NoSpace
from storage.keys import pack_name, step_folder
from storage.objects import ObjectStore

THREADS = 2  # seal or stream two ranks' slots at once; more would only take cores from training
ROOM_TRIES = 2  # of a save that found no room: what one rank frees another may take, but what is freed may be too little


class Turn:
    """Whose turn it is at a slot: one thread serves it; what is announced meanwhile is looked at by the same thread afterwards,
    so that no other one waits for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._serving, self._again, self._over = False, False, False

    def begin(self) -> bool:
        """Whether the caller is to serve; if not, somebody else will."""
        with self._changed:
            mine = not (self._serving or self._over)
            self._serving, self._again = self._serving or mine, not mine
            return mine

    def again(self) -> bool:
        """Whether whoever serves is to look again; if not, its turn has ended."""
        with self._changed:
            again, self._again = self._again and not self._over, False
            self._serving = again
            self._changed.notify_all()
            return again

    def end(self) -> None:
        """Let nobody begin any more, and wait until nobody serves."""
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: not self._serving)


class Keeper:
    """Seals every complete snapshot, stores those that are wanted, and says what came of it."""

    def __init__(
        self,
        store: Callable[[], ObjectStore],
        send: Callable[[KeeperMessage], None],
        *,
        local: Callable[[], ObjectStore] | None = None,
        local_every: int = 0,
        reached: Callable[[str, int], None] = lambda point, step: None,
        make_room: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """`store` opens the run's store, on first use: a keeper that only seals needs none. `send` must be thread-safe.

        `local` opens the local tier's, which gets every snapshot whose step is a multiple of `local_every`, and gets it as it
        is: it is no slow link. What goes to the run's store is compressed as its slot says. `make_room`: asked, with its step,
        when there was no room in the run's store for a pack: whether it is worth another try.
        """
        self._send, self._reached, self._make_room = send, reached, make_room
        self._open = {"storage": store, "local": local or store}
        self._local_every = local_every if local else 0
        self._stores: dict[str, ObjectStore] = {}
        self._retries = 0
        self._opening = threading.Lock()
        self._slots: dict[str, ArenaSlot] = {}
        self._answers: dict[str, Answer] = {}
        self._turns: dict[str, Turn] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="keeper")

    def adopt(self, name: str, fd: int) -> None:
        """Take a slot; if it holds a complete snapshot, whatever is owed for it is done."""
        self._slots[name] = ArenaSlot(fd)
        self._turns[name] = Turn()
        self.snapshot_ready(name)

    def drop(self, name: str) -> None:
        """Forget a slot, after the work on it has ended. An unknown name is fine: every node is told of all of them."""
        turn = self._turns.pop(name, None)
        if turn is None:
            return
        turn.end()
        slot = self._slots.pop(name)
        if not is_peer(name):
            slot.close()
        for key in (name, f"{name} local"):
            self._answers.pop(key, None)  # nobody will settle it any more: it must not be said to the next coordinator

    def snapshot_ready(self, name: str) -> None:
        """Queue what a slot needs, which may be on its way into it still. Returns at once; safe to repeat."""
        if name in self._slots and self._slots[name].header().state is not SlotState.EMPTY:
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
        self._tell_debts()

    def store(self, message: StoreSnapshot, copies: Mapping[str, ArenaSlot] = {}) -> None:
        """Send what is here of a snapshot to storage, unless it is on its way or there already; once more where that failed.

        `copies`: of the shares of lost nodes, by the names of their areas; they belong to somebody else, and are only read.
        """
        for name, slot in copies.items():
            self._slots[name] = slot
            self._turns.setdefault(name, Turn())
        for name, slot in self._slots.items():
            header = slot.header()
            if header.state is SlotState.EMPTY or (header.attempt, header.step) != (message.attempt, message.step):
                continue
            if isinstance(self._answers.get(name), PackFailed):
                self._answers.pop(name, None)
            if header.state is SlotState.COMPLETE:
                slot.want_upload()
            self.snapshot_ready(name)

    def _tell_debts(self) -> None:
        headers = [slot.header() for slot in self._slots.values()]
        owed = [it for it in headers if it.state is SlotState.COMPLETE and it.upload is Upload.WANTED]
        self._send(Owed(shares=[Share(it.epoch, it.attempt, it.step, it.rank, it.world) for it in owed]))

    def close(self) -> None:
        """Finish everything queued, then return."""
        self._pool.shutdown(wait=True)

    def _serve(self, name: str) -> None:
        turn = self._turns.get(name)
        if turn is None or not turn.begin():
            return
        serving = True
        while serving:
            try:
                self._serve_once(name, self._slots[name])
            finally:
                serving = turn.again()

    def _serve_once(self, name: str, slot: ArenaSlot) -> None:
        header = slot.header()
        due = (
            self._local_every
            and not is_peer(name)
            and header.step % self._local_every == 0
            and not self._answered(f"{name} local", header)
        )
        wanted = header.upload is Upload.WANTED and not self._answered(name, header)
        if header.state is SlotState.EMPTY or (header.state is SlotState.FILLING and not wanted):
            return
        if not (due or wanted):
            slot.seal()
        digests = self._serve_local(name, slot, header) if due else {}
        if wanted:
            answer = self._store_with_room(slot, header, digests)
            if answer is not None:
                self._answers[name] = answer
                self._send(answer)

    def _store_with_room(self, slot: ArenaSlot, header: SlotHeader, known: dict[str, int]) -> Answer | None:
        answer, _ = self._store_slot(slot, header, "storage", known)
        for _ in range(ROOM_TRIES):
            if not (isinstance(answer, PackFailed) and answer.no_space and self._make_room(header.step)):
                break
            answer, _ = self._store_slot(slot, header, "storage", known)
        return answer

    def _serve_local(self, name: str, slot: ArenaSlot, header: SlotHeader) -> dict[str, int]:
        """Write a snapshot to the local tier; returns the digests.

        Nobody keeps the slot for this: if it was filled again meanwhile, what was written is thrown away, and nothing is said.
        """
        answer, digests = self._store_slot(slot, header, "local", {})
        if answer is None:
            return {}
        now = slot.header()
        same = now.state is SlotState.COMPLETE and now.snapshot == header.snapshot
        if same:
            self._answers[f"{name} local"] = answer
            self._send(answer)
        elif isinstance(answer, PackStored):
            self._run_store("local").delete(step_folder(header.step) + answer.manifest.pack.name)
        return digests if same else {}

    def _answered(self, name: str, header: SlotHeader) -> bool:
        answer = self._answers.get(name)
        return answer is not None and (answer.epoch, answer.attempt, answer.step) == header.snapshot

    def _store_slot(
        self, slot: ArenaSlot, header: SlotHeader, tier: str, known: dict[str, int]
    ) -> tuple[Answer | None, dict[str, int]]:
        """What came of it (None: nothing, the snapshot did not become whole), and the digests (none if it could not be stored):
        `known` ones are not computed again.
        """
        begin = time.monotonic()
        key = step_folder(header.step) + pack_name(header.epoch, header.attempt, header.rank)
        identity = {
            "epoch": header.epoch,
            "attempt": header.attempt,
            "step": header.step,
            "rank": header.rank,
            "world": header.world,
        }
        compressor = slot.compressor() if tier == "storage" else None
        stream = SlotStream(slot, digests=known, each=lambda: self._reached("upload", header.step), compressor=compressor)
        try:
            with stream:
                self._run_store(tier).put_stream(key, stream)
                digests = stream.digests()
        except Exception as error:  # whatever it is, the coordinator must hear of it: a thread's error has no other listener
            if stream.lost:
                return None, {}
            reason, no_space = f"{type(error).__name__}: {error}", isinstance(error, NoSpace)
            return PackFailed(**identity, reason=reason, tier=tier, no_space=no_space), {}
        manifest = stream.described(pack_manifest(slot, key.rsplit("/", 1)[1], digests))
        stored = PackStored(
            **identity,
            manifest=manifest,
            progress=slot.progress(),
            seconds=time.monotonic() - begin,
            tier=tier,
            retries=self._new_retries(),
        )
        return stored, digests

    def _run_store(self, tier: str) -> ObjectStore:
        with self._opening:
            if tier not in self._stores:
                self._stores[tier] = self._open[tier]()
            return self._stores[tier]

    def _new_retries(self) -> int:
        """Requests to the run's store that were sent again since the last call."""
        with self._opening:
            store = self._stores.get("storage")
            total = store.num_retries if store else 0
            new, self._retries = total - self._retries, total
            return new
