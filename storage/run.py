"""A run's storage: who owns it, what it has committed, and how to open or throw away any of it.

Everything is a short call on one object store; the rules are in the modules this one ties together: `epoch` (who may commit),
`commit` (the moment a checkpoint begins to exist), `catalog` (what exists), `collect` (what may go).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from storage.catalog import Catalog, CheckpointInfo, CheckpointState, StepFolder, read_catalog, read_checked
from storage.checkpoint import Checkpoint
from storage.collect import CollectReport, collect
from storage.commit import CommitRecord, CommitRef, commit
from storage.epoch import Epochs, read_epochs, take_epoch
from storage.errors import Damaged, Fenced, FormatError, NoCheckpoint, ObjectMissing, StorageError
from storage.keys import pack_name, step_folder
from storage.manifest import Manifest
from storage.objects import ObjectStore
from storage.retention import RetentionPolicy
from storage.taint import Taint, write_taint

__all__ = ["RunStore"]


@dataclass(slots=True)
class _PassedOver:
    """Why steps were not opened."""

    damaged: list[tuple[int, str]] = field(default_factory=list)
    others: list[tuple[int, str]] = field(default_factory=list)
    """Incomplete, fenced and tainted ones: they are no candidates."""
    error: StorageError | None = None

    def sentences(self) -> list[str]:
        return [f"step {step}: {reason}" for step, reason in sorted(self.damaged + self.others, reverse=True)]


class RunStore:
    """The checkpoints of one run. `clock` gives unix seconds; tests bring their own. `epoch`: one that was taken elsewhere and
    that this object acts for.
    """

    def __init__(self, store: ObjectStore, *, epoch: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.epoch = epoch
        """The epoch this object took or acts for; None if it only looks."""
        self._clock = clock

    def take_epoch(self, *, owner: dict[str, Any], starts_from: Literal["newest"] | int | None = "newest") -> int:
        """Become the owner; atomic, and every earlier owner is fenced. Returns the epoch's number.

        `starts_from` is the step this history goes on from: the newest checkpoint that opens, the checkpoint of a given step (a
        roll-back: later steps of earlier epochs cease to count), or None for the very beginning. An owner that takes another
        epoch must still be the owner: `Fenced` if somebody else has taken the run meanwhile.
        """
        if isinstance(starts_from, int):
            self.open(starts_from, tainted=False)

        def start(epochs: Epochs) -> int | None:
            self._require_ownership(epochs, "take another")
            return self._newest_step() if starts_from == "newest" else starts_from

        self.epoch, _ = take_epoch(self.store, owner=owner, starts_from=start, now_s=self._clock())
        return self.epoch

    def _require_ownership(self, epochs: Epochs, what: str) -> None:
        """Whoever took an epoch, and not just looks, may do this only while it is the newest."""
        if self.epoch is not None and epochs.newest != self.epoch:
            raise Fenced(f"epoch {self.epoch} may not {what}: epoch {epochs.newest} owns the run", "epochs")

    def _newest_step(self) -> int | None:
        try:
            return self.open().step
        except NoCheckpoint:
            return None

    def commit(self, manifest: Manifest, *, origin: str | None = None) -> CommitRef:
        """Make a checkpoint whose packs are stored exist; atomic. Raises `Fenced` if a later epoch went on without it.

        `origin`: of a copy, the commit object that it was made from.
        """
        return commit(self.store, manifest, now_s=self._clock(), origin=origin)

    def taint(self, *, after: int | None, reason: str) -> list[int]:
        """Distrust every checkpoint that counts and comes after step `after` (None: all); before a roll-back takes its epoch.

        They are kept until somebody asks for their collection, and open when asked for by step. The newest comes first: what
        counts stays a history without holes wherever this is interrupted. Returns the steps. `Fenced` if somebody else owns the
        run now.
        """
        catalog, found = read_catalog(self.store), list[int]()
        self._require_ownership(catalog.epochs, "distrust anything")
        for folder, winner in catalog.newest_first():
            if winner is None or (after is not None and folder.step <= after):
                continue
            for record in folder.counting(catalog.epochs):
                facts = {"step": record.step, "epoch": record.epoch, "attempt": record.attempt}
                write_taint(self.store, Taint(**facts, reason=reason, tainted_s=self._clock()))
            found.append(folder.step)
        return found

    def checkpoints(self) -> list[CheckpointInfo]:
        """Every step's folder with its state, by step. Reads commits only, no manifests."""
        return read_catalog(self.store).infos()

    def open(self, step: int | None = None, *, without: Mapping[int, str] | None = None, tainted: bool = True) -> Checkpoint:
        """The checkpoint of a step, or the newest that opens: commit, manifest and the sizes of its packs are right.

        Newer ones that do not open are in its `passed_over`. `without`: steps to pass over, with reasons (they failed to load).
        A tainted one is opened only for a given step that has no other, and not at all if `tainted` is False. `NoCheckpoint`
        says why each candidate was passed over; for a given step, its own error is raised.
        """
        catalog, passed = read_catalog(self.store), _PassedOver()
        for folder, _ in catalog.newest_first():
            if step is not None and folder.step != step:
                continue
            if without and folder.step in without:
                passed.damaged.append((folder.step, without[folder.step]))
                continue
            candidates = folder.counting(catalog.epochs)
            if step is not None and tainted:
                candidates = candidates or folder.tainted
            found = self._open_folder(folder, candidates, catalog.epochs, passed)
            if found is not None:
                return found
            if step is not None and passed.error is not None:
                raise passed.error
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        reasons = passed.sentences() or [_what_is_there(catalog, tainted)]
        raise NoCheckpoint(f"{self.store.url} has {what} to load ({'; '.join(reasons)})", candidates=reasons)

    def _open_folder(
        self, folder: StepFolder, candidates: Sequence[CommitRecord], epochs: Epochs, passed: _PassedOver
    ) -> Checkpoint | None:
        """The first of a folder's commits that opens."""
        for record in candidates:
            try:
                manifest = read_checked(self.store, folder, record)
            except (Damaged, FormatError, ObjectMissing) as problem:
                passed.damaged.append((folder.step, str(problem)))
                passed.error = problem
                continue
            return Checkpoint(self.store, manifest, step_folder(folder.step), commit=record, passed_over=passed.damaged)
        info = folder.info(epochs)
        if info.state is CheckpointState.DAMAGED:
            passed.damaged.append((folder.step, info.reason))
        elif info.state is not CheckpointState.VALID:
            passed.others.append((folder.step, f"{info.state}: {info.reason}"))
        return None

    def pack_key(self, step: int, epoch: int, attempt: int, writer: int) -> str:
        """Where a writer puts its pack of a step."""
        return step_folder(step) + pack_name(epoch, attempt, writer)

    def delete_leaving(self, step: int, name: str) -> None:
        """Delete an object of a save that was given up: no commit names it. `Fenced` if another epoch owns the run."""
        if self.epoch is not None:
            self._require_ownership(read_epochs(self.store), "delete anything")
        self.store.delete(step_folder(step) + name)

    def collect(
        self,
        policies: Sequence[RetentionPolicy],
        *,
        now_s: float,
        grace_s: float,
        live: frozenset[str] = frozenset(),
        writers: frozenset[tuple[int, int]] = frozenset(),
        tainted: bool = False,
    ) -> CollectReport:
        """Delete what no policy keeps and what nobody owns; see `storage.collect`. `Fenced` if another epoch owns the run."""
        if self.epoch is not None:
            self._require_ownership(read_epochs(self.store), "delete anything")
        how = {"now_s": now_s, "grace_s": grace_s}
        return collect(self.store, policies, **how, live=live, writers=writers, tainted=tainted)


def _what_is_there(catalog: Catalog, tainted: bool) -> str:
    """The steps that can be had instead: what was retired, or never committed, is no help to anybody."""
    good = [folder.step for folder in catalog.folders if folder.counting(catalog.epochs) or (tainted and folder.tainted)]
    if good:
        return f"there are {', '.join(map(str, good[-8:]))}"
    return "nothing is there" if not catalog.folders else "nor is there another one that could be loaded"
