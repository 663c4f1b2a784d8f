"""From a pack as it lies in memory to a compressed one, block by block.

The memory tier stays as it is: a snapshot is compressed on its way out, one chunk at a time, so a keeper needs some megabytes
for it, whatever the size of the state. Where each chunk lies is known only afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import google_crc32c
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from storage.compress import Compressor, compress
from storage.errors import Damaged
from storage.lengths import encode_lengths
from storage.manifest import PackInfo, PackManifest
from storage.pack import ALIGNMENT, CRC_BYTES, ArraySpec, PackLayout, Part, PartGeometry, bands, chunk_crcs, stored_crcs

__all__ = ["Deflated"]

BLOCK_BYTES = 4 << 20
PIECE_BYTES = 1 << 20  # of a core's cache, as when it was sealed


class Deflated:
    """The blocks of a sealed pack, compressed. May be read again; `described` is about the last time.

    A chunk that does not match its own checksum any more raises `Damaged`: what memory has lost is not stored under a new one.
    """

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        layout: PackLayout,
        compressor: Compressor,
        *,
        ready: Callable[[int], object] = lambda stop: None,
    ) -> None:
        """`ready(stop)` is called before the bytes of `buffer` up to `stop` are looked at, and may wait for them."""
        self._buffer, self._layout, self._compressor, self._ready = buffer, layout, compressor, ready
        self._parts, self._stored, self._nbytes, self._crc = list[Part](), list[int](), 0, 0

    def __iter__(self) -> Iterator[bytes]:
        self._parts, self._stored, self._nbytes, self._crc = [], [], 0, 0
        pieces, size = list[bytes](), 0
        for part in sorted(self._layout.parts, key=lambda part: part.position):
            for piece in self._part(part):
                pieces.append(piece)
                size += len(piece)
                self._nbytes += len(piece)
                if size >= BLOCK_BYTES:
                    yield b"".join(pieces)
                    pieces, size = [], 0
        if size:
            yield b"".join(pieces)

    def _part(self, part: Part) -> Iterator[bytes]:
        """What lies before a part, its chunks, and their lengths."""
        spec = self._layout.specs[part.array]
        geometry = PartGeometry.of(spec, part.shape)
        padding = -self._nbytes % ALIGNMENT
        self._parts.append(structs.replace(part, position=self._nbytes + padding))
        yield bytes(padding)
        lengths = list[int]()
        for band in bands(spec, part, PIECE_BYTES):
            stop = band.position + PartGeometry.of(spec, band.shape).nbytes
            self._ready(stop)
            self._require_sealed(spec, band)
            for at in range(band.position, stop, geometry.stride):
                chunk = compress(self._buffer[at : at + geometry.chunk_nbytes], self._compressor, spec.itemsize)
                lengths.append(len(chunk))
                self._crc = google_crc32c.extend(self._crc, chunk[-CRC_BYTES:])
                yield chunk
        table = encode_lengths(lengths)
        self._stored.append(sum(lengths) + len(table))
        yield table

    def _require_sealed(self, spec: ArraySpec, band: Part) -> None:
        """Every chunk has the checksum that stands behind it."""
        geometry = PartGeometry.of(spec, band.shape)
        count = geometry.num_chunks
        crcs = chunk_crcs(self._buffer, band.position, geometry, count)
        wrong = np.flatnonzero(crcs != stored_crcs(self._buffer, band.position, geometry, count)).tolist()
        if wrong:
            at = band.position + wrong[0] * geometry.stride
            text = f"{spec.name}: the chunk at byte {at} of the snapshot has changed in memory since it was sealed"
            raise Damaged(text, array=spec.name)

    def described(self, plain: PackManifest) -> PackManifest:
        """What the writer delivers, given what it would deliver had it not been compressed."""
        return structs.replace(
            plain,
            pack=PackInfo(name=plain.pack.name, nbytes=self._nbytes, chunks_crc32c=f"{self._crc:08x}"),
            parts=self._parts,
            compressor=self._compressor,
            stored=self._stored,
        )
