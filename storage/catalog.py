"""What exists in a run: one listing, one small read per commit, no manifest.

A step's folder may hold the leavings of several epochs and attempts; only a commit that counts makes a checkpoint of them.
Where several epochs committed the same step, the newest valid one wins. A commit that cannot be parsed is damaged, not absent:
it is shown, passed over, and never taken for free space.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from storage.commit import CommitRecord, read_commit, read_manifest
from storage.epoch import Epochs, read_epochs
from storage.errors import Damaged, FormatError, ObjectMissing
from storage.keys import CHECKPOINTS, ObjectName, parse_key, step_folder
from storage.manifest import Manifest
from storage.objects import ObjectInfo, ObjectStore
from storage.taint import read_reason

__all__ = ["Catalog", "CheckpointInfo", "CheckpointState", "StepFolder", "read_catalog", "read_checked"]

WRITTEN = ("pack", "manifest", "zarr")


class CheckpointState(StrEnum):
    """What a step's folder amounts to."""

    VALID = "valid"
    """A commit that counts."""
    DAMAGED = "damaged"
    """A commit that cannot be parsed, and none that counts."""
    FENCED = "fenced"
    """Only commits that a later epoch made void."""
    TAINTED = "tainted"
    """Only commits that a roll-back distrusts: kept, never chosen, opened when asked for by step."""
    RETIRED = "retired"
    """Deleted on purpose: its packs go after the grace period."""
    INCOMPLETE = "incomplete"
    """No commit: being written, or given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A step's folder in one line. What follows step, state and reason is the winning commit's, or the tainted one's."""

    step: int
    state: CheckpointState
    reason: str
    epoch: int = -1
    attempt: int = -1
    nbytes: int = 0
    created_s: float = 0.0
    metric: float | None = None


@dataclass(frozen=True, slots=True)
class StepFolder:
    """All objects of one step, and what its commits say."""

    step: int
    objects: tuple[tuple[ObjectName, ObjectInfo], ...]
    commits: tuple[CommitRecord, ...]
    """Those that parse, newest epoch first."""
    broken: tuple[str, ...]
    """One sentence for each that does not."""
    taints: dict[int, str] = field(default_factory=dict)
    """Epochs whose commits are distrusted, and why."""

    def winner(self, epochs: Epochs) -> CommitRecord | None:
        """The commit that counts, if there is one."""
        return next(iter(self.counting(epochs)), None)

    def counting(self, epochs: Epochs) -> list[CommitRecord]:
        """All commits that count, newest epoch first."""
        return [c for c in self.commits if c.epoch not in self.taints and not epochs.fence(c.epoch, c.step)]

    @property
    def tainted(self) -> list[CommitRecord]:
        """All commits that are distrusted, newest epoch first: whether an epoch fences them makes no difference."""
        return [c for c in self.commits if c.epoch in self.taints]

    def info(self, epochs: Epochs) -> CheckpointInfo:
        """The folder in one line."""
        record = self.winner(epochs)
        state, reason = (CheckpointState.VALID, "") if record is not None else self._why_not(epochs)
        if state is CheckpointState.TAINTED:
            record = self.tainted[0]
        if record is None:
            return CheckpointInfo(step=self.step, state=state, reason=reason)
        return CheckpointInfo(
            step=self.step,
            state=state,
            reason=reason,
            epoch=record.epoch,
            attempt=record.attempt,
            nbytes=record.nbytes,
            created_s=record.created_s,
            metric=record.metric,
        )

    def _why_not(self, epochs: Epochs) -> tuple[CheckpointState, str]:
        if self.broken:
            return CheckpointState.DAMAGED, "; ".join(self.broken)
        if self.tainted:
            return CheckpointState.TAINTED, self.taints[self.tainted[0].epoch]
        if self.commits:
            return CheckpointState.FENCED, epochs.fence(self.commits[0].epoch, self.step)
        stones, written = ([(n.epoch, n.name) for n, _ in self.objects if n.kind in kinds] for kinds in (("deleted",), WRITTEN))
        if stones and max(stones)[0] >= max(written, default=(-1, ""))[0]:
            return CheckpointState.RETIRED, "deleted on purpose; what is left goes after the grace period"
        return CheckpointState.INCOMPLETE, "there is no commit"


@dataclass(frozen=True, slots=True)
class Catalog:
    """All epochs and step folders of a run, as one listing showed them."""

    epochs: Epochs
    folders: tuple[StepFolder, ...]
    """Sorted by step."""

    def infos(self) -> list[CheckpointInfo]:
        """One line for each step folder, by step."""
        return [folder.info(self.epochs) for folder in self.folders]

    def newest_first(self) -> Iterator[tuple[StepFolder, CommitRecord | None]]:
        """Folders with the commit that counts in each, from the highest step down."""
        for folder in reversed(self.folders):
            yield folder, folder.winner(self.epochs)


def read_catalog(store: ObjectStore) -> Catalog:
    """Look at the whole run."""
    epochs = read_epochs(store)
    objects: dict[int, list[tuple[ObjectName, ObjectInfo]]] = defaultdict(list)
    for info in store.list(CHECKPOINTS):
        name = parse_key(info.key)
        if name is not None:
            objects[name.step].append((name, info))
    folders = [_read_folder(store, step, entries) for step, entries in sorted(objects.items())]
    hints = [(c.epoch, c.epoch_starts_from) for folder in folders for c in folder.commits]
    return Catalog(epochs.with_hints(hints), tuple(folders))


def _read_folder(store: ObjectStore, step: int, entries: list[tuple[ObjectName, ObjectInfo]]) -> StepFolder:
    commits, broken, taints = list[CommitRecord](), list[str](), dict[int, str]()
    for name, info in entries:
        if name.kind == "tainted":
            taints[name.epoch] = read_reason(store, info.key)
        if name.kind == "commit":
            try:
                commits.append(read_commit(store, info.key))
            except FormatError as problem:
                broken.append(str(problem))
            except ObjectMissing:
                continue  # deleted since the listing
    commits.sort(key=lambda record: -record.epoch)
    return StepFolder(step, tuple(entries), tuple(commits), tuple(broken), taints)


def read_checked(store: ObjectStore, folder: StepFolder, record: CommitRecord) -> Manifest:
    """The manifest of a commit, if it is whole and every pack it names was listed with the right size.

    `FormatError`, `ObjectMissing` or `Damaged` otherwise: it costs no request per pack, and catches what a lost or truncated
    file would make of a load an hour later.
    """
    manifest = read_manifest(store, record)
    sizes = {name.name: info.size for name, info in folder.objects}
    for pack in manifest.packs:
        key = step_folder(folder.step) + pack.name
        if pack.name not in sizes:
            raise ObjectMissing(f"{key} is not there", key)
        if sizes[pack.name] != pack.nbytes:
            raise Damaged(f"{key} has {sizes[pack.name]} bytes instead of {pack.nbytes}", key, pack=pack.name)
    return manifest
