"""Layout-free checkpoints: few large packs, one index, a Zarr v3 view of it.

The public surface. Importing it costs nothing: a name is looked up in its module when it is first used, because the supervisor
of a run needs little of this and a command line must answer at once. zarr, fsspec and s3fs are imported when something that
needs them is called. (A function that has its module's name is imported from there: `from storage.diff import diff`.)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.box import Box, tiling_problems
    from storage.catalog import CheckpointInfo, CheckpointState
    from storage.checkpoint import Checkpoint
    from storage.collect import CollectReport
    from storage.commit import CommitRecord, CommitRef
    from storage.compress import Compressor
    from storage.diff import ArrayDiff
    from storage.errors import (
        AccessDenied,
        ConfigurationError,
        CoverageError,
        Damaged,
        ExpiredCredentials,
        Fenced,
        FormatError,
        NoCheckpoint,
        NoSpace,
        ObjectMissing,
        StorageError,
        Throttled,
        Unavailable,
    )
    from storage.grid import DTYPES, is_small, tile_shape
    from storage.heal import HealReport
    from storage.manifest import Manifest, PackInfo, PackManifest
    from storage.objects import ByteRange, Capabilities, ObjectInfo, ObjectStore, check_store, open_store
    from storage.pack import ArraySpec, PackLayout, Part, plan_pack, seal, write_part
    from storage.reader import LoadReport, Want
    from storage.retention import (
        CheckpointFacts,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepPinned,
        KeepYoung,
        RetentionPolicy,
        kept_steps,
    )
    from storage.run import RunStore
    from storage.verify import Problem, VerifyReport
    from storage.zarr_view import open_zarr, register_bfloat16

__all__ = [
    "DTYPES",
    "AccessDenied",
    "ArrayDiff",
    "ArraySpec",
    "Box",
    "ByteRange",
    "Capabilities",
    "Checkpoint",
    "CheckpointFacts",
    "CheckpointInfo",
    "CheckpointState",
    "CollectReport",
    "CommitRecord",
    "CommitRef",
    "Compressor",
    "ConfigurationError",
    "CoverageError",
    "Damaged",
    "ExpiredCredentials",
    "Fenced",
    "FormatError",
    "HealReport",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPinned",
    "KeepYoung",
    "LoadReport",
    "Manifest",
    "NoCheckpoint",
    "NoSpace",
    "ObjectInfo",
    "ObjectMissing",
    "ObjectStore",
    "PackInfo",
    "PackLayout",
    "PackManifest",
    "Part",
    "Problem",
    "RetentionPolicy",
    "RunStore",
    "StorageError",
    "Throttled",
    "Unavailable",
    "VerifyReport",
    "Want",
    "check_store",
    "is_small",
    "kept_steps",
    "open_store",
    "open_zarr",
    "plan_pack",
    "register_bfloat16",
    "seal",
    "tile_shape",
    "tiling_problems",
    "write_part",
]

_NAMES = {
    "storage.box": (
        "Box",
        "tiling_problems",
    ),
    "storage.catalog": (
        "CheckpointInfo",
        "CheckpointState",
    ),
    "storage.checkpoint": ("Checkpoint",),
    "storage.collect": ("CollectReport",),
    "storage.commit": (
        "CommitRecord",
        "CommitRef",
    ),
    "storage.compress": ("Compressor",),
    "storage.diff": ("ArrayDiff",),
    "storage.errors": (
        "AccessDenied",
        "ConfigurationError",
        "CoverageError",
        "Damaged",
        "ExpiredCredentials",
        "Fenced",
        "FormatError",
        "NoCheckpoint",
        "NoSpace",
        "ObjectMissing",
        "StorageError",
        "Throttled",
        "Unavailable",
    ),
    "storage.grid": (
        "DTYPES",
        "is_small",
        "tile_shape",
    ),
    "storage.heal": ("HealReport",),
    "storage.manifest": (
        "Manifest",
        "PackInfo",
        "PackManifest",
    ),
    "storage.objects": (
        "ByteRange",
        "Capabilities",
        "ObjectInfo",
        "ObjectStore",
        "check_store",
        "open_store",
    ),
    "storage.pack": (
        "ArraySpec",
        "PackLayout",
        "Part",
        "plan_pack",
        "seal",
        "write_part",
    ),
    "storage.reader": (
        "LoadReport",
        "Want",
    ),
    "storage.retention": (
        "CheckpointFacts",
        "KeepBest",
        "KeepEvery",
        "KeepLast",
        "KeepPinned",
        "KeepYoung",
        "RetentionPolicy",
        "kept_steps",
    ),
    "storage.run": ("RunStore",),
    "storage.verify": (
        "Problem",
        "VerifyReport",
    ),
    "storage.zarr_view": (
        "open_zarr",
        "register_bfloat16",
    ),
}

_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_MODULES[name]), name))


def __dir__() -> list[str]:
    return sorted(__all__)
