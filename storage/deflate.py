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
from storage.pack import ALIGNMENT, CRC_BYTES, PackLayout, Part, PartGeometry, chunk_crcs, stored_crcs

__all__ = ["Deflated"]

BLOCK_BYTES = 8 << 20


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
        block = bytearray()
        for part in sorted(self._layout.parts, key=lambda part: part.position):
            for piece in self._part(part):
                block += piece
                self._nbytes += len(piece)
                if len(block) >= BLOCK_BYTES:
                    yield bytes(block)
                    block = bytearray()
        if block:
            yield bytes(block)

    def _part(self, part: Part) -> Iterator[bytes]:
        """What lies before a part, its chunks, and their lengths."""
        spec = self._layout.specs[part.array]
        geometry = PartGeometry.of(spec, part.shape)
        padding = -self._nbytes % ALIGNMENT
        self._parts.append(structs.replace(part, position=self._nbytes + padding))
        yield bytes(padding)
        lengths = list[int]()
        for at in range(part.position, part.position + geometry.nbytes, geometry.stride):
            self._ready(at + geometry.stride)
            if chunk_crcs(self._buffer, at, geometry, 1) != stored_crcs(self._buffer, at, geometry, 1):
                raise Damaged(
                    f"{part.array}: the chunk at byte {at} has changed in memory since it was sealed", array=part.array
                )
            chunk = compress(self._buffer[at : at + geometry.chunk_nbytes], self._compressor, spec.itemsize)
            lengths.append(len(chunk))
            self._crc = google_crc32c.extend(self._crc, chunk[-CRC_BYTES:])
            yield chunk
        table = encode_lengths(lengths)
        self._stored.append(sum(lengths) + len(table))
        yield table

    def described(self, plain: PackManifest) -> PackManifest:
        """What the writer delivers, given what it would deliver had it not been compressed."""
        return structs.replace(
            plain,
            pack=PackInfo(name=plain.pack.name, nbytes=self._nbytes, chunks_crc32c=f"{self._crc:08x}"),
            parts=self._parts,
            compressor=self._compressor,
            stored=self._stored,
        )
