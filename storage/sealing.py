"""Checksums and digests in one pass over a pack, piece by piece, so that each piece can be on its way while the next is made.

A pack is read from memory once for its checksums, once for its digests and once to be written. In pieces that stay in the
processor's cache the second reading costs no memory bandwidth, which training wants for itself; and whoever writes the pack
need not wait for the end: what `sealing` has passed is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from storage.digest import digest_part
from storage.pack import PackLayout, PartGeometry, bands, chunk_crcs, stored_crcs

__all__ = ["sealing"]

PIECE_BYTES = 1 << 20  # of a core's cache


def sealing(
    buffer: NDArray[np.uint8],
    layout: PackLayout,
    digests: dict[str, int] | None,
    ready: Callable[[int], object] = lambda stop: None,
) -> Iterator[int]:
    """Write the crc32c behind each chunk of a filled pack; yields after each piece up to which byte the pack is final.

    `digests` (all arrays of the layout, 0 each at first) becomes this pack's share of each array's digest, mod 2^64; None:
    they are not wanted. `ready(stop)` is called before the bytes up to `stop` are looked at, and may wait for them.
    """
    for part in sorted(layout.parts, key=lambda part: part.position):
        spec = layout.specs[part.array]
        for band in bands(spec, part, PIECE_BYTES):
            geometry = PartGeometry.of(spec, band.shape)
            count = geometry.num_chunks
            ready(band.position + geometry.nbytes)
            stored_crcs(buffer, band.position, geometry, count)[:] = chunk_crcs(buffer, band.position, geometry, count)
            if digests is not None:
                digests[part.array] = (digests[part.array] + digest_part(buffer, spec, band)) % 2**64
            yield band.position + geometry.nbytes
