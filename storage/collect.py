"""Deleting what is not wanted any more, in an order that no crash can turn into a loss.

A checkpoint goes in two moves. First its commit: from then on nobody starts to read it. Then, after a grace period, its packs,
so that whoever had opened it before can finish; that is why readers need no lease. When the period began is written down
before the commit goes (`deleted-eNNNN.json`, renewed at each try), so a crash in between cannot shorten it, and the record is
the last thing to go. Where there is no room for that record, the commit stays, unless there is no grace to count: then all
of it goes at once.

What failed saves and dead attempts left behind is swept after the same period, by the store's own clock. Never touched are: the
newest checkpoint that opens, anything in a step with a damaged commit (somebody may still save it), whatever the caller says is
being written, and the newest attempt of the newest epoch, which may be at work right now. Tainted checkpoints (`storage.taint`)
go only if that is asked for: nobody who goes back because he distrusts his results means to delete them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from storage.catalog import Catalog, StepFolder, read_catalog, read_checked
from storage.commit import CommitRecord, read_manifest
from storage.errors import Damaged, FormatError, NoSpace, ObjectMissing
from storage.keys import ObjectName, commit_name, step_folder, tombstone_name
from storage.objects import ObjectInfo, ObjectStore
from storage.record import MAX_RECORD_BYTES, decode_record, encode_record
from storage.retention import CheckpointFacts, RetentionPolicy, kept_steps

__all__ = ["CollectReport", "Tombstone", "collect"]


class Tombstone(Struct, frozen=True, kw_only=True):
    """A commit that was deleted on purpose, and when."""

    step: int
    epoch: int
    attempt: int
    deleted_s: float


@dataclass(slots=True)
class CollectReport:
    """What a collection did."""

    kept: list[int] = field(default_factory=list)
    """Steps whose checkpoints stay."""
    tainted: list[int] = field(default_factory=list)
    """Steps that also, or only, have a checkpoint which a roll-back distrusts: it stays unless its collection is asked for."""
    deleted_commits: list[int] = field(default_factory=list)
    """Steps whose checkpoints ceased to exist."""
    deleted_objects: int = 0
    freed_bytes: int = 0
    skipped: list[str] = field(default_factory=list)
    """What was left alone although nobody wants it, and why."""


def collect(
    store: ObjectStore,
    policies: Sequence[RetentionPolicy],
    *,
    now_s: float,
    grace_s: float,
    live: frozenset[str] = frozenset(),
    writers: frozenset[tuple[int, int]] = frozenset(),
    tainted: bool = False,
) -> CollectReport:
    """Apply the policies and sweep. One caller at a time: the coordinator. `tainted`: those that a roll-back distrusts go, too.

    `live`: names or keys of packs that are being written. `writers`: (epoch, attempt) of those that may still write or
    wait for a commit, besides the newest one that storage knows of.
    """
    catalog, report = read_catalog(store), CollectReport()
    kept, unwritten = _kept(store, catalog, policies, now_s, report), list[Tombstone]()
    report.kept = sorted(kept)
    if kept:
        for folder, winner in catalog.newest_first():
            untainted = [c for c in folder.commits if c.epoch not in folder.taints and folder.step not in kept]
            doomed = untainted + (folder.tainted if tainted else [])
            if doomed and not folder.broken:
                try:
                    unwritten += _delete_commits(store, doomed, now_s, tight=grace_s <= 0)
                except NoSpace as problem:  # what is deleted already is swept all the same: that is what makes room
                    report.skipped.append(f"step {folder.step}: {problem}")
                    continue
                report.deleted_commits += [folder.step] if winner in doomed or len(doomed) > len(untainted) else []
    catalog = read_catalog(store)
    report.tainted = [folder.step for folder in catalog.folders if folder.tainted]
    sweep = _Sweep(store, catalog, report, now_s=now_s, grace_s=grace_s, spared=live | writers)
    for folder in sweep.catalog.folders:
        sweep.folder(folder, [stone for stone in unwritten if stone.step == folder.step])
    return report


def _kept(
    store: ObjectStore, catalog: Catalog, policies: Sequence[RetentionPolicy], now_s: float, report: CollectReport
) -> frozenset[int]:
    """Steps to keep; none at all only if no checkpoint opens, and then nothing may be deleted."""
    facts, good, newer = list[CheckpointFacts](), False, list[int]()
    for folder, winner in catalog.newest_first():
        if winner is None:
            continue
        if not good:
            good = _opens(store, folder, winner, report)
            if not good:
                newer.append(folder.step)
                continue
        facts.append(CheckpointFacts(folder.step, winner.created_s, winner.metric))
    return kept_steps(policies, facts, now_s=now_s) | frozenset(newer) if good else frozenset()


def _opens(store: ObjectStore, folder: StepFolder, record: CommitRecord, report: CollectReport) -> bool:
    try:
        read_checked(store, folder, record)
    except (Damaged, FormatError, ObjectMissing) as problem:
        report.skipped.append(f"step {record.step}: {problem}")
        return False
    return True


def _delete_commits(store: ObjectStore, records: Sequence[CommitRecord], now_s: float, *, tight: bool) -> list[Tombstone]:
    """Each after its tombstone is written. NoSpace if there is no room for that; if `tight`, those that were not written are
    returned instead.
    """
    unwritten = []
    for record in records:
        stone = Tombstone(step=record.step, epoch=record.epoch, attempt=record.attempt, deleted_s=now_s)
        try:
            store.put(_stone_key(stone), encode_record(stone))
        except NoSpace:
            if not tight:
                raise
            unwritten.append(stone)
        store.delete(step_folder(record.step) + commit_name(record.epoch))
    return unwritten


def _stone_key(stone: Tombstone) -> str:
    return step_folder(stone.step) + tombstone_name(stone.epoch)


class _Sweep:
    """Deletes the objects of one folder after the other that belong to no checkpoint and to no writer."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: Catalog,
        report: CollectReport,
        *,
        now_s: float,
        grace_s: float,
        spared: frozenset[str | tuple[int, int]],
    ) -> None:
        """`spared`: names, keys, and (epoch, attempt) of writers, that are left alone."""
        self.store, self.catalog, self.report = store, catalog, report
        self.now_s, self.grace_s, self.spared = now_s, grace_s, spared
        epoch = catalog.epochs.newest
        attempts = [n.attempt for f in catalog.folders for n, _ in f.objects if n.epoch == epoch]
        self.at_work = (epoch, max(attempts, default=-1))

    def folder(self, folder: StepFolder, unwritten: Sequence[Tombstone]) -> None:
        """Sweep one step's folder; `unwritten` tombstones count as well."""
        if folder.broken:
            self.report.skipped.append(f"step {folder.step}: {'; '.join(folder.broken)}")
            return
        stones = {**dict(self._tombstones(folder)), **{_stone_key(stone): stone for stone in unwritten}}
        doomed = [(n, i) for n, i in folder.objects if self._doomed(n, i, folder, stones)]
        if doomed:
            try:
                used = self._used(folder)
            except (FormatError, ObjectMissing) as problem:
                self.report.skipped.append(f"step {folder.step}: {problem}")
                return
            doomed = [(n, i) for n, i in doomed if n.name not in used]
        for _, info in sorted(doomed, key=lambda entry: (entry[0].kind != "pack", entry[0].kind != "zarr", entry[1].key)):
            self._delete(info)
        self._bury(folder, stones, {info.key for _, info in doomed})
        for name, info in folder.objects:
            if name.kind == "tainted" and all(name.epoch != record.epoch for record in folder.commits):
                self.store.delete(info.key)

    def _doomed(self, name: ObjectName, info: ObjectInfo, folder: StepFolder, stones: dict[str, Tombstone]) -> bool:
        """Whether an object belongs to nobody, and has for the whole grace period.

        Packs of other attempts may still be in use.
        """
        written_by = (name.epoch, name.attempt)
        if name.kind not in ("pack", "manifest", "zarr") or self.spared & {name.name, info.key}:
            return False
        if any(written_by == (c.epoch, c.attempt) for c in folder.commits):
            return False
        covering = [s.deleted_s for s in stones.values() if written_by <= (s.epoch, s.attempt)]
        if covering:
            return self.now_s - max(covering) >= self.grace_s
        if written_by in self.spared:  # not a deleted commit's: it may still become part of one
            return False
        return written_by < self.at_work and info.modified_s > 0 and self.now_s - info.modified_s >= self.grace_s

    def _used(self, folder: StepFolder) -> set[str]:
        """Packs that the remaining commits name: they may be those of an earlier epoch."""
        return {pack.name for record in folder.commits for pack in read_manifest(self.store, record).packs}

    def _tombstones(self, folder: StepFolder) -> Iterator[tuple[str, Tombstone]]:
        for name, info in folder.objects:
            if name.kind == "deleted":
                try:
                    yield info.key, decode_record(self.store.get(info.key, max_bytes=MAX_RECORD_BYTES), Tombstone, key=info.key)
                except (FormatError, ObjectMissing) as problem:
                    self.report.skipped.append(str(problem))

    def _bury(self, folder: StepFolder, stones: dict[str, Tombstone], deleted: set[str]) -> None:
        """Remove the tombstones that cover nothing any more."""
        held = {(record.epoch, record.attempt) for record in folder.commits}
        written = [(n, i) for n, i in folder.objects if n.kind in ("pack", "manifest", "zarr") and i.key not in deleted]
        left = {(n.epoch, n.attempt) for n, _ in written} - held
        for key, stone in stones.items():
            if not any(written_by <= (stone.epoch, stone.attempt) for written_by in left):
                self.store.delete(key)

    def _delete(self, info: ObjectInfo) -> None:
        self.store.delete(info.key)
        self.report.deleted_objects += 1
        self.report.freed_bytes += info.size
