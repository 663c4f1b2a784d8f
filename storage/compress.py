"""Lossless compression of chunks: off by default, for links that carry less than a processor can press together.

Each chunk is compressed on its own, by a codec that Zarr has too (`blosc`, from numcodecs), so that a chunk can still be read
alone and stock zarr opens the checkpoint. Blosc puts the bits of like weight of all elements together before it compresses:
trained numbers are noise but for their signs and exponents, and plain LZ4 finds nothing in them at all.

The values of a chunk are known to the byte before it is inflated, so a frame that claims anything else is refused before a
single byte is allocated for it: there is nothing to gain from a decompression bomb. numcodecs is imported when it is needed.
"""

from __future__ import annotations

from typing import Annotated, Literal

import google_crc32c
import numpy as np
from msgspec import Meta, Struct, convert
from numpy.typing import NDArray

from storage.pack import CRC_BYTES

__all__ = ["MAX_EXTRA_BYTES", "MIN_STORED_BYTES", "Compressor", "compress", "compressor_named", "inflate"]

Bytes = NDArray[np.uint8]

HEADER_BYTES = 16
MIN_STORED_BYTES = HEADER_BYTES + CRC_BYTES
MAX_EXTRA_BYTES = HEADER_BYTES + CRC_BYTES
"""What a chunk may have more than its values: Blosc stores what it cannot press as it is, behind its header."""

BLOSC_VERSION = 2
CODECS = (1, 4)
"""LZ4 and Zstandard in a frame's flags: no other decoder is let near bytes that nobody vouches for."""

SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}


class Compressor(Struct, frozen=True, kw_only=True):
    """What every chunk of a checkpoint is compressed with: the configuration of Zarr's codec of this name.

    A reader needs none but the name; the rest says how the identical bytes are made again.
    """

    name: Literal["blosc"] = "blosc"
    cname: Literal["lz4", "zstd"] = "lz4"
    clevel: Annotated[int, Meta(ge=1, le=9)] = 5
    shuffle: Literal["noshuffle", "shuffle", "bitshuffle"] = "bitshuffle"

    def __str__(self) -> str:
        return f"{self.cname} {self.clevel}"


def compressor_named(name: str, level: int) -> Compressor | None:
    """What a configuration means by lz4 or zstd, at a level of 1 to 9; None for "none"."""
    return None if name == "none" else convert({"cname": name, "clevel": level}, Compressor)


def compress(values: Bytes, compressor: Compressor, itemsize: int) -> bytes:
    """A chunk as it is stored: the values as a Blosc frame, and the frame's crc32c in four little-endian bytes.

    Measured on one core, a trained state in chunks of 16 KiB: 0.9 CPU seconds per GiB with LZ4, 3 to 5 with Zstandard up to 5.
    """
    from numcodecs import blosc

    blosc.use_threads = False  # else the main thread shares a large chunk out, and blocks lie in the order they are finished in
    elements = values.view(f"<u{itemsize}")  # whose size is what is shuffled
    frame: bytes = blosc.compress(elements, compressor.cname.encode(), compressor.clevel, SHUFFLES[compressor.shuffle])
    crc: int = google_crc32c.value(frame)
    return frame + crc.to_bytes(CRC_BYTES, "little")


def inflate(stored: Bytes, out: Bytes) -> str:
    """Write the values of a stored chunk to `out`, which has exactly their size; why that cannot be done, or ""."""
    from numcodecs import blosc

    frame = stored[:-CRC_BYTES]
    if google_crc32c.value(frame) != int.from_bytes(stored[-CRC_BYTES:].tobytes(), "little"):
        return "does not match its crc32c"
    problem = _header_problem(frame, out.nbytes)
    if problem:
        return problem
    try:
        blosc.decompress(frame, out)
    except (RuntimeError, ValueError) as error:
        return f"cannot be inflated: {error}"
    return ""


def _header_problem(frame: Bytes, nbytes: int) -> str:
    """What a frame says of itself that cannot be, or ""."""
    if frame.nbytes < HEADER_BYTES:
        return "is too short to be a Blosc frame"
    version, codec = int(frame[0]), int(frame[2]) >> 5
    inflated, block, stored = np.frombuffer(frame[4:HEADER_BYTES].tobytes(), "<u4").tolist()
    if version != BLOSC_VERSION:
        return f"is a Blosc frame of version {version}, not {BLOSC_VERSION}"
    if codec not in CODECS:
        return f"is a Blosc frame of codec {codec}, which is neither LZ4 nor Zstandard"
    if inflated != nbytes or stored != frame.nbytes:
        return f"claims to be {stored} bytes that inflate to {inflated}, and is {frame.nbytes} bytes for {nbytes}"
    return "" if 0 < block <= nbytes else f"claims blocks of {block} bytes in {nbytes}"
