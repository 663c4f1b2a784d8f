"""Whose a place is: a training run's, or one for the copies of some run. Read from its epochs before anything is written there.

A copy takes an epoch of the place that it goes to, and so fences whoever else writes there: a mirror in another run's folder
would end that run, and its retention would delete what the other one has saved.
"""

from __future__ import annotations

from typing import Any

from storage.epoch import EpochRecord
from storage.errors import FormatError, ObjectMissing
from storage.keys import EPOCHS, epoch_key, parse_epoch_key
from storage.objects import ObjectStore
from storage.record import MAX_RECORD_BYTES, decode_record

__all__ = ["copy_owner", "no_mirror_of", "owner_of"]

_NONE = EpochRecord(epoch=0, starts_from=None, owner={}, nonce="", created_s=0.0)  # of a place that has no first epoch


def copy_owner(source: ObjectStore, what: str, step: int) -> dict[str, Any]:
    """What the epoch of a copy says of itself. `run`: of a run that was copied whole, or moved, it stays the same."""
    return {"copy_of": what, "step": step, "from": source.url, "run": _run_id(source)}


def owner_of(store: ObjectStore, epoch: int) -> dict[str, Any]:
    """What the taker of an epoch has said of itself; nothing if its record cannot be read."""
    record = _record(store, epoch)
    return record.owner if record is not None else {}


def no_mirror_of(run: ObjectStore, place: ObjectStore) -> str:
    """Why copies of a run may not go to a place unasked, empty if they may: it holds none yet, or such of this run.

    Where the run itself was brought back from that place, copies of the one it was count as its own.
    """
    taken = _taken(place)
    if not taken:
        return ""
    newest = max(taken)
    held = owner_of(place, newest)
    if "copy_of" not in held:
        return f"{place.url} belongs to a training run (epoch {newest}), which a copy would fence out"
    ours = held.get("from", run.url) == run.url or held.get("run") == _run_id(run)
    if ours or _first(run).owner.get("from") == place.url:
        return ""
    return f"{place.url} holds copies of another run, {held['from']}"


def _run_id(store: ObjectStore) -> str:
    """The same as long as a run lives: the mark of its first epoch. Empty before there is one."""
    return _first(store).nonce


def _first(store: ObjectStore) -> EpochRecord:
    taken = _taken(store)
    return (_record(store, min(taken)) if taken else None) or _NONE


def _taken(store: ObjectStore) -> list[int]:
    """The numbers alone: a mirror has an epoch for each of thousands of copies, and reading a record is a request."""
    numbers = (parse_epoch_key(info.key) for info in store.list(EPOCHS))
    return [number for number in numbers if number is not None]


def _record(store: ObjectStore, epoch: int) -> EpochRecord | None:
    key = epoch_key(epoch)
    try:
        return decode_record(store.get(key, max_bytes=MAX_RECORD_BYTES), EpochRecord, key=key)
    except (FormatError, ObjectMissing):
        return None
