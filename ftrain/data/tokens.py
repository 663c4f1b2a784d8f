"""Token files: a flat array of tokens beside an index of sequences and documents, in Megatron's `.bin`/`.idx` format.

The format is the one that most tokenised corpora already have, so nobody prepares their data twice. Both files are memory
mapped: opening a terabyte costs an index scan, and ranks on one machine share the pages. Everything the index claims
is checked against the file sizes first, because a truncated copy otherwise shows as noise in the loss, or as SIGBUS.

`PREFIX.bin`   the tokens of all sequences, back to back, little-endian
`PREFIX.idx`   9 bytes   b"MMIDIDX" and two zero bytes
               8 bytes   version, 1
               1 byte    dtype code (`DTYPES`)
               8 bytes   n, number of sequences
               8 bytes   d, number of document boundaries = documents + 1
               4 n bytes int32: tokens in each sequence
               8 n bytes int64: byte offset of each sequence in the .bin
               8 d bytes int64: first sequence of each document, then n
               (n bytes  int8: mode of each sequence; only in multimodal files, ignored here)
"""

from __future__ import annotations

import bisect
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftrain.data.errors import TokenFileError
from ftrain.data.sampler import Ints

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, str] = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_CODES = {name: code for code, name in DTYPES.items()}
_BLOCK = 1 << 20  # index entries looked at together while checking


def token_dtype(vocab: int) -> str:
    """The dtype Megatron chooses for a vocabulary: 2 bytes where they suffice."""
    return "uint16" if vocab < 65_500 else "int32"


def encode_header(dtype: str, num_sequences: int, num_boundaries: int) -> bytes:
    """The 34 bytes an index begins with."""
    return HEADER.pack(MAGIC, VERSION, _CODES[dtype], num_sequences, num_boundaries)


class TokenFile:
    """A `.bin`/`.idx` pair, memory mapped and checked; read-only, safe to share between threads and over a fork."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        index = _map(prefix + ".idx")
        data = _map(prefix + ".bin")
        self.dtype, self.num_sequences, num_boundaries = _header(index, prefix + ".idx")
        self._sizes, self._pointers, self._documents = _columns(index, self.num_sequences, num_boundaries, prefix + ".idx")
        self.num_documents = num_boundaries - 1
        self.num_tokens = self._check(data)
        self._tokens = data.view(np.dtype(self.dtype).newbyteorder("<"))

    def __len__(self) -> int:
        return self.num_tokens

    def tokens(self, start: int, stop: int) -> Ints:
        """Tokens [start, stop) of the whole stream, as a copy."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"{self.prefix}: tokens [{start}, {stop}) of {self.num_tokens}")
        return self._tokens[start:stop].astype(np.int64)

    def document(self, number: int) -> Ints:
        """The tokens of one document."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"{self.prefix}: document {number} of {self.num_documents}")
        return self.tokens(self._document_start(number), self._document_start(number + 1))

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of all tokens, as they lie in the .bin; mapped, not read."""
        return self._tokens.view(np.uint8)

    @property
    def sequence_sizes(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence."""
        sizes: npt.NDArray[np.int32] = self._sizes
        return sizes

    @property
    def document_boundaries(self) -> npt.NDArray[np.int64]:
        """First sequence of each document, then the number of sequences."""
        boundaries: npt.NDArray[np.int64] = self._documents
        return boundaries

    def document_starts(self, start: int, stop: int) -> Ints:
        """Positions in [start, stop) at which a document begins, ascending; found by bisection, nothing is kept in memory."""
        numbers = range(self.num_documents)
        first = bisect.bisect_left(numbers, start, key=self._document_start)
        last = bisect.bisect_left(numbers, stop, lo=first, key=self._document_start)
        return np.unique(np.array([self._document_start(number) for number in range(first, last)], np.int64))

    def _document_start(self, number: int) -> int:
        sequence = int(self._documents[number])
        if sequence == self.num_sequences:  # the end, or an empty last document
            return self.num_tokens
        return int(self._pointers[sequence]) // np.dtype(self.dtype).itemsize

    def _check(self, data: npt.NDArray[np.uint8]) -> int:
        """The number of tokens, once index and data agree."""
        itemsize = np.dtype(self.dtype).itemsize
        position = 0
        for first in range(0, self.num_sequences, _BLOCK):
            sizes = self._sizes[first : first + _BLOCK].astype(np.int64)
            ends = position + np.cumsum(sizes) * itemsize
            wrong = np.flatnonzero((sizes < 0) | (self._pointers[first : first + _BLOCK] != ends - sizes * itemsize))
            if wrong.size:
                number = first + int(wrong[0])
                claim = f"{self._sizes[number]} tokens at byte {self._pointers[number]}"
                raise self._error(f"sequence {number} ({claim}) does not follow the one before")
            position = int(ends[-1])
        if position != len(data):
            raise self._error(f"the index describes {position} bytes of tokens, {self.prefix}.bin has {len(data)}")
        self._check_documents()
        return position // itemsize

    def _check_documents(self) -> None:
        boundaries = self._documents
        ends = (int(boundaries[0]), int(boundaries[-1]))
        if ends != (0, self.num_sequences):
            raise self._error(f"documents cover the sequences {ends}, not (0, {self.num_sequences})")
        for first in range(0, len(boundaries) - 1, _BLOCK):
            if np.any(np.diff(boundaries[first : first + _BLOCK + 1]) < 0):
                raise self._error("document boundaries go backwards")

    def _error(self, message: str) -> TokenFileError:
        return TokenFileError(message + "; prepare or copy the pair again", self.prefix + ".idx")


def _map(path: str) -> npt.NDArray[np.uint8]:
    """The bytes of a file, memory mapped read-only."""
    try:
        with Path(path).open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        hint = (
            "; a token file is named by its prefix, without .bin or .idx" if path.count(".bin") + path.count(".idx") > 1 else ""
        )
        raise TokenFileError(f"cannot be read ({error.strerror}){hint}", path) from error


def _header(index: npt.NDArray[np.uint8], path: str) -> tuple[str, int, int]:
    """(dtype, number of sequences, number of document boundaries)."""
    if len(index) < HEADER.size:
        raise TokenFileError(f"has {len(index)} bytes, an index begins with {HEADER.size}", path)
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise TokenFileError(f"begins with {magic!r}, not with {MAGIC!r}: not a Megatron index", path)
    if version != VERSION:
        raise TokenFileError(f"has version {version}, this reader knows {VERSION}", path)
    name = DTYPES.get(code, "")
    if not name or name.startswith("float"):
        raise TokenFileError(f"has dtype code {code} ({name or 'unknown'}); tokens are integers: 1 to 5 or 8", path)
    if num_boundaries < 1:
        raise TokenFileError("has no document boundary", path)
    return name, num_sequences, num_boundaries


def _columns(index: npt.NDArray[np.uint8], num_sequences: int, num_boundaries: int, path: str) -> tuple[Any, Any, Any]:
    """(sizes, pointers, document boundaries) as views of the index."""
    lengths = (4 * num_sequences, 8 * num_sequences, 8 * num_boundaries)
    wanted = HEADER.size + sum(lengths)
    if len(index) not in (wanted, wanted + num_sequences):  # one byte of mode per sequence in multimodal files
        raise TokenFileError(
            f"has {len(index)} bytes; {num_sequences} sequences and {num_boundaries} document boundaries take {wanted}", path
        )
    columns, start = [], HEADER.size
    for length, dtype in zip(lengths, ("<i4", "<i8", "<i8"), strict=True):
        columns.append(index[start : start + length].view(dtype))
        start += length
    return columns[0], columns[1], columns[2]
