"""The keeper of one rank of somebody else's script: `python -P -m ftrain.checkpoint.script_keeper START_JSON SOCKET_FD`.

It does what the engine's keeper does (seal, stream, digest), and because such a script has no coordinator, the keepers find
each other in the store: each leaves a small object beside its pack, and rank 0's commits when all are there. So no port is
opened, and it works wherever the store is reachable. Imports no torch.

It outlives its script on purpose: what was copied when the script died is still stored. A newer life of the run has a newer
epoch, so a commit that comes too late does not count.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.messages import KeeperMessage, PackFailed, PackStored, Settled
from ftrain.checkpoint.outbox import Outbox
from ftrain.checkpoint.record import StateError, merged
from ftrain.checkpoint.script_messages import (
    CommitDone,
    Copied,
    Delivery,
    Forget,
    KeeperStart,
    PartDone,
    Saved,
    Slots,
    ToScriptKeeper,
    delivery_key,
    progress_of,
)
from ftrain.units import format_bytes
from recovery.wire import channel
from storage.commit import read_commit
from storage.errors import NoSpace, ObjectMissing
from storage.keys import commit_name, manifest_name, step_folder, view_name
from storage.merge import merge
from storage.objects import ObjectStore, open_store
from storage.retention import KeepEvery, KeepLast, RetentionPolicy
from storage.run import RunStore
from storage.traffic import configure

log = logging.getLogger("ftrain.keeper")

POLL_S = 0.01
LONGEST_POLL_S = 1.0
RECORD_LIMIT_S = 60.0
LINGER_S = 10.0  # at the end, for late parts of failed saves
FAILED_SAVES = 4  # whose late parts are looked for: a rank that has a part of the third after it has delivered its own


class ScriptKeeper:
    """Seals, stores and delivers this rank's snapshots; on rank 0 commits those of all ranks."""

    def __init__(self, start: KeeperStart, tell: Callable[[object], None]) -> None:
        """`tell` must be safe from any thread."""
        self._start, self._tell = start, tell
        self._records: dict[int, bytes] = {}
        self._due_parts: set[int] = set()  # steps of which this rank's part is not delivered yet
        self._keeper = Keeper(lambda: open_store(start.url), self._stored, make_room=self._make_room)
        self._store: ObjectStore | None = None
        self._failed: dict[int, set[int]] = {}  # saves by step, and the ranks whose parts have not been looked at
        self._lock = threading.Lock()
        self._told = threading.Condition()
        self._due: queue.SimpleQueue[tuple[int, float] | None] = queue.SimpleQueue()
        self._committer = threading.Thread(target=self._commit_all, name="committer")
        self._committer.start()

    def handle(self, message: ToScriptKeeper, fds: tuple[int, ...]) -> None:
        """One message of the rank."""
        if isinstance(message, Slots):
            for name, fd in zip(message.names, fds, strict=True):
                self._keeper.adopt(name, fd)
                os.close(fd)
        elif isinstance(message, Forget):
            for name in message.names:
                self._keeper.drop(name)
        elif isinstance(message, Copied):
            self._copied(message)
        else:
            self._saved(message)

    def _saved(self, message: Saved) -> None:
        if message.slot:
            with self._told:
                self._records[message.step] = message.record
                self._due_parts.add(message.step)
                self._told.notify_all()
        if self._start.rank == 0:
            self._due.put((message.step, time.monotonic()))
        if message.slot:
            self._keeper.snapshot_ready(message.slot)

    def _copied(self, message: Copied) -> None:
        if message.error:
            self._give_up(message.step, message.error)
        else:
            self._keeper.snapshot_ready(message.slot)

    def _give_up(self, step: int, why: str) -> None:
        """There will be no snapshot of this step: nobody is to wait for it."""
        with self._told:
            if self._records.pop(step, None) is not None:
                rank, epoch = self._start.rank, self._start.epoch
                self._deliver(step, delivery_key(step, epoch, self._start.attempt, rank), Delivery(error=f"rank {rank}: {why}"))

    def close(self) -> None:
        """Finish what is queued, with bounded patience."""
        self._keeper.close()
        for step in list(self._records):  # complete ones are stored by now
            self._give_up(step, "it died while its state was being copied")
        self._due.put(None)
        self._committer.join()

    def _run_store(self) -> ObjectStore:
        with self._lock:
            if self._store is None:
                self._store = open_store(self._start.url)
            return self._store

    def _stored(self, answer: KeeperMessage) -> None:
        """What came of this rank's part; from a thread of the keeper."""
        if not isinstance(answer, PackStored | PackFailed):
            return
        with self._told:  # a slot may be complete, and stored, before we are told of it
            self._told.wait_for(lambda: answer.step in self._records, RECORD_LIMIT_S)
            record = self._records.pop(answer.step, None)
        if record is None:
            delivery = Delivery(error=f"rank {answer.rank}: its record did not arrive")
        elif isinstance(answer, PackStored):
            delivery = Delivery(stored=answer, record=record)
        else:
            delivery = Delivery(error=f"rank {answer.rank}: {answer.reason}")
        self._deliver(answer.step, delivery_key(answer.step, answer.epoch, answer.attempt, answer.rank), delivery)

    def _deliver(self, step: int, key: str, delivery: Delivery) -> None:
        try:
            self._with_room(step, lambda: self._run_store().put(key, msgspec.msgpack.encode(delivery)))
        except Exception as error:  # the rank must hear of whatever it is: a thread's error has no other listener
            delivery = Delivery(error=f"rank {self._start.rank}: {type(error).__name__}: {error}")
        self._keeper.settled(Settled(attempt=self._start.attempt, step=step))
        self._tell(PartDone(step=step, error=delivery.error))
        with self._told:
            self._due_parts.discard(step)
            self._told.notify_all()

    # -- room ------------------------------------------------------------------------------------------------------------

    def _with_room(self, step: int, write: Callable[[], object]) -> None:
        try:
            write()
        except NoSpace:
            if not self._make_room(step):
                raise
            write()

    def _make_room(self, step: int) -> bool:
        """Delete at once what is to be deleted after a grace period (ADR 34), whichever rank finds no room: two that do so
        at the same time delete the same. Whether it is worth another try: what another one has freed counts, too.
        """
        freed = self._collect(grace_s=0.0)
        if freed:
            log.warning("step %d found no room: %s of deleted checkpoints went before their time", step, format_bytes(freed))
        return freed is not None

    @property
    def _policies(self) -> list[RetentionPolicy]:
        last, every = self._start.keep_last, self._start.keep_every
        return [*([KeepLast(last)] if last else []), *([KeepEvery(every)] if every else [])]

    def _collect(self, *, grace_s: float) -> int | None:
        """Delete what no policy keeps; bytes that are free again. None: everything is kept, or it could not be done."""
        if not self._policies:
            return None
        try:
            writers = frozenset({(self._start.epoch, self._start.attempt)})
            return self._run().collect(self._policies, now_s=time.time(), grace_s=grace_s, writers=writers).freed_bytes
        except Exception as error:  # nothing is lost by collecting after the next commit
            log.warning("old checkpoints are not deleted: %s", error)
            return None

    def _run(self) -> RunStore:
        """The run, in which this deletes something only as long as no newer life of it has begun."""
        return RunStore(self._run_store(), epoch=self._start.epoch)

    # -- rank 0 ----------------------------------------------------------------------------------------------------------

    def _commit_all(self) -> None:
        while (due := self._due.get()) is not None:
            step, begin = due
            try:
                done = self._commit(step, begin)
            except Exception as error:  # a failed save is reported, and by default does not end the script
                done = CommitDone(step=step, error=f"{type(error).__name__}: {error}")
            self._tell(done)
            if not done.error:
                self._collect(grace_s=self._start.grace_s)
            self._sweep_failed()
        deadline, pause_s = time.monotonic() + LINGER_S, POLL_S
        while self._failed and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, 2 * pause_s)
            self._sweep_failed()

    def _commit(self, step: int, begin: float) -> CommitDone:
        store = self._run_store()
        with suppress(ObjectMissing):  # by a keeper that died before it could say so: the parts are not there any more
            record = read_commit(store, step_folder(step) + commit_name(self._start.epoch))
            return CommitDone(step=step, nbytes=record.nbytes, seconds=time.monotonic() - begin)
        keys = [delivery_key(step, self._start.epoch, self._start.attempt, rank) for rank in range(self._start.world)]
        deliveries = self._await(store, step, keys, begin)
        errors = [each.error for each in deliveries if each.error]
        if errors:
            self._failed[step] = set(range(self._start.world))
            return CommitDone(step=step, error=errors[0])
        parts = [each.stored for each in deliveries if each.stored is not None]
        try:
            progress = merged([msgspec.json.decode(each.record) for each in deliveries])
        except StateError as error:
            return CommitDone(step=step, error=str(error))
        manifest = merge(
            [part.manifest for part in parts],
            epoch=self._start.epoch,
            attempt=self._start.attempt,
            step=step,
            progress=progress_of(step, self._start.world, progress),
            created_s=time.time(),
        )
        try:
            self._with_room(step, lambda: RunStore(store).commit(manifest))
        except NoSpace:  # no answer is missing: it was not committed, and its packs only take room
            self._failed[step] = set(range(self._start.world))
            raise
        for key in keys:
            store.delete(key)
        return CommitDone(step=step, nbytes=sum(part.manifest.pack.nbytes for part in parts), seconds=time.monotonic() - begin)

    def _await(self, store: ObjectStore, step: int, keys: list[str], begin: float) -> list[Delivery]:
        """All ranks' parts, as they appear. Raises TimeoutError if one does not.

        Ranks take about the same time: while this one's part is on its way, nobody looks for the others', and then often.
        """
        with self._told:
            self._told.wait_for(lambda: step not in self._due_parts, self._start.patience_s)
        found: dict[str, Delivery] = {}
        pause_s = POLL_S
        while True:
            for key in keys:
                if key not in found:
                    try:
                        found[key] = msgspec.msgpack.decode(store.get(key), type=Delivery)
                    except ObjectMissing:
                        break
            failed = any(each.error for each in found.values())
            if len(found) == len(keys) or failed:
                return [found[key] for key in keys if key in found]
            if time.monotonic() - begin > self._start.patience_s:
                missing = next(key for key in keys if key not in found)
                raise TimeoutError(f"{missing} did not appear within {self._start.patience_s:g} s: is that rank gone?")
            time.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, pause_s * 1.5)

    def _sweep_failed(self) -> None:
        """Delete what is stored of saves that failed; parts that are still on their way are looked for again later. An error
        that a rank has delivered stays: it is the answer to whoever asks for that save again.
        """
        for step, ranks in list(self._failed.items()):
            try:
                self._sweep_one(step, ranks)
            except Exception as error:  # a later life's collection takes them
                log.warning("what is stored of the failed save of step %d is not deleted: %s", step, error)
                ranks.clear()
            if not ranks or len(self._failed) > FAILED_SAVES:
                del self._failed[step]

    def _sweep_one(self, step: int, ranks: set[int]) -> None:
        store, run, epoch, attempt = self._run_store(), self._run(), self._start.epoch, self._start.attempt
        for name in (manifest_name(epoch, attempt), view_name(epoch, attempt)):
            run.delete_leaving(step, name)
        for rank in sorted(ranks):
            key = delivery_key(step, epoch, attempt, rank)
            with suppress(ObjectMissing):
                delivery = msgspec.msgpack.decode(store.get(key), type=Delivery)
                if delivery.stored is not None:
                    run.delete_leaving(step, delivery.stored.manifest.pack.name)
                    store.delete(key)
                ranks.discard(rank)


def main(argv: list[str]) -> int:
    """Serve until the rank hangs up, then finish."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # the latter goes to every process of a job that a scheduler ends
        signal.signal(number, signal.SIG_IGN)
    start = msgspec.json.decode(argv[0], type=KeeperStart)
    link = channel(socket.socket(fileno=int(argv[1])), ToScriptKeeper)
    os.set_inheritable(link.fileno(), False)
    if start.upload_mib_s:
        configure(in_flight_bytes=64 << 20, upload_bytes_per_s=start.upload_mib_s * 2**20)
    outbox = Outbox(link)
    keeper = ScriptKeeper(start, outbox.put)
    while not link.closed:
        for frame in outbox.wait():
            keeper.handle(frame.message, frame.fds)
    keeper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
