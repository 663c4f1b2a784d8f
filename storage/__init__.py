"""Layout-free checkpoints: few large packs, one index, a Zarr v3 view of it.

The public surface. Importing it costs NumPy and msgspec; zarr, fsspec and s3fs are imported when something that needs them is
called.
"""

from storage.box import Box, tiling_problems
from storage.catalog import CheckpointInfo, CheckpointState
from storage.checkpoint import Checkpoint
from storage.collect import CollectReport
from storage.commit import CommitRecord, CommitRef
from storage.diff import ArrayDiff, diff
from storage.errors import (
    AccessDenied,
    ConfigurationError,
    CoverageError,
    Damaged,
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
from storage.manifest import Manifest, PackInfo, PackManifest
from storage.merge import merge
from storage.objects import ByteRange, Capabilities, ObjectInfo, ObjectStore, check_store, open_store
from storage.pack import ArraySpec, PackLayout, Part, plan_pack, seal, write_part
from storage.reader import LoadReport, Want
from storage.retention import CheckpointFacts, KeepBest, KeepEvery, KeepLast, KeepPinned, KeepYoung, RetentionPolicy, kept_steps
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
    "ConfigurationError",
    "CoverageError",
    "Damaged",
    "Fenced",
    "FormatError",
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
    "diff",
    "is_small",
    "kept_steps",
    "merge",
    "open_store",
    "open_zarr",
    "plan_pack",
    "register_bfloat16",
    "seal",
    "tile_shape",
    "tiling_problems",
    "write_part",
]
