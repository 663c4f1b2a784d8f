"""The index of a checkpoint: which arrays it has, and where each box of them lies.

A 500B model on 5,120 writers has two million boxes, so they are columns of integers, not objects: a reader holds them in a few
NumPy arrays, checks all of them at once, and finds the boxes it needs without looping over the others. The rest (arrays, packs,
digests, progress) is plain JSON at the front, which any tool shows.

    bytes 0..8     magic "ftrainM1"
    8..12          crc32c of everything that follows, little endian
    12..16         length of the header, little endian
    16..           header: JSON (see Header)
    then           the columns named in the header, each a zlib stream of little-endian unsigned integers

Where the chunks are compressed, one column more has the bytes of each part: they cannot be counted then (`storage.lengths`).

`decode` believes nothing: whatever is wrong ends in a `FormatError`, and it never allocates more than the header's own counts
ask for, which are capped.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import google_crc32c
import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from storage.columns import Column, read_columns, write_columns
from storage.compress import Compressor
from storage.errors import FormatError
from storage.pack import CRC_BYTES, ArraySpec, Part
from storage.parts import MAX_NDIM, PartTable, chunk_counts, spec_problems, table_problems
from storage.record import decode_json

__all__ = [
    "COMPRESSED_VERSION",
    "FORMAT_VERSION",
    "MAX_MANIFEST_BYTES",
    "PLAIN_VERSION",
    "Manifest",
    "PackInfo",
    "PackManifest",
    "decode",
]

FORMAT_VERSION = 2
"""The newest that this version can read."""

PLAIN_VERSION, COMPRESSED_VERSION = 1, 2
"""What is written: the oldest that says it all, so that an older reader reads what it can."""

MAX_MANIFEST_BYTES = 256 << 20
MAGIC = b"ftrainM1"
_PACK_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_RESERVED = (".", "..", "zarr.json")

Natural = Annotated[int, Meta(ge=0, le=1 << 53)]


class PackInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One pack: its name inside the checkpoint's folder, and its size."""

    name: str
    nbytes: Natural
    chunks_crc32c: str = ""
    """Of a compressed pack: the crc32c of the checksums of all its chunks. Only this tells whether bytes that were made again
    are the identical ones. (A crc of the whole pack would say nothing: bytes followed by their own crc32c have a constant one.)
    """


class PackManifest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one writer delivers: its pack, the boxes in it, and what they contribute to each array's digest."""

    pack: PackInfo
    arrays: list[ArraySpec]
    parts: list[Part]
    digests: dict[str, int]
    compressor: Compressor | None = None
    stored: list[int] = []
    """Of a compressed pack, the bytes of each part, in the order of `parts`."""

    def encode(self) -> bytes:
        """As JSON, for sending."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> PackManifest:
        """From JSON; `FormatError` if it is none."""
        return decode_json(data, cls, key="pack manifest")


class Header(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON at the front. Unknown fields are ignored: `min_reader` says who may not read on."""

    format: str
    format_version: int
    min_reader: int
    step: Natural
    epoch: Natural
    attempt: Natural
    created_s: float
    arrays: list[ArraySpec]
    digests: dict[str, str]
    packs: list[PackInfo]
    num_parts: Natural
    ndim: Annotated[int, Meta(ge=0, le=MAX_NDIM)]
    columns: list[Column]
    progress: dict[str, Any]
    compressor: Compressor | None = None


class Versions(Struct, frozen=True, kw_only=True):
    """The two fields that every future version keeps."""

    format_version: int
    min_reader: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """What a checkpoint is made of. Built by `storage.merge.merge`, or read back by `decode`."""

    step: int
    epoch: int
    attempt: int
    created_s: float
    arrays: tuple[ArraySpec, ...]
    """Sorted by name."""
    packs: tuple[PackInfo, ...]
    table: PartTable
    digests: dict[str, int]
    """Array name -> layout-free digest of its values."""
    progress: dict[str, Any]
    """The run's own record: step, data cursor, seeds. Never needed to read arrays."""
    compressor: Compressor | None = None
    stored: NDArray[np.int64] | None = None
    """Of a compressed checkpoint, the bytes of each part, as in `table`: its chunks, and the table of their lengths."""
    format_version: int = PLAIN_VERSION
    min_reader: int = PLAIN_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of all packs."""
        return sum(p.nbytes for p in self.packs)

    @property
    def plain_nbytes(self) -> int:
        """What all chunks have uncompressed, checksums included."""
        sizes = np.array([math.prod(spec.tile) * spec.itemsize + CRC_BYTES for spec in self.arrays], np.int64)
        return int((chunk_counts(self.table, self.arrays) * sizes[self.table.array]).sum()) if len(self.table) else 0

    @property
    def parts(self) -> Iterator[tuple[PackInfo, Part]]:
        """Every part and its pack, as objects. For small checkpoints and for people; code works on `table`."""
        for row in range(len(self.table)):
            yield self.packs[int(self.table.pack[row])], self.table.part(row, self.arrays)

    def array(self, name: str) -> ArraySpec:
        """The array of this name; KeyError if there is none."""
        return self.arrays[self.index[name]]

    @property
    def index(self) -> dict[str, int]:
        """Array name -> index in `arrays` and in the table."""
        cached: dict[str, int] | None = self.__dict__.get("_index")
        if cached is None:
            cached = {spec.name: i for i, spec in enumerate(self.arrays)}
            self.__dict__["_index"] = cached
        return cached

    def problems(self) -> list[str]:
        """Which rules of the format it breaks; the exact tiling of each array is `merge`'s and the reader's business."""
        found = [p for spec in self.arrays for p in spec_problems(spec)] + _name_problems(self)
        found = found or _compression_problems(self)
        return found or table_problems(self.table, self.arrays, [p.nbytes for p in self.packs], self.stored)

    def encode(self) -> bytes:
        """The manifest's bytes."""
        columns, streams = write_columns(self.table, self.stored)
        header = Header(
            format="ftrain-checkpoint",
            format_version=self.format_version,
            min_reader=self.min_reader,
            step=self.step,
            epoch=self.epoch,
            attempt=self.attempt,
            created_s=self.created_s,
            arrays=list(self.arrays),
            digests={name: f"{value:016x}" for name, value in self.digests.items()},
            packs=list(self.packs),
            num_parts=len(self.table),
            ndim=self.table.offset.shape[1],
            columns=columns,
            progress=self.progress,
            compressor=self.compressor,
        )
        raw = msgspec.json.encode(header)
        body = b"".join([struct.pack("<I", len(raw)), raw, *streams])
        return MAGIC + struct.pack("<I", google_crc32c.value(body)) + body


def decode(data: bytes, *, key: str = "manifest") -> Manifest:
    """The manifest in `data`, checked against every rule; `FormatError` naming `key` if it breaks one."""
    header, rest = _split(data, key)
    if header.format != "ftrain-checkpoint":
        raise FormatError(f"{key} is not a checkpoint manifest", key)
    compressed = header.compressor is not None
    table, stored = read_columns(
        rest, header.columns, ndim=header.ndim, num_parts=header.num_parts, compressed=compressed, key=key
    )
    manifest = Manifest(
        step=header.step,
        epoch=header.epoch,
        attempt=header.attempt,
        created_s=header.created_s,
        arrays=tuple(header.arrays),
        packs=tuple(header.packs),
        table=table,
        digests=_digests(header, key),
        progress=header.progress,
        compressor=header.compressor,
        stored=stored,
        format_version=header.format_version,
        min_reader=header.min_reader,
    )
    problems = manifest.problems()
    if problems:
        raise FormatError(f"{key} breaks the format: {'; '.join(problems[:8])}", key)
    return manifest


def _split(data: bytes, key: str) -> tuple[Header, memoryview]:
    if len(data) > MAX_MANIFEST_BYTES or len(data) < 16 or data[:8] != MAGIC:
        raise FormatError(f"{key} is not a manifest of this format ({len(data)} bytes)", key)
    crc, length = struct.unpack_from("<II", data, 8)
    if google_crc32c.value(data[12:]) != crc:
        raise FormatError(f"{key} does not match its own checksum", key)
    if 16 + length > len(data):
        raise FormatError(f"{key} ends inside its header", key)
    raw = data[16 : 16 + length]
    versions = decode_json(raw, Versions, key=key)
    if versions.min_reader > FORMAT_VERSION:
        wanted = f"needs a reader of version {versions.min_reader}, this one has version {FORMAT_VERSION}"
        raise FormatError(f"{key} {wanted}: install a newer release", key)
    return decode_json(raw, Header, key=key), memoryview(data)[16 + length :]


def _compression_problems(manifest: Manifest) -> list[str]:
    if manifest.compressor is None:
        return []
    if manifest.min_reader < COMPRESSED_VERSION:
        return [f"it is compressed, and says that a reader of version {manifest.min_reader} may read it"]
    return [
        f"pack {pack.name} is compressed, and has no checksum of its chunks: {pack.chunks_crc32c[:20]!r}"
        for pack in manifest.packs
        if not re.fullmatch("[0-9a-f]{8}", pack.chunks_crc32c)
    ]


def _digests(header: Header, key: str) -> dict[str, int]:
    if any(not re.fullmatch("[0-9a-f]{16}", text) for text in header.digests.values()):
        raise FormatError(f"{key}: a digest is not 16 hexadecimal digits", key)
    return {name: int(text, 16) for name, text in header.digests.items()}


def _name_problems(manifest: Manifest) -> list[str]:
    names, packs = [s.name for s in manifest.arrays], [p.name for p in manifest.packs]
    problems = [f"array name {n[:80]!r} is not allowed" for n in names if not _array_name_allowed(n)]
    problems += [f"pack name {n[:80]!r} is not allowed" for n in packs if not _PACK_NAME.fullmatch(n)]
    if names != sorted(set(names)) or len(set(packs)) != len(packs):
        problems.append("names are not sorted, or not unique")
    groups = {name[:i] for name in names for i, c in enumerate(name) if c == "/"}
    problems += [f"array {n} has the name of a group" for n in names if n in groups]
    if set(manifest.digests) != set(names):
        problems.append("the digests are not those of the arrays")
    return problems


def _array_name_allowed(name: str) -> bool:
    segments = name.split("/")
    return (
        len(name) <= 512
        and bool(_ARRAY_NAME.fullmatch(name))
        and not any(s in _RESERVED or s.startswith("__") for s in segments)
    )
