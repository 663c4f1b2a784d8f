"""A damaged commit is put back from whoever kept its very bytes.

Nothing can make a commit anew: it says who won, and has a nonce. But a twin of the run (a replicated bucket, a copy made by
hand) has it under the same name, and a copy made by `storage.copy` carries it along. What is put back must be a commit of
exactly this place by its own checksum, and name, by size and checksum, the manifest that is here or that the copy can give. A
commit that is *missing* is not damaged: that checkpoint does not exist, and stays so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import google_crc32c
from msgspec import structs

from storage.catalog import StepFolder
from storage.checkpoint import Checkpoint
from storage.commit import CommitRecord, decode_commit
from storage.errors import FormatError, ObjectMissing, StorageError
from storage.keys import ObjectName, step_folder
from storage.manifest import MAX_MANIFEST_BYTES, decode
from storage.objects import ObjectStore
from storage.record import MAX_RECORD_BYTES

__all__ = ["heal_commits", "is_manifest_of", "manifest_candidates"]


def heal_commits(store: ObjectStore, folder: StepFolder, donors: Sequence[Checkpoint]) -> list[str]:
    """Put back what commits of a step cannot be parsed and some donor has; returns their keys."""
    known = {record.epoch for record in folder.commits}
    keys = [info.key for name, info in folder.objects if name.kind == "commit" and name.epoch not in known]
    healed = list[str]()
    for key in keys:
        for donor in donors:
            data = next((data for data in _candidates(donor, key) if _is_commit_of(store, folder, key, data, donor)), None)
            if data is not None:
                store.put(key, data)
                healed.append(key)
                break
    return healed


def _candidates(donor: Checkpoint, key: str) -> Iterator[bytes]:
    """What the donor says that the commit at `key` was."""
    with suppress(StorageError):  # most donors are no twins of this run
        yield donor.store.get(key, max_bytes=MAX_RECORD_BYTES)
    if donor.commit is not None and donor.commit.origin is not None:
        yield donor.commit.origin.encode()


def _is_commit_of(store: ObjectStore, folder: StepFolder, key: str, data: bytes, donor: Checkpoint) -> bool:
    try:
        record = decode_commit(data, key)
    except FormatError:
        return False
    manifest_key = step_folder(record.step) + record.manifest
    try:
        here = store.get(manifest_key, max_bytes=MAX_MANIFEST_BYTES)
        decode(here, key=manifest_key)
    except (ObjectMissing, FormatError):  # lost as well: the donor's is the one only if it is about the packs that are here
        packs = {name.name for name, _ in folder.objects if name.kind == "pack" and _written_by(name) == _written_by(record)}
        mine = [candidate for candidate in manifest_candidates(donor, record, folder) if is_manifest_of(candidate, record)]
        return any(packs == {pack.name for pack in decode(data, key=manifest_key).packs} for data in mine)
    return is_manifest_of(here, record)


def _written_by(what: ObjectName | CommitRecord) -> tuple[int, int]:
    return what.epoch, what.attempt


def manifest_candidates(donor: Checkpoint, record: CommitRecord, folder: StepFolder) -> Iterator[bytes]:
    """What the damaged manifest may have been: the donor's, and that with the names that a copy changes."""
    manifest = donor.manifest
    yield manifest.encode()
    names = sorted(name.name for name, _ in folder.objects if name.kind == "pack")
    if len(names) == len(manifest.packs):
        packs = tuple(structs.replace(pack, name=name) for name, pack in zip(names, manifest.packs, strict=True))
        yield replace(manifest, epoch=record.epoch, attempt=record.attempt, packs=packs).encode()


def is_manifest_of(data: bytes, record: CommitRecord) -> bool:
    """Whether a manifest object is, bit for bit, the one that was committed."""
    return (len(data), f"{google_crc32c.value(data):08x}") == (record.manifest_nbytes, record.manifest_crc32c)
