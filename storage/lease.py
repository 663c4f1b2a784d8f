"""Who holds a run, as seen from any machine: one small object that its coordinator renews.

Epochs make a second coordinator harmless to the data; they do not keep it from starting, and then two jobs burn GPUs until one
notices. The record names the holder, so that the other can be told. When it was last renewed is judged by the store's own clock
on both sides (the object's time against that of an object written now): the clocks of two hosts need not agree.

The record decides nothing about commits. Whoever starts reads it, and may take over when the lease is over.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from storage.errors import FormatError, ObjectMissing, StorageError
from storage.keys import EPOCHS
from storage.objects import ObjectStore
from storage.record import MAX_RECORD_BYTES, decode_record, encode_record

__all__ = ["HELD_KEY", "Held", "LeaseRecord", "read_holder", "release", "renew"]

HELD_KEY = f"{EPOCHS}owner.json"


class LeaseRecord(Struct, frozen=True, kw_only=True):
    """Who holds the run. `renewed_s` by the holder's clock, for people and for stores that tell no times."""

    epoch: Annotated[int, Meta(ge=0, le=1 << 53)]
    owner: dict[str, Any]
    lease_s: Annotated[float, Meta(ge=0)]
    renewed_s: float
    released: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """A holder, and how long its lease still runs (negative: over since)."""

    record: LeaseRecord
    left_s: float

    @property
    def over(self) -> bool:
        """Whether anybody may take the run."""
        return self.record.released or self.left_s <= 0


def renew(store: ObjectStore, *, epoch: int, owner: dict[str, Any], lease_s: float) -> None:
    """Say that `owner` holds the run for `lease_s` from now."""
    record = LeaseRecord(epoch=epoch, owner=owner, lease_s=lease_s, renewed_s=time.time())
    store.put(HELD_KEY, encode_record(record))


def release(store: ObjectStore, *, epoch: int, owner: dict[str, Any]) -> None:
    """Let go of the run, unless somebody else holds it by now."""
    held = _read(store)
    if held is None or held.epoch <= epoch:
        record = LeaseRecord(epoch=epoch, owner=owner, lease_s=0.0, renewed_s=time.time(), released=True)
        store.put(HELD_KEY, encode_record(record))


def read_holder(store: ObjectStore, *, clock: Callable[[], float] = time.time) -> Held | None:
    """Who holds the run; None if nobody ever said so, or the record is damaged (then only the epochs protect the run)."""
    record = _read(store)
    if record is None:
        return None
    renewed = next((info.modified_s for info in store.list(HELD_KEY) if info.key == HELD_KEY), 0.0)
    now = _store_now(store) if renewed and not record.released else 0.0
    age = now - renewed if now else clock() - record.renewed_s
    return Held(record, record.lease_s - age)


def _read(store: ObjectStore) -> LeaseRecord | None:
    try:
        return decode_record(store.get(HELD_KEY, max_bytes=MAX_RECORD_BYTES), LeaseRecord, key=HELD_KEY)
    except (FormatError, ObjectMissing):
        return None


def _store_now(store: ObjectStore) -> float:
    """The store's clock, as the time it gives an object that is written now; 0.0 if it does not tell."""
    key = f"{EPOCHS}clock-{uuid.uuid4().hex}"
    try:
        store.put(key, b"")
        return next((info.modified_s for info in store.list(key)), 0.0)
    finally:
        with suppress(StorageError):
            store.delete(key)
