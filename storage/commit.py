"""The moment a checkpoint begins to exist.

Readers look only at commits, so everything else may be written in any order and left behind by any crash: packs, then the
manifest, then the Zarr view, and at last one small commit object, created if absent. It names the manifest with size and
checksum, carries a nonce (a create that was retried and lost reads back and finds that it had won), and repeats the few facts
that listing and retention need, so that neither has to read manifests.

Fencing is checked before and after: a later epoch that is taken in between makes this commit void, and its owner must know.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated

import google_crc32c
from msgspec import Meta, Struct
from msgspec.structs import replace

from storage.epoch import Epochs, create_record, read_epochs
from storage.errors import Damaged, Fenced, FormatError, ObjectMissing
from storage.keys import commit_name, manifest_name, step_folder
from storage.lengths import starts_reader
from storage.manifest import FORMAT_VERSION, MAX_MANIFEST_BYTES, Manifest, decode
from storage.objects import ObjectStore
from storage.record import MAX_RECORD_BYTES, decode_record
from storage.zarr_view import reference_files

__all__ = ["CommitRecord", "CommitRef", "commit", "decode_commit", "read_commit", "read_manifest"]

Natural = Annotated[int, Meta(ge=0, le=1 << 53)]


class CommitRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The commit object."""

    format_version: int
    min_reader: int
    step: Natural
    epoch: Natural
    attempt: Natural
    epoch_starts_from: Annotated[int, Meta(ge=-1, le=1 << 53)] | None
    """Copy of what the epoch's record says, in case that is damaged: -1 for the very beginning, None if it is so already."""
    manifest: str
    manifest_nbytes: Natural
    manifest_crc32c: str
    nbytes: Natural
    """Bytes of all packs."""
    created_s: float
    metric: float | None
    """progress["eval_loss"] at the time, for retention."""
    nonce: str
    origin: str | None = None
    """Of a copy: the commit object that it was made from, so that a damaged one can be had back."""


@dataclass(frozen=True, slots=True)
class CommitRef:
    """A commit that counts. `created`: by this call; False if the same epoch had committed the step before."""

    step: int
    epoch: int
    attempt: int
    key: str
    manifest_key: str
    nbytes: int
    created: bool


def commit(store: ObjectStore, manifest: Manifest, *, now_s: float, origin: str | None = None) -> CommitRef:
    """Make a checkpoint whose packs are stored exist. One caller per epoch: its coordinator.

    Raises `Fenced` if a later epoch went on from an earlier step, `Damaged` or `ObjectMissing` if a pack is not what the
    manifest says. A step that this epoch has committed already stays as it is.
    """
    folder = step_folder(manifest.step)
    epochs = read_epochs(store)
    _require_right(epochs, manifest)
    key = folder + commit_name(manifest.epoch)
    earlier = _own_commit(store, key)
    if earlier is not None:
        return _ref(earlier, key, created=False)
    _require_packs(store, manifest, folder)
    data = manifest.encode()
    store.put(folder + manifest_name(manifest.epoch, manifest.attempt), data)
    find = starts_reader(store, manifest, prefix=folder)
    for name, content in reference_files(manifest, base_url=_base_url(store, folder), find=find):
        store.put(folder + name, content)
    record = replace(_record(manifest, data, epochs.starts[manifest.epoch], now_s), origin=origin)
    if not create_record(store, key, record, record.nonce):
        winner = _own_commit(store, key)
        return _ref(winner or record, key, created=False)
    _require_right(read_epochs(store), manifest)
    return _ref(record, key, created=True)


def _require_right(epochs: Epochs, manifest: Manifest) -> None:
    why = epochs.doubt(manifest.epoch) or epochs.fence(manifest.epoch, manifest.step)
    if why:
        raise Fenced(f"step {manifest.step} cannot be committed: {why}", step_folder(manifest.step))


def _own_commit(store: ObjectStore, key: str) -> CommitRecord | None:
    try:
        return read_commit(store, key)
    except ObjectMissing:
        return None


def _require_packs(store: ObjectStore, manifest: Manifest, folder: str) -> None:
    sizes = {info.key: info.size for info in store.list(folder)}
    for pack in manifest.packs:
        size = sizes.get(folder + pack.name)
        if size is None:
            raise ObjectMissing(
                f"step {manifest.step} cannot be committed: {folder}{pack.name} is not there", folder + pack.name
            )
        if size != pack.nbytes:
            text = f"step {manifest.step} cannot be committed: {folder}{pack.name} has {size} bytes instead of {pack.nbytes}"
            raise Damaged(text, folder + pack.name, pack=pack.name)


def _record(manifest: Manifest, data: bytes, starts_from: int | None, now_s: float) -> CommitRecord:
    metric = manifest.progress.get("eval_loss")
    return CommitRecord(
        format_version=manifest.format_version,
        min_reader=manifest.min_reader,
        step=manifest.step,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        epoch_starts_from=starts_from,
        manifest=manifest_name(manifest.epoch, manifest.attempt),
        manifest_nbytes=len(data),
        manifest_crc32c=f"{google_crc32c.value(data):08x}",
        nbytes=manifest.nbytes,
        created_s=now_s,
        metric=float(metric) if isinstance(metric, int | float) else None,
        nonce=uuid.uuid4().hex,
    )


def _ref(record: CommitRecord, key: str, *, created: bool) -> CommitRef:
    manifest_key = step_folder(record.step) + record.manifest
    return CommitRef(record.step, record.epoch, record.attempt, key, manifest_key, record.nbytes, created)


def _base_url(store: ObjectStore, folder: str) -> str:
    return store.url_of(folder + "x").removesuffix("/x")


def read_commit(store: ObjectStore, key: str) -> CommitRecord:
    """The commit object at `key`; `FormatError` if it is damaged or needs a newer reader."""
    return decode_commit(store.get(key, max_bytes=MAX_RECORD_BYTES), key)


def decode_commit(data: bytes, key: str) -> CommitRecord:
    """The same, of the object's bytes."""
    record = decode_record(data, CommitRecord, key=key)
    if record.min_reader > FORMAT_VERSION:
        raise FormatError(f"{key} needs a reader of version {record.min_reader}: install a newer release", key)
    if record.manifest != manifest_name(record.epoch, record.attempt) or key != step_folder(record.step) + commit_name(
        record.epoch
    ):
        raise FormatError(f"{key} names another step, epoch or manifest than its own", key)
    return record


def read_manifest(store: ObjectStore, record: CommitRecord) -> Manifest:
    """The manifest a commit names; `FormatError` if it is not, bit for bit, the one that was committed."""
    key = step_folder(record.step) + record.manifest
    data = store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    if len(data) != record.manifest_nbytes or f"{google_crc32c.value(data):08x}" != record.manifest_crc32c:
        raise FormatError(f"{key} is not the manifest that was committed", key)
    manifest = decode(data, key=key)
    if (manifest.step, manifest.epoch, manifest.attempt) != (record.step, record.epoch, record.attempt):
        raise FormatError(f"{key} belongs to another step, epoch or attempt than its commit", key)
    return manifest
