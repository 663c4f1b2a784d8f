"""The right bytes of a compressed pack, which are more than the right values.

A compressor may make other bytes tomorrow, and then nothing would lie where the manifest says. So a damaged chunk is copied
from a donor that was compressed alike, if there is one. Otherwise its values are compressed again; and because the pack's own
checksums are summed up in the manifest, the result is the identical pack or none: it is never written on trust.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.compress import compress, inflate
from storage.errors import Damaged, FormatError, ObjectMissing
from storage.lengths import encode_lengths, read_starts
from storage.objects import ByteRange
from storage.pack import CRC_BYTES, ArraySpec, Part, PartGeometry, iter_chunks, write_part
from storage.reshard import PartRead, Span, cut_spans, part_read

__all__ = ["NotIdentical", "RebuiltCompressed"]

BLOCK_BYTES = 8 << 20


class NotIdentical(Damaged):
    """The values are right, and the bytes are not those that were written."""


class RebuiltCompressed:
    """The right bytes of a pack, in blocks; may be read again, so that a write that failed can be tried again.

    Raises `NotIdentical` at the end if the bytes are not the ones that were committed, `Damaged` if no donor has a chunk.
    """

    def __init__(self, target: Checkpoint, number: int, donors: Sequence[Checkpoint], distrusted: Collection[str]) -> None:
        """`distrusted`: arrays of which no stored chunk is believed, whatever its checksum says."""
        self._target, self._number, self._pack = target, number, target.manifest.packs[number]
        self._donors, self._distrusted = donors, distrusted
        self.num_chunks = 0
        """Chunks that came from a donor."""
        assert target.manifest.stored is not None
        self._ends = target.manifest.table.position + target.manifest.stored
        self._crc = 0
        self._last: tuple[Checkpoint, int, NDArray[np.int64]] | None = None
        self._ahead: tuple[Checkpoint, str, ByteRange, bytes] | None = None

    def __iter__(self) -> Iterator[bytes]:
        self.num_chunks, self._crc, at = 0, 0, 0
        for block, start in self._blocks():
            yield bytes(start - at) + block
            at = start + len(block)
        if f"{self._crc:08x}" != self._pack.chunks_crc32c:
            raise self._not_identical()
        yield bytes(self._pack.nbytes - at)

    def _not_identical(self) -> NotIdentical:
        text = f"{self._pack.name}: every chunk could be had, and together they are not the bytes that were committed"
        return NotIdentical(f"{text}: this compressor makes others; copy the donor's checkpoint instead", pack=self._pack.name)

    def _blocks(self) -> Iterator[tuple[bytes, int]]:
        """Runs of chunks and tables, and where each begins."""
        manifest = self._target.manifest
        for row in np.flatnonzero(manifest.table.pack == self._number).tolist():
            part, spec = manifest.table.part(row, manifest.arrays), manifest.arrays[int(manifest.table.array[row])]
            at, lengths = part.position, list[int]()
            for chunks in self._part(row, spec, part):
                self._crc = google_crc32c.extend(self._crc, b"".join([chunk[-CRC_BYTES:] for chunk in chunks]))
                lengths += [len(chunk) for chunk in chunks]
                yield b"".join(chunks), at
                at += sum(lengths[-len(chunks) :])
            table = encode_lengths(lengths)
            if self._ends[row] != at + len(table):
                raise self._not_identical()
            yield table, at

    def _part(self, row: int, spec: ArraySpec, part: Part) -> Iterator[list[bytes]]:
        """The chunks of a part, some at a time: those that are here, if its table can be read, else all from donors."""
        boxes = [box for _, box in iter_chunks(part, spec)]
        try:
            starts = read_starts(self._target.store, self._target.manifest, [row], prefix=self._target.prefix)[row]
        except (Damaged, ObjectMissing):
            yield from ([self._from_donors(spec, box, None)] for box in boxes)
            return
        read = part_read(self._target.manifest, row, starts)
        for span in cut_spans(row, read, part.position, range(len(boxes)), BLOCK_BYTES):
            yield list(self._chunks(spec, read, span, boxes))

    def _chunks(self, spec: ArraySpec, part: PartRead, span: Span, boxes: Sequence[Box]) -> Iterator[bytes]:
        assert part.starts is not None
        stored = None if spec.name in self._distrusted else self._stored(span)
        values = np.empty(part.geometry.chunk_nbytes, np.uint8)
        for number in range(span.first, span.first + span.count):
            start, stop = part.starts[number : number + 2].tolist()
            chunk = stored[start - span.position : stop - span.position] if stored is not None else None
            if chunk is not None and not inflate(chunk, values):
                yield chunk.tobytes()
            else:
                yield self._from_donors(spec, boxes[number], None if spec.name in self._distrusted else stop - start)

    def _stored(self, span: Span) -> NDArray[np.uint8] | None:
        try:
            data = self._target.store.get_range(self._target.prefix + self._pack.name, ByteRange(span.position, span.stop))
        except (Damaged, ObjectMissing):
            return None
        return np.frombuffer(data, np.uint8)

    def _from_donors(self, spec: ArraySpec, box: Box, nbytes: int | None) -> bytes:
        """A chunk, of this length if it is known: copied if a donor was compressed alike, else made of its values."""
        self.num_chunks += 1
        reasons = list[str]()
        for make in (self._copied, self._made):
            for donor in self._donors:
                try:
                    found = make(donor, spec, box)
                except (Damaged, ObjectMissing, FormatError) as problem:
                    reasons.append(str(problem))
                    continue
                if found is not None and len(found) == (nbytes or len(found)):
                    return found
                if found is not None:
                    reasons.append(f"{donor.url} gives {len(found)} compressed bytes instead of {nbytes}")
        text = (
            f"{spec.name}: elements from {box.offset} are damaged here, and no donor has the same bytes: {'; '.join(reasons)}"
        )
        raise Damaged(text, array=spec.name, pack=self._pack.name)

    def _copied(self, donor: Checkpoint, spec: ArraySpec, box: Box) -> bytes | None:
        """The donor's own bytes of the chunk; None if it was compressed otherwise, or not at all."""
        manifest = donor.manifest
        theirs = manifest.array(spec.name)
        if manifest.compressor != self._target.manifest.compressor or theirs.tile != spec.tile:
            return None
        rows, ndim = manifest.table.rows_of(manifest.index[spec.name]), len(spec.shape)
        inside = (manifest.table.offset[rows, :ndim] <= np.array(box.offset, np.int64)).all(axis=1)
        row = int(rows[inside & (manifest.table.stop[rows, :ndim] >= np.array(box.stop, np.int64)).all(axis=1)][0])
        part = manifest.table.part(row, manifest.arrays)
        geometry, starts = PartGeometry.of(theirs, part.shape), self._donor_starts(donor, row)
        cell = [(b - p) // t for b, p, t in zip(box.offset, part.offset, spec.tile, strict=True)]
        number = int(np.ravel_multi_index(cell, geometry.grid)) if cell else 0
        key = donor.prefix + manifest.packs[int(manifest.table.pack[row])].name
        data = self._donor_bytes(donor, key, ByteRange(*starts[number : number + 2].tolist()), int(starts[-1]))
        problem = inflate(np.frombuffer(data, np.uint8), np.empty(geometry.chunk_nbytes, np.uint8))
        if problem:
            raise Damaged(f"{donor.url}: its chunk {problem}", array=spec.name)
        return data

    def _donor_bytes(self, donor: Checkpoint, key: str, wanted: ByteRange, end: int) -> bytes:
        """Bytes of a donor's pack. Of chunks that are asked for one after the other more and more at a time, up to `end`: a
        pack that is lost would else be a request for each.
        """
        ahead = 0
        if self._ahead is not None and self._ahead[:2] == (donor, key):
            _, _, had, data = self._ahead
            if had.start <= wanted.start and wanted.stop <= had.stop:
                return data[wanted.start - had.start : wanted.stop - had.start]
            ahead = min(2 * len(had), BLOCK_BYTES) if had.start < wanted.start <= had.stop else 0
        rng = ByteRange(wanted.start, max(wanted.stop, min(wanted.start + ahead, end)))
        try:
            self._ahead = (donor, key, rng, bytes(donor.store.get_range(key, rng)))
        except Damaged:  # perhaps behind what is wanted
            return donor.store.get_range(key, wanted)
        return self._ahead[3][: len(wanted)]

    def _donor_starts(self, donor: Checkpoint, row: int) -> NDArray[np.int64]:
        """Kept for one part at a time: its chunks are asked for one after the other."""
        if self._last is None or self._last[:2] != (donor, row):
            self._last = (donor, row, read_starts(donor.store, donor.manifest, [row], prefix=donor.prefix)[row])
        return self._last[2]

    def _made(self, donor: Checkpoint, spec: ArraySpec, box: Box) -> bytes:
        """The donor's values, compressed as the manifest says."""
        compressor = self._target.manifest.compressor
        assert compressor is not None
        buffer = np.zeros(PartGeometry.of(spec, spec.tile).stride, np.uint8)
        write_part(
            buffer, spec, Part(array=spec.name, offset=box.offset, shape=box.shape, position=0), donor.read(spec.name, box)
        )
        return compress(buffer[:-CRC_BYTES], compressor, spec.itemsize)
