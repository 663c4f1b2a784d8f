"""Copying a checkpoint to another place, so that the copy is one: verified there, committed there, readable without the first.

Packs are copied byte for byte under the names of an epoch of the destination; manifest, view and commit are made anew. Before
the commit everything is read back from the destination: every checksum, and every digest against the source's.

Resumable: the epoch's record says what is being copied, so the same copy, started again, goes on in the same epoch, and a pack
that is there (packs appear whole or not at all) is not sent again. The read-back covers what an earlier try has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import google_crc32c
from msgspec import structs

from storage.belongs import copy_owner, owner_of
from storage.checkpoint import Checkpoint
from storage.commit import CommitRef
from storage.epoch import read_epochs
from storage.errors import CoverageError, Damaged, Fenced, FormatError, NoCheckpoint, ObjectMissing
from storage.keys import commit_name, pack_name, step_folder
from storage.manifest import Manifest
from storage.objects import ByteRange, ObjectStore
from storage.record import MAX_RECORD_BYTES
from storage.run import RunStore
from storage.verify import verify

__all__ = ["CopyReport", "copy_checkpoint"]

BLOCK_BYTES = 8 << 20
ATTEMPT = 0

Progress = Callable[[str, int, int], None]
"""Called with what is being done (copy, verify), bytes done, and bytes in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What a copy did. `commit` is None if the destination had the same checkpoint already."""

    step: int
    epoch: int
    nbytes: int
    copied_bytes: int
    commit: CommitRef | None


def copy_checkpoint(
    source: Checkpoint, destination: RunStore, *, take_over: bool = False, progress: Progress = lambda what, done, total: None
) -> CopyReport:
    """Copy one checkpoint and commit it; `Damaged` if what arrived is not what the source's manifest promises.

    A destination in which a training run has committed is refused unless `take_over`: the new epoch would fence that run.
    """
    step, nbytes = source.step, source.manifest.nbytes
    there = _already(destination, source)
    if there is not None:
        return CopyReport(step=step, epoch=there, nbytes=nbytes, copied_bytes=0, commit=None)
    epoch = _epoch(destination, source, take_over=take_over)
    manifest = _renamed(source.manifest, epoch)
    copied = _copy_packs(source, destination.store, manifest, progress)
    _prove(source, destination.store, manifest, progress)
    commit = destination.commit(manifest, origin=_commit_text(source))
    return CopyReport(step=step, epoch=epoch, nbytes=nbytes, copied_bytes=copied, commit=commit)


def _already(destination: RunStore, source: Checkpoint) -> int | None:
    """The epoch under which the destination has this very state; `CoverageError` if it has another one of the same step."""
    try:
        found = destination.open(source.step)
    except (NoCheckpoint, FormatError, Damaged, ObjectMissing):
        return None
    if found.manifest.digests == source.manifest.digests:
        return found.manifest.epoch
    text = f"{destination.store.url} has another checkpoint of step {source.step}: nothing there is ever replaced"
    raise CoverageError(text, problems=[text])


def _identity(source: Checkpoint) -> dict[str, object]:
    """What the epoch's record says of a copy: the same for the same state."""
    return copy_owner(source.store, f"{google_crc32c.value(source.manifest.encode()):08x}", source.step)


def _epoch(destination: RunStore, source: Checkpoint, *, take_over: bool) -> int:
    """The epoch to commit in: that of an earlier try of the same copy if nobody came after it, else a new one."""
    newest, owner = read_epochs(destination.store).newest, _identity(source)
    if newest >= 0:
        held = owner_of(destination.store, newest)
        if held == owner:
            return newest
        if "copy_of" not in held and not take_over:
            text = f"{destination.store.url} belongs to a training run (epoch {newest}), which a copy would fence out"
            raise Fenced(f"{text}; copy to another place, or say --take-over if that run has ended", "epochs")
    return destination.take_epoch(owner=owner)


def _commit_text(source: Checkpoint) -> str | None:
    """The source's commit object: the copy keeps it, should the source's be damaged one day."""
    if source.commit is None:
        return None
    return source.store.get(source.prefix + commit_name(source.commit.epoch), max_bytes=MAX_RECORD_BYTES).decode()


def _renamed(manifest: Manifest, epoch: int) -> Manifest:
    """The same index for the packs' new names."""
    packs = tuple(structs.replace(p, name=pack_name(epoch, ATTEMPT, i)) for i, p in enumerate(manifest.packs))
    return replace(manifest, epoch=epoch, attempt=ATTEMPT, packs=packs)


def _copy_packs(source: Checkpoint, store: ObjectStore, manifest: Manifest, progress: Progress) -> int:
    folder, done, copied = step_folder(manifest.step), 0, 0
    there = {info.key: info.size for info in store.list(folder)}
    for old, new in zip(source.manifest.packs, manifest.packs, strict=True):
        key = folder + new.name
        if there.get(key) != new.nbytes:
            blocks = _blocks(source.store, source.prefix + old.name, old.nbytes)
            store.put_stream(key, _counted(blocks, done, manifest.nbytes, progress))
            copied += new.nbytes
        done += new.nbytes
        progress("copy", done, manifest.nbytes)
    return copied


def _blocks(store: ObjectStore, key: str, nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, BLOCK_BYTES):
        yield store.get_range(key, ByteRange(start, min(start + BLOCK_BYTES, nbytes)))


def _counted(blocks: Iterator[bytes], done: int, total: int, progress: Progress) -> Iterator[bytes]:
    for block in blocks:
        yield block
        done += len(block)
        progress("copy", done, total)


def _prove(source: Checkpoint, store: ObjectStore, manifest: Manifest, progress: Progress) -> None:
    """Read the copy back. A pack that is wrong is removed, so that the next try sends it again."""
    folder = step_folder(manifest.step)
    report = verify(store, manifest, prefix=folder, sample=1.0, progress=lambda done, total: progress("verify", done, total))
    if report.ok:
        return
    for pack in {problem.pack for problem in report.problems if problem.pack}:
        store.delete(folder + pack)
    first = report.problems[0]
    text = f"the copy of step {manifest.step} is not what {source.store.url} promises: {first.reason}"
    raise Damaged(f"{text}; verify the source, and try again", array=first.array, pack=first.pack, offset=first.offset)
