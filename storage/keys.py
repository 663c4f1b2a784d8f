"""Names of the objects of a run: written in one place, parsed in the same one.

    epochs/e0004.json
    checkpoints/step-00001000/e0004-a0007-r00000.pack       one per writer and attempt
    checkpoints/step-00001000/e0004-a0007.manifest
    checkpoints/step-00001000/e0004-a0007.zarr.json         or e0004-a0007.zarr/<array>.json when there are very many chunks
    checkpoints/step-00001000/commit-e0004.json
    checkpoints/step-00001000/deleted-e0004.json            the commit was deleted, the packs follow after a grace period
    checkpoints/step-00001000/tainted-e0004.json            the commit is distrusted: kept, but never chosen

Epoch and attempt are in every name, so that two writers that do not know of each other never write the same object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "CHECKPOINTS",
    "EPOCHS",
    "ObjectName",
    "commit_name",
    "epoch_key",
    "manifest_name",
    "pack_name",
    "parse_epoch_key",
    "parse_key",
    "step_folder",
    "taint_name",
    "tombstone_name",
    "view_name",
]

CHECKPOINTS = "checkpoints/"
EPOCHS = "epochs/"

_EPOCH = re.compile(r"epochs/e(\d{4,9})\.json")
_FOLDER = re.compile(r"checkpoints/step-(\d{8,15})/(.+)")
_COMMIT = re.compile(r"(commit|deleted|tainted)-e(\d{4,9})\.json")
_WRITTEN = re.compile(r"e(\d{4,9})-a(\d{4,9})(?:-r(\d{5,9})\.(pack)|\.(manifest)|\.(zarr)(?:\.json|/.+))")


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What the name of an object in a step's folder says. `kind`: pack, manifest, zarr, commit, deleted, tainted or other."""

    step: int
    name: str
    kind: str
    epoch: int = -1
    attempt: int = -1


def epoch_key(epoch: int) -> str:
    """Key of an epoch's record."""
    return f"{EPOCHS}e{epoch:04d}.json"


def parse_epoch_key(key: str) -> int | None:
    """The epoch a key is the record of, or None."""
    found = _EPOCH.fullmatch(key)
    return int(found[1]) if found else None


def step_folder(step: int) -> str:
    """Folder of a step's checkpoint, with its closing slash."""
    return f"{CHECKPOINTS}step-{step:08d}/"


def pack_name(epoch: int, attempt: int, writer: int) -> str:
    """Name of a writer's pack inside the step's folder."""
    return f"e{epoch:04d}-a{attempt:04d}-r{writer:05d}.pack"


def manifest_name(epoch: int, attempt: int) -> str:
    """Name of the manifest inside the step's folder."""
    return f"e{epoch:04d}-a{attempt:04d}.manifest"


def view_name(epoch: int, attempt: int, array: str | None = None) -> str:
    """Name of the Zarr reference file inside the step's folder, of all arrays or of one."""
    stem = f"e{epoch:04d}-a{attempt:04d}.zarr"
    return f"{stem}.json" if array is None else f"{stem}/{array}.json"


def commit_name(epoch: int) -> str:
    """Name of the commit object inside the step's folder."""
    return f"commit-e{epoch:04d}.json"


def tombstone_name(epoch: int) -> str:
    """Name of the record that the commit of `epoch` was deleted on purpose, and when."""
    return f"deleted-e{epoch:04d}.json"


def taint_name(epoch: int) -> str:
    """Name of the record that the commit of `epoch` is distrusted, and why."""
    return f"tainted-e{epoch:04d}.json"


def parse_key(key: str) -> ObjectName | None:
    """What an object's key says, or None if it lies in no step's folder."""
    folder = _FOLDER.fullmatch(key)
    if folder is None:
        return None
    step, name = int(folder[1]), folder[2]
    commit = _COMMIT.fullmatch(name)
    if commit:
        return ObjectName(step, name, commit[1], int(commit[2]))
    written = _WRITTEN.fullmatch(name)
    if written:
        kind = written[4] or written[5] or written[6]
        return ObjectName(step, name, kind, int(written[1]), int(written[2]))
    return ObjectName(step, name, "other")
