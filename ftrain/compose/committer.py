"""Commits and collection, off the coordinator's thread.

The coordinator must answer a death within milliseconds while storage may take minutes, so everything that touches
the run's store after the start is a job of this one thread. Results are handed back as events when the coordinator
ticks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ftrain.checkpoint.messages import PackStored, Settled
from ftrain.compose.debts import Group
from ftrain.units import format_bytes
from recovery.events import CheckpointCommitted, CheckpointFailed, Event, StorageNotice, TierCommitted
from storage.errors import NoSpace
from storage.keys import manifest_name, view_name
from storage.manifest import Manifest
from storage.merge import merge
from storage.retention import KeepUpTo, RetentionPolicy
from storage.run import RunStore

log = logging.getLogger(__name__)

OLDEST_UPLOAD_S = 24 * 3600.0  # an unfinished upload that began before may be swept: no writer works on one pack for a day

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one checkpoint: events for the ledger, and whose slots are free again.

    `epoch`: the one it was to be committed under. Once the run has gone back under another, it changes nothing any more.
    """

    epoch: int
    events: tuple[Event, ...]
    settled: Settled
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What came of the wish for room for one checkpoint. `freed_bytes`: also by the collection after the last commit, which its
    writers may not have had the good of; with none there is as little room as before.
    """

    group: Group
    freed_bytes: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Leavings:
    """What there is of a checkpoint that will never be whole: names of objects, which may be absent."""

    step: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distrust:
    """What there is from a step on is in doubt."""

    onset: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All parts of one step are in storage: commit it."""

    epoch: int
    attempt: int
    step: int
    parts: tuple[PackStored, ...]
    begin: float
    changed: bool = False  # an update with lr > 0 was applied since the checkpoint before

    @classmethod
    def of(cls, parts: Mapping[int, PackStored], *, epoch: int, begin: float, changed: bool) -> Job:
        """The commit of all ranks' parts of one snapshot, by rank, under `epoch`."""
        first = parts[0]
        ordered = tuple(parts[rank] for rank in sorted(parts))
        return cls(epoch=epoch, attempt=first.attempt, step=first.step, parts=ordered, begin=begin, changed=changed)


class Committer:
    """One thread with a queue. `submit`, `make_room`, `results`, `rooms` and `idle` are for the coordinator's thread only.

    One for the run's own storage, and one for the local tier.
    """

    def __init__(
        self,
        run: RunStore,
        policies: Sequence[RetentionPolicy],
        *,
        grace_s: float,
        wake: Callable[[], None],
        local: bool = False,
        digests: tuple[int, dict[str, int]] | None = None,
        writers: Callable[[], frozenset[tuple[int, int]]] = frozenset,
    ) -> None:
        """`digests`: of the newest checkpoint, if there is one, and the epoch that goes on from it: the next of that epoch must
        differ. `writers`: (epoch, attempt) of those whose packs a collection must leave alone; asked from the thread.
        """
        self._run, self._policies, self._grace_s, self._wake = run, policies, grace_s, wake
        self._local, self._digests, self._writers = local, digests, writers
        self._jobs: queue.SimpleQueue[Job | Group | Leavings | Distrust | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._rooms: queue.SimpleQueue[Room] = queue.SimpleQueue()
        self._open = 0
        self._spared: int | None = None
        self._bad_since: int | None = None  # of the newest commit: its losses may be in doubt since then
        self._freed = 0  # bytes, since the last commit began or room was made
        self.collect_error = ""
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a commit."""
        self._open += 1
        self._jobs.put(job)

    def make_room(self, group: Group) -> None:
        """Delete at once, for this checkpoint, what is to be deleted after a grace period (ADR 34)."""
        self._open += 1
        self._jobs.put(group)

    def discard(self, stored: Sequence[PackStored]) -> None:
        """Delete packs of one step that will be part of no checkpoint, some time."""
        self._jobs.put(Leavings(stored[0].step, _packs(stored)))

    def spare(self, up_to: int | None) -> None:
        """Workers are about to load the checkpoint of this step, or an older one: none of them goes. None: they have."""
        self._spared = up_to

    def distrust(self, onset: int, reason: str) -> None:
        """Taint every checkpoint from a step on, those whose commit is queued included."""
        self._jobs.put(Distrust(onset, reason))

    def results(self) -> list[Outcome]:
        """What has been committed, or could not be, since the last call."""
        done = list(taken(self._results))
        self._open -= len(done)
        return done

    def rooms(self) -> list[Room]:
        """Where room was wanted, since the last call."""
        done = list(taken(self._rooms))
        self._open -= len(done)
        return done

    @property
    def idle(self) -> bool:
        """Whether every submitted job has been handed back."""
        return self._open == 0

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what is queued, bounded."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Job):
                self._freed = 0
                self._results.put(self._commit(job))
            elif isinstance(job, Leavings):
                self._sweep(job)
            elif isinstance(job, Distrust):
                self._taint(job)
            else:
                self._rooms.put(self._room(job))
            self._wake()
            if isinstance(job, Job):
                self._collect()

    def _commit(self, job: Job) -> Outcome:
        settled = Settled(attempt=job.attempt, step=job.step)
        try:
            manifest = merge(
                [part.manifest for part in job.parts],
                epoch=job.epoch,
                attempt=job.attempt,
                step=job.step,
                progress=job.parts[0].progress,
                created_s=float(job.parts[0].progress.get("taken_s") or time.time()),  # the same in every tier
            )
            written = (job.epoch, manifest.digests)  # in another epoch it may equal one that is no part of the history any more
            if job.changed and written == self._digests:
                return self._stale(job, settled)
            self._bad_since = manifest.progress.get("bad_since")
            made = self._seal(job, manifest)
        except Exception as error:  # a failed save is reported, and by default does not end the run
            if isinstance(error, NoSpace):  # no answer is missing: it was not committed, and its packs only take room
                sealing = (named(job.epoch, job.attempt) for named in (manifest_name, view_name))
                self._sweep(Leavings(job.step, (*_packs(job.parts), *sealing)))
            failure = self._failed(job, f"{type(error).__name__}: {error}")
            return Outcome(epoch=job.epoch, events=(failure,), settled=settled, committed=False)
        self._digests = written
        return Outcome(epoch=job.epoch, events=(*made, self._done(job, manifest)), settled=settled, committed=True)

    def _seal(self, job: Job, manifest: Manifest) -> tuple[Event, ...]:
        """Commit it, where there is no room once more after room was made; what there is to say of that."""
        try:
            self._run.commit(manifest)
        except NoSpace:
            room = self._room((job.attempt, job.step))
            if not room.freed_bytes:
                raise
            self._run.commit(manifest)
            return room.events
        return ()

    def _stale(self, job: Job, settled: Settled) -> Outcome:
        """A snapshot that was not taken: committing it would call an old state a new one."""
        text = (
            f"the snapshot of step {job.step} is bit for bit the checkpoint before it, although an update with a learning rate "
            "above 0 was applied in between: it is not committed. The copy into the arena is broken, or gradients are all zero"
        )
        alarm = StorageNotice(t=time.time(), attempt=job.attempt, topic="stale", text=text, step=job.step)
        return Outcome(epoch=job.epoch, events=(alarm, self._failed(job, text)), settled=settled, committed=False)

    def _failed(self, job: Job, reason: str) -> Event:
        if self._local:
            text = f"step {job.step} is not in the local tier: {reason}"
            return StorageNotice(t=time.time(), attempt=job.attempt, topic="local", text=text, step=job.step)
        return CheckpointFailed(t=time.time(), attempt=job.attempt, step=job.step, reason=reason)

    def _done(self, job: Job, manifest: Manifest) -> Event:
        now, seconds = time.time(), time.time() - job.begin
        if self._local:
            return TierCommitted(
                t=now, attempt=job.attempt, tier="local", step=job.step, nbytes=manifest.nbytes, seconds=seconds
            )
        return CheckpointCommitted(
            t=now,
            attempt=job.attempt,
            step=job.step,
            epoch=job.epoch,
            nbytes=sum(part.manifest.pack.nbytes for part in job.parts),
            seconds=seconds,
            retries=sum(part.retries for part in job.parts),
        )

    def _sweep(self, leavings: Leavings) -> None:
        try:
            for name in leavings.names:
                self._run.delete_leaving(leavings.step, name)
        except Exception as error:  # a collection takes them, once no writer of their attempt is at work
            self.collect_error = f"{type(error).__name__}: {error}"

    def _taint(self, job: Distrust) -> None:
        try:
            self._run.taint(after=job.onset - 1, reason=job.reason)
        except Exception as error:  # whoever goes back to before the onset does it again, and not without
            log.warning("what came after the onset at step %d is not tainted yet: %s", job.onset, error)

    def _room(self, group: Group) -> Room:
        freed = self._collect(grace_s=0.0)
        total, self._freed = self._freed, 0
        if not freed:
            return Room(group=group, freed_bytes=total, events=())
        attempt, step = group
        text = (
            f"there was no room for the checkpoint of step {step}: {format_bytes(freed)} of deleted ones went before their "
            f"{self._grace_s:g} s (checkpoint.grace_s) were over"
        )
        said = StorageNotice(t=time.time(), attempt=attempt, topic="room", text=text, step=step)
        return Room(group=group, freed_bytes=total, events=(said,))

    def _collect(self, grace_s: float | None = None) -> int:
        """Delete what no policy keeps and what the run will not go back to; bytes that are free again."""
        if not self._policies:
            return 0
        grace_s, freed = self._grace_s if grace_s is None else grace_s, 0
        wanted = (self._spared, None if self._bad_since is None else self._bad_since - 1)
        policies = [*self._policies, *(KeepUpTo(step) for step in wanted if step is not None)]
        try:
            freed = self._run.collect(policies, now_s=time.time(), grace_s=grace_s, writers=self._writers()).freed_bytes
            self._run.store.sweep_unfinished(older_than_s=max(self._grace_s, OLDEST_UPLOAD_S))
            self.collect_error = ""
        except (
            Exception
        ) as error:  # nothing is lost by collecting later: shown by `ftrain status`, tried again after the next commit
            self.collect_error = f"{type(error).__name__}: {error}"
        self._freed += freed
        return freed


def _packs(stored: Sequence[PackStored]) -> tuple[str, ...]:
    return tuple(part.manifest.pack.name for part in stored)


def taken(results: queue.SimpleQueue[T]) -> Iterator[T]:
    """What lies in a queue that nobody else reads."""
    while not results.empty():
        yield results.get()
