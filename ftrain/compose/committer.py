"""Commits and collection, off the coordinator's thread.

The coordinator must answer a death within milliseconds while storage may take minutes, so everything that touches
the run's store after the start is a job of this one thread. Results are handed back as events when the coordinator
ticks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftrain.checkpoint.messages import PackStored, Settled
from recovery.events import CheckpointCommitted, CheckpointFailed, Event
from storage.merge import merge
from storage.retention import RetentionPolicy
from storage.run import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one checkpoint: events for the ledger, and whose slots are free again."""

    events: tuple[Event, ...]
    settled: Settled
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All parts of one step are in storage: commit it."""

    epoch: int
    attempt: int
    step: int
    parts: tuple[PackStored, ...]
    begin: float


class Committer:
    """One thread with a queue. `submit`, `results` and `idle` may be called from the coordinator's thread only."""

    def __init__(self, run: RunStore, policies: Sequence[RetentionPolicy], *, grace_s: float, wake: Callable[[], None]) -> None:
        self._run, self._policies, self._grace_s, self._wake = run, policies, grace_s, wake
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._open = 0
        self.collect_error = ""
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a commit."""
        self._open += 1
        self._jobs.put(job)

    def results(self) -> list[Outcome]:
        """What has been done since the last call."""
        done = []
        while not self._results.empty():
            done.append(self._results.get())
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
            self._results.put(self._commit(job))
            self._wake()
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
                created_s=time.time(),
            )
            self._run.commit(manifest)
        except Exception as error:  # a failed save is reported, and by default does not end the run
            event: Event = CheckpointFailed(
                t=time.time(), attempt=job.attempt, step=job.step, reason=f"{type(error).__name__}: {error}"
            )
            return Outcome(events=(event,), settled=settled, committed=False)
        event = CheckpointCommitted(
            t=time.time(),
            attempt=job.attempt,
            step=job.step,
            epoch=job.epoch,
            nbytes=sum(part.manifest.pack.nbytes for part in job.parts),
            seconds=time.time() - job.begin,
        )
        return Outcome(events=(event,), settled=settled, committed=True)

    def _collect(self) -> None:
        if not self._policies or not self._jobs.empty():
            return
        try:
            self._run.collect(self._policies, now_s=time.time(), grace_s=self._grace_s, live=frozenset())
            self.collect_error = ""
        except (
            Exception
        ) as error:  # nothing is lost by collecting later: shown by `ftrain status`, tried again after the next commit
            self.collect_error = f"{type(error).__name__}: {error}"
