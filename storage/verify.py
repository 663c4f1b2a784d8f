"""Read a checkpoint and say everything that is wrong with it.

A load stops at the first damaged chunk; somebody who has to decide what is still usable wants the whole list. Every byte of
every pack is accounted for: chunks by their crc32c, the bytes between parts because they must be zero, the length by the
manifest, the values by the digests (which also catch packs that were exchanged for others with right checksums), the Zarr view
by making it again.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.digest import MASK, digest_tiles
from storage.errors import Damaged, FormatError, ObjectMissing
from storage.fetch import Batch, TileBlock, fetch, tile_blocks
from storage.inflate import Inflater
from storage.manifest import Manifest, PackInfo
from storage.objects import ObjectStore
from storage.pack import CRC_BYTES, PartGeometry
from storage.reader import LIMITS, SCRATCH_BYTES, Progress, block_corner, damage, wrong_chunks
from storage.reshard import PartRead, PlannedRange, Span, cut_spans
from storage.zarr_view import is_reference_of, stored_views

__all__ = ["Problem", "VerifyReport", "verify", "view_problems"]

MAX_VIEW_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. What does not apply is empty or None."""

    reason: str
    array: str = ""
    pack: str = ""
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and what was wrong with it."""

    problems: tuple[Problem, ...]
    num_arrays: int
    num_chunks: int
    read_bytes: int
    complete: bool
    """Everything was read, so that the digests were recomputed too."""
    digests: dict[str, int]
    """As recomputed; empty if not everything was read."""

    @property
    def ok(self) -> bool:
        """Nothing is wrong, as far as was read."""
        return not self.problems

    def with_problems(self, more: Sequence[Problem]) -> VerifyReport:
        """The same report with more problems."""
        return replace(self, problems=(*self.problems, *more))


class _Findings:
    """What has been found so far."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.problems: list[Problem] = []
        self.num_chunks = 0
        self.read_bytes = 0
        self.crc = 0
        """Of the checksums of the compressed chunks that were read of a pack so far."""
        self.digests: dict[str, int] = defaultdict(int)

    def take(self, batch: Batch, parts: dict[int, PartRead], inflater: Inflater) -> None:
        """Check some ranges."""
        for planned, start in batch.placed:
            at, data = planned.start, batch.bytes_of(planned, start)
            for span in planned.spans:
                self._gap(planned, data, at, span.position)
                self._add_checksums(data, planned.start, span, parts[span.part])
                at = span.stop
            self._gap(planned, data, at, planned.stop)
            self.read_bytes += planned.stop - planned.start
        for plain in inflater.batches(batch):
            for block in tile_blocks(plain, parts):
                self._block(plain, block, parts[block.part])

    def _gap(self, planned: PlannedRange, data: NDArray[np.uint8], start: int, stop: int) -> None:
        filled = np.flatnonzero(data[start - planned.start : stop - planned.start])
        if len(filled):
            at, pack = start + int(filled[0]), self.manifest.packs[planned.pack].name
            self.problems.append(Problem(f"byte {at} of {pack} lies between two parts and is not zero", pack=pack, offset=at))

    def _block(self, batch: Batch, block: TileBlock, part: PartRead) -> None:
        spec = self.manifest.arrays[part.array]
        for number in wrong_chunks(batch, block, part):
            found = damage(self.manifest, batch, part, block.start + number * part.geometry.stride)
            self.problems.append(Problem(str(found), found.array, found.pack, found.offset))
        self.digests[spec.name] += digest_tiles(batch.buffer, block.start, spec, block_corner(block, part), block.shape)
        self.num_chunks += math.prod(block.shape)

    def _add_checksums(self, data: NDArray[np.uint8], origin: int, span: Span, part: PartRead) -> None:
        if part.starts is not None:
            ends = part.starts[span.first + 1 : span.first + span.count + 1] - origin
            self.crc = google_crc32c.extend(self.crc, data[ends[:, None] - CRC_BYTES + np.arange(CRC_BYTES)].tobytes())

    def compare_pack(self, pack: PackInfo) -> None:
        """The checksums of a compressed pack against what the manifest says, which is news only where all of them hold."""
        wanted = pack.chunks_crc32c
        if wanted and f"{self.crc:08x}" != wanted and not any(p.pack == pack.name for p in self.problems):
            self.problems.append(Problem(f"{pack.name} has other chunks than those that were committed", pack=pack.name))
        self.crc = 0

    def report(self, *, complete: bool) -> VerifyReport:
        """All of it. Digests are worth something only if everything was read."""
        digests = {name: value & MASK for name, value in self.digests.items()} if complete else {}
        problems = tuple(dict.fromkeys(self.problems))
        return VerifyReport(problems, len(self.manifest.arrays), self.num_chunks, self.read_bytes, complete, digests)

    def compare_digests(self) -> None:
        """Every array's digest against the manifest's."""
        for name, wanted in self.manifest.digests.items():
            found = self.digests[name] & MASK
            if found != wanted:
                self.problems.append(Problem(f"{name}: the digest is {found:016x} instead of {wanted:016x}", array=name))


def verify(
    store: ObjectStore,
    manifest: Manifest,
    *,
    prefix: str,
    sample: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a share of all packs, drawn by `seed`; with `sample` = 1.0 everything, digests included.

    Never raises for damage that it finds. A checkpoint so small that the draw leaves nothing is read whole.
    """
    if not 0.0 < sample <= 1.0:
        raise ValueError(f"sample is a share between 0 and 1, got {sample}")
    findings, draw = _Findings(manifest), random.Random(seed)
    parts, rows = dict(_all_parts(manifest)), _rows_by_pack(manifest)
    inflater = Inflater(parts, scratch_bytes=SCRATCH_BYTES)
    for number, info in enumerate(manifest.packs):
        findings.problems += _size_problems(store, prefix + info.name, info.name, info.nbytes)
        ranges = [r for r in _pack_ranges(manifest, number, rows[number], parts) if draw.random() < sample]
        try:
            for batch in fetch(store, manifest, ranges, prefix=prefix, scratch_bytes=SCRATCH_BYTES):
                findings.take(batch, parts, inflater)
                if progress:
                    progress(findings.read_bytes, manifest.nbytes)
        except (Damaged, ObjectMissing) as problem:
            findings.problems.append(Problem(str(problem), pack=info.name))
        if sample == 1.0:
            findings.compare_pack(info)
    if sample < 1.0 and not findings.num_chunks:
        return verify(store, manifest, prefix=prefix, sample=1.0, progress=progress)
    if sample == 1.0:
        findings.compare_digests()
    return findings.report(complete=sample == 1.0)


def _all_parts(manifest: Manifest) -> Iterator[tuple[int, PartRead]]:
    for row in range(len(manifest.table)):
        number = int(manifest.table.array[row])
        spec = manifest.arrays[number]
        box = Box(*manifest.table.box(row, len(spec.shape)))
        yield row, PartRead(number, box, PartGeometry.of(spec, box.shape), (), manifest.chunk_starts(row))


def _rows_by_pack(manifest: Manifest) -> list[range]:
    edges = np.searchsorted(manifest.table.pack, np.arange(len(manifest.packs) + 1)).tolist()
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def _pack_ranges(manifest: Manifest, pack: int, rows: range, parts: dict[int, PartRead]) -> Iterator[PlannedRange]:
    """Ranges that together are the whole pack, cut between chunks."""
    start, spans = 0, list[Span]()
    for row in rows:
        part, position = parts[row], int(manifest.table.position[row])
        for span in cut_spans(row, part, position, range(part.geometry.num_chunks), LIMITS.range_bytes):
            if spans and span.stop - start > LIMITS.range_bytes:
                yield PlannedRange(pack, start, spans[-1].stop, tuple(spans))
                start, spans = spans[-1].stop, []
            spans.append(span)
    yield PlannedRange(pack, start, manifest.packs[pack].nbytes, tuple(spans))


def _size_problems(store: ObjectStore, key: str, pack: str, nbytes: int) -> list[Problem]:
    try:
        size = store.size(key)
    except ObjectMissing as missing:
        return [Problem(str(missing), pack=pack)]
    return [] if size == nbytes else [Problem(f"{pack} has {size} bytes instead of {nbytes}", pack=pack)]


def view_problems(store: ObjectStore, manifest: Manifest, *, prefix: str) -> list[Problem]:
    """Whether the stored Zarr view is the one that the manifest makes, wherever it says the packs are."""
    problems = []
    for name, wanted in stored_views(store, manifest, prefix=prefix, base_url=""):
        try:
            same = is_reference_of(store.get(prefix + name, max_bytes=MAX_VIEW_BYTES), wanted, key=prefix + name)
        except (FormatError, ObjectMissing) as problem:
            problems.append(Problem(f"the Zarr view {prefix}{name} cannot be read: {problem}"))
            continue
        if not same:
            problems.append(Problem(f"{prefix}{name} is not the Zarr view of this checkpoint"))
    return problems
