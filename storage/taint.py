"""Checkpoints that somebody has reason to distrust, and that are kept all the same.

A run that diverges goes back to before the onset and goes on from there. What lies after the onset must not be resumed from by
accident; but a diagnosis of the onset is a guess, the old history may turn out to be the right one, and it holds work that was
paid for. So it is neither chosen nor collected: a small record beside each commit says why, and whoever names the step gets it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from storage.errors import FormatError, ObjectMissing
from storage.keys import step_folder, taint_name
from storage.objects import ObjectStore
from storage.record import MAX_RECORD_BYTES, decode_record, encode_record

__all__ = ["Taint", "read_reason", "write_taint"]

Natural = Annotated[int, Meta(ge=0, le=1 << 53)]

MAX_REASON = 1000


class Taint(Struct, frozen=True, kw_only=True):
    """`epoch` and `attempt`: those of the commit that is distrusted."""

    step: Natural
    epoch: Natural
    attempt: Natural
    reason: str
    tainted_s: float


def read_reason(store: ObjectStore, key: str) -> str:
    """Why the commit beside the record `key` is distrusted. A record that cannot be read distrusts, too."""
    try:
        record = decode_record(store.get(key, max_bytes=MAX_RECORD_BYTES), Taint, key=key)
    except (FormatError, ObjectMissing) as problem:
        return f"the record that says why cannot be read: {problem}"
    return record.reason or "no reason was given"


def write_taint(store: ObjectStore, taint: Taint) -> None:
    """Distrust a commit from now on."""
    short = replace(taint, reason=taint.reason[:MAX_REASON])
    store.put(step_folder(taint.step) + taint_name(taint.epoch), encode_record(short))
