"""The places a checkpoint is in besides the run's storage: a local disk, written more often, and a mirror, written after it.

Neither may hold up the run or end it, and losing either loses nothing that was promised: what goes wrong with them is a notice
in the ledger. The local tier keeps the epochs of the run under their own numbers, so that its history is fenced like that of
the run itself; what the run's history does not contain is deleted rather than kept and argued about. Its folder is named after
the run, so that one disk may serve many. Its manifest of a step is byte for byte the run's own, and so, once both exist, is its
commit: whatever is damaged in the run's storage comes back from it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ftrain.checkpoint.messages import PackFailed, PackStored
from ftrain.compose.committer import Committer, Job, taken
from recovery.events import Event, StorageNotice, TierCommitted
from storage.belongs import copy_owner, no_mirror_of
from storage.catalog import CheckpointState
from storage.commit import decode_commit, read_commit
from storage.copy import copy_checkpoint
from storage.epoch import Epochs, copy_epoch, read_epochs
from storage.errors import Fenced, NoCheckpoint, NoSpace, ObjectMissing, StorageError
from storage.keys import commit_name, step_folder
from storage.objects import ObjectStore, open_store
from storage.record import MAX_RECORD_BYTES
from storage.retention import KeepLast, RetentionPolicy
from storage.run import RunStore

LOCAL_KEEPS = 2


class LocalTier:
    """The coordinator's half of the local tier; the keeper writes the packs. Used by the coordinator's thread."""

    def __init__(self, url: str, wake: Callable[[], None], store: ObjectStore) -> None:
        """`store` is that of the run itself."""
        self._run, self._store = RunStore(open_store(url)), store
        self._twins = ThreadPoolExecutor(1, thread_name_prefix="twins")
        self._committer = Committer(self._run, [KeepLast(LOCAL_KEEPS)], grace_s=0.0, wake=wake, local=True)
        self._parts: dict[tuple[int, int], dict[int, PackStored]] = defaultdict(dict)
        self._epoch = 0
        self.step: int | None = None
        """The newest step that a worker may try."""

    def begin(self, epoch: int, epochs: Epochs, committed: int | None) -> None:
        """A new epoch of the run has begun. `epochs`: the run's, without it; `committed`: the commit it goes on from.

        What an epoch discarded that was not here to say so (the run was on another machine) is deleted now; all of it, if the
        run has begun anew since.
        """
        here = read_epochs(self._run.store).starts
        if max(here, default=-1) >= epoch:
            for entry in list(self._run.store.list()):
                self._run.store.delete(entry.key)
        elsewhere = Epochs({number: start for number, start in epochs.starts.items() if number not in here})
        for info in self._run.checkpoints():
            if info.state is CheckpointState.VALID and elsewhere.fence(info.epoch, info.step):
                self._forget(info.step, info.epoch)
        self.step = self._newest()
        self._take(epoch, max((step for step in (self.step, committed) if step is not None), default=None))

    def progress(self) -> dict[str, Any]:
        """The progress record of `step`; empty without one."""
        return self._run.open(self.step).progress if self.step is not None else {}

    def rolled_back(self, epoch: int, step: int) -> None:
        """The run goes on from `step`; what is newer here could not be loaded, or is no part of the history any more."""
        self._parts.clear()
        for info in self._run.checkpoints():
            if info.step > step and info.state is CheckpointState.VALID:
                self._forget(info.step, info.epoch)
        self.step = self._newest()
        self._take(epoch, step)

    def _take(self, epoch: int, starts_from: int | None) -> None:
        copy_epoch(self._run.store, epoch, starts_from=starts_from, owner={"tier": "local"}, now_s=time.time())
        self._epoch = epoch

    def _newest(self) -> int | None:
        try:
            return self._run.open().step
        except NoCheckpoint:
            return None

    def _forget(self, step: int, epoch: int) -> None:
        self._run.store.delete(step_folder(step) + commit_name(epoch))

    def on_keeper(self, message: PackStored | PackFailed) -> list[Event]:
        """One rank's pack is on the local disk, or could not be put there."""
        group = (message.attempt, message.step)
        if isinstance(message, PackFailed):
            self._parts.pop(group, None)
            text = f"rank {message.rank}: step {message.step} is not in the local tier: {message.reason}"
            return [StorageNotice(t=time.time(), attempt=message.attempt, topic="local", text=text, step=message.step)]
        self._parts[group][message.rank] = message
        if len(self._parts[group]) == message.world:
            parts = self._parts.pop(group)
            begin = time.time() - max(part.seconds for part in parts.values())
            self._committer.submit(Job.of(parts, epoch=self._epoch, begin=begin, changed=False))
        return []

    def results(self) -> list[Event]:
        """What the commits came to."""
        found: list[Event] = []
        for outcome in self._committer.results():
            if outcome.committed and outcome.epoch == self._epoch:  # else the run went back meanwhile
                self.step = max(self.step or 0, outcome.settled.step)
                self.committed(outcome.settled.step)
            found += outcome.events
        self._parts = defaultdict(dict, {g: p for g, p in self._parts.items() if self.step is None or g[1] > self.step})
        return found

    def committed(self, step: int) -> None:
        """A checkpoint exists in the run's storage, or here: if in both, its commit is kept here, too."""
        self._twins.submit(self._take_commit, step, commit_name(self._epoch))

    def _take_commit(self, step: int, name: str) -> None:
        key = step_folder(step) + name
        try:
            data = self._store.get(key, max_bytes=MAX_RECORD_BYTES)
            here, there = read_commit(self._run.store, key), decode_commit(data, key)
            if (here.manifest_nbytes, here.manifest_crc32c) == (there.manifest_nbytes, there.manifest_crc32c):
                self._run.store.put(key, data)
        except ObjectMissing:  # not in both yet: the later one comes here again
            return
        except StorageError as error:  # the run goes on without: then a damaged commit is not healed from here
            logging.warning("the local tier does not keep the commit of step %d: %s", step, error)

    def lost(self) -> None:
        """Packs that were not whole on all ranks will not be."""
        self._parts.clear()

    def close(self) -> None:
        """Finish what is queued, briefly."""
        self._committer.close(timeout_s=5.0)
        self._twins.shutdown(wait=True, cancel_futures=True)


class Mirror:
    """Copies each committed checkpoint to a second place, on a thread of its own; if slow, only the newest that is due."""

    def __init__(
        self,
        run: Callable[[], ObjectStore],
        mirror: Callable[[], ObjectStore],
        policies: Sequence[RetentionPolicy],
        *,
        grace_s: float,
    ) -> None:
        """`run` and `mirror` open stores of their own: one thread's slow copy holds nobody else's connections."""
        self._open, self._policies, self._grace_s = (run, mirror), policies, grace_s
        self._due: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.step: int | None = None
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def committed(self, step: int) -> None:
        """A checkpoint of the run exists now."""
        self._due.put(step)

    def results(self) -> list[Event]:
        """What has been copied since the last call, and what could not be."""
        return list(taken(self._results))

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what is due, bounded: the next run copies the newest again."""
        self._due.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        stores: list[ObjectStore] = []
        while (step := self._newest_due()) is not None:
            begin = time.time()
            try:
                stores = stores or [opened() for opened in self._open]
                nbytes = self._copied(RunStore(stores[0]), RunStore(stores[1]), step)
            except Exception as error:  # a thread's error has no other listener
                text = f"step {step} is not in the mirror: {type(error).__name__}: {error}"
                self._results.put(StorageNotice(t=time.time(), topic="mirror", text=text, step=step))
                continue
            self.step = step
            now = time.time()
            self._results.put(TierCommitted(t=now, tier="mirror", step=step, nbytes=nbytes, seconds=now - begin))
        for store in stores:
            with suppress(StorageError):
                store.close()

    def _copied(self, run: RunStore, mirror: RunStore, step: int) -> int:
        """The bytes of the copy. Without room, once more after room was made of what is deleted anyway (ADR 34)."""
        try:
            nbytes = mirror_checkpoint(run, mirror, step)
        except NoSpace:
            if not self._policies or not mirror.collect(self._policies, now_s=time.time(), grace_s=0.0).freed_bytes:
                raise
            nbytes = mirror_checkpoint(run, mirror, step)
        if self._policies:
            mirror.collect(self._policies, now_s=time.time(), grace_s=self._grace_s)
        return nbytes

    def _newest_due(self) -> int | None:
        """Wait for work; what was overtaken meanwhile is let go. None: there will be no more."""
        step = self._due.get()
        while step is not None and not self._due.empty():
            later = self._due.get()
            if later is None:
                self._due.put(None)  # first the newest, then the end
                return step
            step = later
        return step


def mirror_checkpoint(run: RunStore, mirror: RunStore, step: int) -> int:
    """Copy one checkpoint; the mirror's own history goes back as far as the run's has. Returns the bytes.

    `Fenced` if the place is no mirror of this run: somebody else's checkpoints are there.
    """
    if why := no_mirror_of(run.store, mirror.store):
        raise Fenced(why, "epochs")
    source = run.open(step)
    behind = [info.step for info in mirror.checkpoints() if info.state is CheckpointState.VALID]
    if any(other > step for other in behind) or (step in behind and not _same(mirror, step, source.manifest.digests)):
        start = max((other for other in behind if other < step), default=None)
        tainted = [
            info.reason for info in run.checkpoints() if info.state is CheckpointState.TAINTED and info.step > (start or 0)
        ]
        if tainted:
            mirror.taint(after=start, reason=tainted[0])
        mirror.take_epoch(owner=copy_owner(run.store, "a roll-back of the run", step), starts_from=start)
    return copy_checkpoint(source, mirror).nbytes


def _same(mirror: RunStore, step: int, digests: dict[str, Any]) -> bool:
    try:
        return mirror.open(step).manifest.digests == digests
    except StorageError:
        return False
