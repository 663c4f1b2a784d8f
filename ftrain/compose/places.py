"""Everything about a run's storage that stops nothing when it fails: its other places, its lease, what a person should know."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ftrain.checkpoint.messages import PackFailed, PackStored
from ftrain.compose.holder import Holder
from ftrain.compose.skips import Range, missed
from ftrain.compose.stores import local_tier_url, open_configured
from ftrain.compose.tiers import LocalTier, Mirror
from ftrain.config import Config
from recovery.delegate import Source
from recovery.events import Event, StorageNotice
from storage.epoch import Epochs
from storage.errors import StorageError
from storage.probe import probe_create
from storage.retention import RetentionPolicy
from storage.run import RunStore

__all__ = ["Places"]


class Places:
    """Used by the coordinator's thread; slow work happens on threads of its parts."""

    def __init__(self, config: Config, run: RunStore, policies: Sequence[RetentionPolicy]) -> None:
        self._config, self._run, self._policies = config, run, policies
        self._local: LocalTier | None = None
        self._mirror: Mirror | None = None
        self._holder: Holder | None = None
        self._atomic = True
        self._told = False
        self._retries = 0

    def begin(self, epoch: int, epochs: Epochs, committed: int | None, wake: Callable[[], None]) -> list[Event]:
        """A coordinator has taken `epoch`; `epochs` are those before it."""
        checkpoint, storage = self._config.checkpoint, self._config.storage
        found: list[Event] = []
        self._holder = Holder(self._run.store, epoch=epoch, lease_s=storage.lease_s)
        try:
            self._atomic = probe_create(self._run.store)
        except StorageError as error:
            logging.warning("create-if-absent could not be tried: %s", error)
        if not self._atomic:
            text = (
                f"create-if-absent is not atomic at {self._run.store.endpoint}: commits are read back, and two coordinators "
                "that start within the same second may both believe they own the run"
            )
            found.append(notice("create", text))
        if url := local_tier_url(self._config):
            try:
                self._local = LocalTier(url, wake, self._run.store)
                self._local.begin(epoch, epochs, committed)
            except StorageError as error:
                self._local = None
                found.append(notice("local", f"there is no local tier: {error}"))
        if checkpoint.mirror_url:
            self._mirror = Mirror(
                lambda: open_configured(storage, self._config.run.url),
                lambda: open_configured(storage, checkpoint.mirror_url),
                self._policies,
                grace_s=checkpoint.grace_s,
            )
            if committed is not None:
                self._mirror.committed(committed)
        return found

    def pass_over(self, skipped: Sequence[Range], epoch: int, committed: int | None) -> list[Event]:
        """A state of the local tier that has seen data of these ranges, all that there are, is given up."""
        try:
            late = self._local is not None and missed(skipped, self._local.step or 0, self._local.progress()) is not None
        except StorageError as error:
            self._local = None
            return [notice("local", f"the local tier is given up: {error}")]
        return self._take_back(epoch, committed or 0) if late else []

    @property
    def local_step(self) -> int | None:
        """The newest step of the local tier."""
        return self._local.step if self._local else None

    def newest(self, memory: int | None, stored: int | None, *, copied: int | None = None) -> tuple[Source, int | None]:
        """Where the next attempt's state should come from, and its step; of equals the nearest. The workers decide.

        `copied`: of what other nodes hold for those that are lost.
        """
        best: tuple[Source, int | None] = ("init", None)
        nearer: tuple[tuple[Source, int | None], ...] = (
            ("storage", stored),
            ("local", self.local_step),
            ("peer", copied),
            ("memory", memory),
        )
        for source, step in nearer:
            if step is not None and step >= (best[1] or 0):
                best = source, step
        return best

    def on_keeper(self, message: PackStored | PackFailed) -> list[Event]:
        """A pack of the local tier."""
        return self._local.on_keeper(message) if self._local else []

    def count_retries(self, message: PackStored | PackFailed) -> None:
        """Requests that a keeper had to send again."""
        self._retries += message.retries if isinstance(message, PackStored) else 0

    def committed(self, step: int) -> None:
        """A checkpoint exists in the run's storage."""
        if self._local:
            self._local.committed(step)
        if self._mirror:
            self._mirror.committed(step)

    def rolled_back(self, epoch: int, step: int) -> list[Event]:
        """The run goes on from an older step, in a new epoch."""
        if self._holder:
            self._holder.epoch = epoch
        return self._take_back(epoch, step) if self._local is not None else []

    def resumed_from(self, epoch: int, step: int) -> list[Event]:
        """The workers begin with the state of `step`: what the local tier has beyond it is of no use."""
        if self._local is None or (self._local.step or 0) <= step:
            return []
        return self._take_back(epoch, step)

    def _take_back(self, epoch: int, step: int) -> list[Event]:
        """The local tier enters the epoch even if it has nothing to lose: something may be on its way to it."""
        assert self._local is not None
        try:
            self._local.rolled_back(epoch, step)
        except StorageError as error:
            self._local = None
            return [notice("local", f"the local tier is given up: {error}")]
        return []

    def agent_lost(self) -> None:
        """What was on its way through the keeper is gone."""
        if self._local:
            self._local.lost()

    def tick(self, stop: Callable[[str], None]) -> list[Event]:
        """What has happened since the last tick. `stop` is called if the run has another owner now."""
        found = [*(self._local.results() if self._local else ()), *(self._mirror.results() if self._mirror else ())]
        if self._holder and self._holder.taken_by and not self._told:
            self._told = True
            text = f"the run was taken over: {self._holder.taken_by} holds it now, and nothing that is saved here counts"
            found.append(notice("owner", text))
            stop(text)
        return found

    def status(self) -> dict[str, Any]:
        """For `ftrain status`."""
        return {
            "local_step": self.local_step,
            "mirror_step": self._mirror.step if self._mirror else None,
            "storage_retries": self._retries + self._run.store.num_retries,
            "create_is_atomic": self._atomic,
        }

    def close(self) -> None:
        """Finish what is under way, bounded, and let go of the run."""
        if self._local:
            self._local.close()
        if self._mirror:
            self._mirror.close()
        if self._holder:
            self._holder.close()


def notice(topic: Any, text: str) -> StorageNotice:
    """An event for the ledger, and a line in the coordinator's log."""
    logging.warning("%s", text)
    return StorageNotice(t=time.time(), topic=topic, text=text)
