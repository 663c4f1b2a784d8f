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

from storage.digest import MASK, digest_tiles
from storage.errors import Damaged, FormatError, ObjectMissing
from storage.fetch import Batch, TileBlock, fetch, tile_blocks
from storage.inflate import Inflater
from storage.lengths import starts_reader, stored_starts
from storage.manifest import Manifest, PackInfo
from storage.objects import ObjectStore
from storage.pack import CRC_BYTES
from storage.reader import LIMITS, SCRATCH_BYTES, Progress, block_corner, damage, wrong_chunks
from storage.reshard import PartRead, PlannedRange, Span, cut_spans, part_read
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

    def parts(self, rows: range, found: Iterator[tuple[int, NDArray[np.int64] | Damaged]]) -> dict[int, PartRead]:
        """What can be read of a pack, given where the chunks of its compressed parts begin: a table may be damaged, too."""
        starts, lost = dict[int, NDArray[np.int64]](), set[int]()
        for row, each in found:
            if isinstance(each, Damaged):
                self.problems.append(Problem(str(each), each.array, each.pack, each.offset))
                lost.add(row)
            else:
                starts[row] = each
        return {row: part_read(self.manifest, row, starts.get(row)) for row in rows if row not in lost}

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
        for plain in inflater.batches(batch, parts):
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
    rows, inflater = _rows_by_pack(manifest), Inflater(scratch_bytes=SCRATCH_BYTES)
    for number, info in enumerate(manifest.packs):
        findings.problems += _size_problems(store, prefix + info.name, info.name, info.nbytes)
        try:
            parts = findings.parts(rows[number], stored_starts(store, manifest, rows[number], prefix=prefix))
            ranges = [r for r in _pack_ranges(manifest, number, rows[number], parts) if draw.random() < sample]
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


def _rows_by_pack(manifest: Manifest) -> list[range]:
    edges = np.searchsorted(manifest.table.pack, np.arange(len(manifest.packs) + 1)).tolist()
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def _pack_ranges(manifest: Manifest, pack: int, rows: range, parts: dict[int, PartRead]) -> Iterator[PlannedRange]:
    """Ranges that together are the whole pack, cut between chunks; of parts that are not in `parts` nothing."""
    start, spans = 0, list[Span]()
    for row in rows:
        position = int(manifest.table.position[row])
        if row not in parts:
            if position > start:
                yield PlannedRange(pack, start, position, tuple(spans))
            start, spans = _end(manifest, row), []
            continue
        for span in _spans(manifest, row, parts[row], position):
            if spans and span.stop - start > LIMITS.range_bytes:
                yield PlannedRange(pack, start, spans[-1].stop, tuple(spans))
                start, spans = spans[-1].stop, []
            spans.append(span)
    if manifest.packs[pack].nbytes > start:
        yield PlannedRange(pack, start, manifest.packs[pack].nbytes, tuple(spans))


def _spans(manifest: Manifest, row: int, part: PartRead, position: int) -> Iterator[Span]:
    """The chunks of a part, and the table behind compressed ones, as a span of no chunk."""
    count = part.geometry.num_chunks
    yield from cut_spans(row, part, position, range(count), LIMITS.range_bytes)
    if part.starts is not None:
        yield Span(row, count, 0, int(part.starts[-1]), _end(manifest, row))


def _end(manifest: Manifest, row: int) -> int:
    """Where a compressed part ends."""
    assert manifest.stored is not None
    return int(manifest.table.position[row] + manifest.stored[row])


def _size_problems(store: ObjectStore, key: str, pack: str, nbytes: int) -> list[Problem]:
    try:
        size = store.size(key)
    except ObjectMissing as missing:
        return [Problem(str(missing), pack=pack)]
    return [] if size == nbytes else [Problem(f"{pack} has {size} bytes instead of {nbytes}", pack=pack)]


def view_problems(store: ObjectStore, manifest: Manifest, *, prefix: str) -> list[Problem]:
    """Whether the stored Zarr view is the one that the manifest makes, wherever it says the packs are."""
    problems = []
    find = starts_reader(store, manifest, prefix=prefix)
    try:
        for name, wanted in stored_views(store, manifest, prefix=prefix, base_url="", find=find):
            problems += _one_view(store, prefix + name, wanted)
    except (Damaged, ObjectMissing) as problem:
        problems.append(Problem(f"the Zarr view cannot be compared: {problem}"))
    return problems


def _one_view(store: ObjectStore, key: str, wanted: bytes) -> list[Problem]:
    try:
        same = is_reference_of(store.get(key, max_bytes=MAX_VIEW_BYTES), wanted, key=key)
    except (FormatError, ObjectMissing) as problem:
        return [Problem(f"the Zarr view {key} cannot be read: {problem}")]
    return [] if same else [Problem(f"{key} is not the Zarr view of this checkpoint")]
