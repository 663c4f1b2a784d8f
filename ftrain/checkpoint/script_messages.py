"""What a script's rank and its keeper tell each other, and what a keeper leaves in the store for the one that commits."""

from __future__ import annotations

from typing import Any

import msgspec

from ftrain.checkpoint.messages import PackStored
from storage.compress import Compressor
from storage.keys import pack_name, step_folder


class Slots(msgspec.Struct, frozen=True, kw_only=True, tag="slots"):
    """Rank to keeper: memory areas, their descriptors attached."""

    names: tuple[str, ...]


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Rank to keeper: these areas are being given back."""

    names: tuple[str, ...]


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag="saved"):
    """Rank to keeper: a slot is complete, or being filled; `record` goes with it (ftrain.checkpoint.record). Without a slot:
    this rank's part is in the store already, only the commit is due.
    """

    slot: str
    step: int
    record: bytes


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag="copied"):
    """Rank to keeper: a copy that `Saved` has announced is over: the slot is complete, or why it will not be."""

    slot: str
    step: int
    error: str = ""


class PartDone(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """Keeper to rank: this rank's pack is stored, or why not."""

    step: int
    error: str = ""


class CommitDone(msgspec.Struct, frozen=True, kw_only=True, tag="commit"):
    """Rank 0's keeper to rank 0: the checkpoint exists, or why not."""

    step: int
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A part as it lies in the store until the commit: one rank's pack and record, or why there is none."""

    stored: PackStored | None = None
    record: bytes = b""
    error: str = ""


class KeeperStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a script's keeper is started with."""

    url: str
    rank: int
    world: int
    epoch: int
    attempt: int = 0
    """Of a supervised run; it goes into what is written."""
    upload_mib_s: float = 0.0
    compressor: Compressor | None = None
    keep_last: int = 0
    keep_every: int = 0
    grace_s: float = 3600.0
    patience_s: float = 600.0


ToScriptKeeper = Slots | Forget | Saved | Copied
FromScriptKeeper = PartDone | CommitDone

RECORD = "state"
"""The field of a manifest's progress that holds the record."""
WORLD = "world"


def delivery_key(step: int, epoch: int, attempt: int, rank: int) -> str:
    """Where a part waits for its commit. Readers of checkpoints ignore it."""
    return step_folder(step) + pack_name(epoch, attempt, rank).replace(".pack", ".part")


def progress_of(step: int, world: int, record: Any) -> dict[str, Any]:
    """The progress record of a script's checkpoint."""
    return {"step": step, WORLD: world, RECORD: record}
