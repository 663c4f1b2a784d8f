"""Putting damaged bytes back from a copy: the only rewrite there is, and it rewrites what was there.

A donor is another checkpoint of the same state (the local tier, a mirror, a copy made by hand): every array has the same shape
and the same digest in both manifests. Its layout, its packs and its epoch may differ. A damaged chunk is taken from it as
values, checked by the donor's own checksum, laid out as the format says, and has then the bytes it had: the edge of a tile is
zeros, a checksum follows from the rest. What cannot be had right is not put back at all.

Safe against crashes: a pack is replaced as a whole, by one atomic write, and after each of them the checkpoint is at least as
good as before. At the end everything is verified, digests included. A damaged commit comes back from whoever kept its bytes
(`storage.heal_commit`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from storage.catalog import StepFolder, read_catalog
from storage.checkpoint import Checkpoint
from storage.commit import CommitRecord, read_manifest
from storage.errors import Damaged, FormatError, NoCheckpoint, ObjectMissing
from storage.heal_commit import heal_commits, is_manifest_of, manifest_candidates
from storage.heal_compressed import NotIdentical, RebuiltCompressed
from storage.keys import step_folder
from storage.lengths import starts_reader
from storage.manifest import Manifest
from storage.objects import ByteRange, ObjectStore
from storage.pack import (
    ArraySpec,
    PackLayout,
    Part,
    PartGeometry,
    bands,
    chunk_crcs,
    iter_chunks,
    seal,
    stored_crcs,
    write_part,
)
from storage.reader import Progress
from storage.verify import Problem, VerifyReport, view_problems
from storage.zarr_view import stored_views

__all__ = ["HealReport", "heal"]

BLOCK_BYTES = 8 << 20
ROUNDS = 3
"""Damage may hide damage: a pack of another checkpoint shows only when nothing is missing any more."""

Buffer = NDArray[np.uint8]


@dataclass(slots=True)
class HealReport:
    """What was put back."""

    step: int
    objects: list[str] = field(default_factory=list)
    """Keys that were written."""
    num_chunks: int = 0
    """Chunks that were wrong, or could not be read or believed, and came from a donor."""
    before: tuple[Problem, ...] = ()
    """What was wrong."""


def heal(store: ObjectStore, step: int, donors: Sequence[Checkpoint], *, progress: Progress | None = None) -> HealReport:
    """Heal the checkpoint of `step`; nothing is written if it is whole. `Damaged` lists what no donor could give.

    `progress` as in `Checkpoint.verify`, for each of the two verifications.
    """
    report = HealReport(step)
    folder, record = _find(store, step, donors, report)
    manifest = _manifest(store, record, folder, donors, report)
    target = Checkpoint(store, manifest, step_folder(step), commit=record)
    found = target.verify(progress=progress)
    report.before = found.problems
    if found.ok:
        return report
    same = [donor for donor in donors if _is_same(manifest, donor.manifest)]
    if not same:
        raise Damaged(f"step {step}: no donor holds the same state (shapes and digests of all arrays)", step_folder(step))
    for _ in range(ROUNDS):
        for number, pack in enumerate(manifest.packs):
            distrusted = _distrusted(target, found, number)
            if distrusted is not None:
                _put_back(target, number, same, distrusted, report)
                report.objects.append(target.prefix + pack.name)
        _heal_views(target, report)
        found = target.verify(progress=progress)
        if found.ok:
            return report
    reasons = "; ".join(problem.reason for problem in found.problems[:4])
    raise Damaged(f"step {step} is still damaged after {len(report.objects)} objects were put back: {reasons}")


def _find(store: ObjectStore, step: int, donors: Sequence[Checkpoint], report: HealReport) -> tuple[StepFolder, CommitRecord]:
    catalog = read_catalog(store)
    for folder in catalog.folders:
        if folder.step == step and folder.broken:
            report.objects += heal_commits(store, folder, donors)
            catalog = read_catalog(store)
    for folder in catalog.folders:
        record = folder.winner(catalog.epochs) or next(iter(folder.tainted), None) if folder.step == step else None
        if record is not None:
            return folder, record
        if folder.step == step:
            info = folder.info(catalog.epochs)
            raise NoCheckpoint(f"step {step} cannot be healed: it is {info.state}: {info.reason}", candidates=[info.reason])
    raise NoCheckpoint(f"{store.url} has no checkpoint of step {step}")


def _manifest(
    store: ObjectStore, record: CommitRecord, folder: StepFolder, donors: Sequence[Checkpoint], report: HealReport
) -> Manifest:
    """The manifest that was committed; put back first if it is damaged and a donor's turns out to be the same one."""
    try:
        return read_manifest(store, record)
    except (FormatError, ObjectMissing) as problem:
        key = step_folder(record.step) + record.manifest
        for donor in donors:
            for data in manifest_candidates(donor, record, folder):
                if is_manifest_of(data, record):
                    store.put(key, data)
                    report.objects.append(key)
                    return read_manifest(store, record)
        raise FormatError(f"{problem}, and no donor's manifest is the one that was committed", key) from problem


def _is_same(manifest: Manifest, other: Manifest) -> bool:
    """Whether two manifests describe the same state."""
    shapes = [[(spec.name, spec.shape, spec.dtype) for spec in each.arrays] for each in (manifest, other)]
    return shapes[0] == shapes[1] and bool(manifest.digests) and manifest.digests == other.digests


def _put_back(
    target: Checkpoint, number: int, donors: Sequence[Checkpoint], distrusted: frozenset[str], report: HealReport
) -> None:
    """Write a pack as it was."""
    key = target.prefix + target.manifest.packs[number].name
    if target.manifest.compressor is None:
        target.store.put_stream(key, _Rebuilt(target, number, donors, distrusted, report))
        return
    rebuilt = RebuiltCompressed(target, number, donors, distrusted)
    try:
        target.store.put_stream(key, rebuilt)
    except NotIdentical:  # some chunk here is another one than was written, though its own checksum is right
        rebuilt = RebuiltCompressed(target, number, donors, target.names)
        target.store.put_stream(key, rebuilt)
    report.num_chunks += rebuilt.num_chunks


def _distrusted(target: Checkpoint, found: VerifyReport, number: int) -> frozenset[str] | None:
    """Arrays of a pack whose every chunk must come from a donor; None if the pack need not be touched.

    A checksum that fails shows which chunk is wrong. A digest that differs although all checksums hold (a pack of another
    checkpoint in this one's place) does not: then nothing that the array has is believed.
    """
    name = target.manifest.packs[number].name
    held = {part.array for pack, part in target.manifest.parts if pack.name == name}
    by_checksum = {p.array for p in found.problems if p.array and p.offset is not None}
    by_digest = {p.array for p in found.problems if p.array and p.offset is None}
    lost = {p.pack for p in found.problems if p.pack and not p.array and p.offset is None}
    if name in lost:
        return frozenset(held)
    wrong = (by_digest - by_checksum) & held
    if not lost and wrong:
        return frozenset(wrong)
    return frozenset() if any(p.pack == name for p in found.problems) else None


class _Rebuilt:
    """The right bytes of a pack, in blocks; may be read again, so that a write that failed can be tried again."""

    def __init__(
        self, target: Checkpoint, number: int, donors: Sequence[Checkpoint], distrusted: frozenset[str], report: HealReport
    ) -> None:
        self._target, self._pack = target, target.manifest.packs[number]
        self._donors, self._distrusted, self._report = donors, distrusted, report
        self._parts = sorted(
            (part for pack, part in target.manifest.parts if pack.name == self._pack.name), key=lambda part: part.position
        )

    def __iter__(self) -> Iterator[bytes]:
        at = 0
        for part in self._parts:
            yield bytes(part.position - at)
            spec = self._target.array(part.array)
            for band in bands(spec, part, BLOCK_BYTES):
                yield self._band(spec, band).tobytes()
            at = part.position + PartGeometry.of(spec, part.shape).nbytes
        yield bytes(self._pack.nbytes - at)

    def _band(self, spec: ArraySpec, band: Part) -> Buffer:
        """The bytes of some rows of tiles: as they are if every checksum holds, else a donor's; chunk by chunk if need be."""
        stored = None if band.array in self._distrusted else self._stored(spec, band)
        wrong = PartGeometry.of(spec, band.shape).num_chunks if stored is None else _num_wrong(stored, spec, band)
        if stored is not None and not wrong:
            return stored
        buffer, problem = self._from_donors(spec, band)
        if buffer is None and band.shape != spec.tile:
            pieces = [self._band(spec, chunk) for chunk in _chunks(spec, band)]
            if len(pieces) > 1:
                return np.concatenate(pieces)
        if buffer is None:
            text = f"{spec.name}: elements from {band.offset} are damaged here and in every donor: {problem}"
            raise Damaged(text, array=spec.name, pack=self._pack.name)
        self._report.num_chunks += wrong
        return buffer

    def _stored(self, spec: ArraySpec, band: Part) -> Buffer | None:
        size = PartGeometry.of(spec, band.shape).nbytes
        key, rng = self._target.prefix + self._pack.name, ByteRange(band.position, band.position + size)
        try:
            return np.frombuffer(self._target.store.get_range(key, rng), np.uint8)
        except (Damaged, ObjectMissing):
            return None

    def _from_donors(self, spec: ArraySpec, band: Part) -> tuple[Buffer | None, str]:
        """The band as the format lays it out, from the first donor that has it; or why none has."""
        reasons = list[str]()
        moved = Part(array=band.array, offset=band.offset, shape=band.shape, position=0)
        for donor in self._donors:
            try:
                values = donor.read(spec.name, band.box)
            except (Damaged, ObjectMissing, FormatError) as problem:
                reasons.append(str(problem))
                continue
            buffer = np.zeros(PartGeometry.of(spec, band.shape).nbytes, np.uint8)
            write_part(buffer, spec, moved, values)
            seal(buffer, PackLayout({spec.name: spec}, (moved,), buffer.nbytes))
            return buffer, ""
        return None, "; ".join(reasons)


def _chunks(spec: ArraySpec, band: Part) -> Iterator[Part]:
    for position, box in iter_chunks(band, spec):
        yield Part(array=band.array, offset=box.offset, shape=box.shape, position=position)


def _num_wrong(buffer: Buffer, spec: ArraySpec, band: Part) -> int:
    geometry = PartGeometry.of(spec, band.shape)
    crcs = chunk_crcs(buffer, 0, geometry, geometry.num_chunks)
    return int((crcs != stored_crcs(buffer, 0, geometry, geometry.num_chunks)).sum())


def _heal_views(target: Checkpoint, report: HealReport) -> None:
    """Write the Zarr view anew where it is not the one the manifest makes."""
    if view_problems(target.store, target.manifest, prefix=target.prefix):
        find = starts_reader(target.store, target.manifest, prefix=target.prefix)
        views = stored_views(target.store, target.manifest, prefix=target.prefix, base_url=target.url, find=find)
        for name, content in views:
            target.store.put(target.prefix + name, content)
            report.objects.append(target.prefix + name)
