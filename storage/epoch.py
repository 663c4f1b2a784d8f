"""Who may commit. An epoch is a term of office: whoever takes the next number owns the run from then on.

Numbers are taken by create-if-absent, so two coordinators that start at once get different ones. Each epoch names the step its
history starts from, and that fences everybody before it: a commit (epoch e, step s) counts unless some later epoch starts from
a step before s. So a zombie that wakes up and commits step 1200 after the new coordinator went back to 1000 cannot poison the
new history, while a commit of step 1000 that was late but not contradicted still counts.

An epoch record that cannot be read must not make a run unreadable, nor bring a discarded history back: commits repeat what
their epoch starts from, and whoever would commit under doubt is refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta, Struct

from storage.errors import FormatError, ObjectMissing, StorageError
from storage.keys import EPOCHS, epoch_key, parse_epoch_key
from storage.objects import ObjectStore
from storage.probe import creates_atomically
from storage.record import MAX_RECORD_BYTES, decode_record, encode_record

__all__ = ["EpochRecord", "Epochs", "copy_epoch", "create_record", "read_epochs", "take_epoch"]

MAX_EPOCH = 10**9 - 1
MAX_TRIES = 1000

SETTLE_S = 2.0
"""Where create-if-absent is not atomic: how long after a create the record is read back."""

Natural = Annotated[int, Meta(ge=0, le=1 << 53)]


class EpochRecord(Struct, frozen=True, kw_only=True):
    """`starts_from`: the commit this history goes on from; None: from the very beginning."""

    epoch: Natural
    starts_from: Natural | None
    owner: dict[str, Any]
    nonce: str
    created_s: float


@dataclass(frozen=True, slots=True)
class Epochs:
    """All epochs of a run, by number."""

    starts: dict[int, int | None]
    """The step each one goes on from; -1: from the very beginning; None: its record cannot be read."""

    @property
    def newest(self) -> int:
        """The highest number taken; -1 if none is."""
        return max(self.starts, default=-1)

    def with_hints(self, hints: Iterable[tuple[int, int | None]]) -> Epochs:
        """The same, where unreadable epochs start from what their commits (epoch, start) say."""
        known = {epoch: start for epoch, start in hints if start is not None}
        return replace(self, starts={e: known.get(e) if s is None else s for e, s in self.starts.items()})

    def fence(self, epoch: int, step: int) -> str:
        """Why a commit does not count; empty if it does. Unreadable epochs fence nobody."""
        for later, start in sorted(self.starts.items()):
            if later > epoch and start is not None and start < step:
                return (
                    f"epoch {later} went on from {_step_text(start)}, so step {step} of epoch {epoch} is no part of the history"
                )
        return ""

    def doubt(self, epoch: int) -> str:
        """Why it is uncertain whether `epoch` may still commit; empty if it is not."""
        if epoch not in self.starts:
            return f"epoch {epoch} was never taken"
        unreadable = [e for e, start in self.starts.items() if e > epoch and start is None]
        return f"the record of the later epoch {unreadable[0]} cannot be read" if unreadable else ""


def _step_text(start: int) -> str:
    return "the very beginning" if start < 0 else f"step {start}"


def read_epochs(store: ObjectStore) -> Epochs:
    """All epochs taken so far."""
    starts: dict[int, int | None] = {}
    for info in store.list(EPOCHS):
        epoch = parse_epoch_key(info.key)
        if epoch is not None:
            starts[epoch] = _read_start(store, info.key, epoch)
    return Epochs(starts)


def _read_start(store: ObjectStore, key: str, epoch: int) -> int | None:
    try:
        record = decode_record(store.get(key, max_bytes=MAX_RECORD_BYTES), EpochRecord, key=key)
    except (FormatError, ObjectMissing):
        return None
    if record.epoch != epoch:
        return None
    return -1 if record.starts_from is None else record.starts_from


def take_epoch(
    store: ObjectStore, *, owner: dict[str, Any], starts_from: Callable[[Epochs], int | None], now_s: float
) -> tuple[int, int | None]:
    """Take the next free number; returns it and the step it starts from, which is asked anew whenever somebody was faster."""
    for _ in range(MAX_TRIES):
        epochs = read_epochs(store)
        number, start = epochs.newest + 1, starts_from(epochs)
        if number > MAX_EPOCH:
            raise FormatError(
                f"{epoch_key(epochs.newest)} is the last epoch there can be: nobody took a thousand million of them"
            )
        record = EpochRecord(epoch=number, starts_from=start, owner=owner, nonce=uuid.uuid4().hex, created_s=now_s)
        if create_record(store, epoch_key(number), record, record.nonce):
            return number, start
    raise StorageError(f"{store.url}: {MAX_TRIES} epochs were taken by others while this process tried to take one", EPOCHS)


def copy_epoch(store: ObjectStore, epoch: int, *, starts_from: int | None, owner: dict[str, Any], now_s: float) -> None:
    """Record an epoch that was taken in another store, in a store whose commits follow that one's. Replaces an earlier record.

    Only for a tier that one coordinator writes, and whose history is that of the run it belongs to.
    """
    record = EpochRecord(epoch=epoch, starts_from=starts_from, owner=owner, nonce=uuid.uuid4().hex, created_s=now_s)
    store.put(epoch_key(epoch), encode_record(record))


class _Nonce(Struct, frozen=True, kw_only=True):
    nonce: str


def create_record(store: ObjectStore, key: str, record: Struct, nonce: str) -> bool:
    """Create-if-absent of a record that carries a nonce; True if this caller's record is the one that stands there.

    A create whose answer was lost and that was tried again finds its own object: the nonce tells. So it does where create has
    more than one winner: there it is read back after a while, when a racer's write would show.
    """
    atomic = creates_atomically(store)
    won = (atomic or not store.exists(key)) and store.create(key, encode_record(record))
    if won and atomic:
        return True
    if won:
        time.sleep(SETTLE_S)
    try:
        return decode_record(store.get(key, max_bytes=MAX_RECORD_BYTES), _Nonce, key=key).nonce == nonce
    except FormatError:
        return False
    except ObjectMissing as missing:
        raise StorageError(f"{key} could not be created, yet it is not there: the store contradicts itself", key) from missing
