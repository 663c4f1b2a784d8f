"""Writes a token file as a stream, and shows it only when it is whole.

Both files are written under temporary names in their folder and renamed at the end, data before index: a pair that can be
opened is complete, and a broken preparation leaves what was there before.
"""

from __future__ import annotations

import array
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from ftrain.data.errors import DataError
from ftrain.data.tokens import TokenFile, encode_header, token_dtype

_COPY = 16 << 20  # bytes copied at once
_MOST_TOKENS = 2**31 - 1  # of one sequence: its size is an int32


class TokenWriter:
    """`with TokenWriter(prefix, vocab=257) as out: out.add(tokens); out.end_document()`. One writer per prefix at a time."""

    def __init__(self, prefix: str, *, vocab: int) -> None:
        self.prefix = prefix
        self.vocab = vocab
        self.dtype = token_dtype(vocab)
        self.num_tokens = 0
        self._sizes = array.array("i")
        self._boundaries = array.array("q", [0])
        folder = Path(prefix).parent
        folder.mkdir(parents=True, exist_ok=True)
        self._temporary = str(folder / f".{Path(prefix).name}.{os.getpid()}-{secrets.token_hex(4)}")
        self._data: BinaryIO = Path(self._temporary + ".bin").open("wb")  # noqa: SIM115  closed by close and abort

    @property
    def num_documents(self) -> int:
        """Documents ended so far."""
        return len(self._boundaries) - 1

    def add(self, tokens: npt.ArrayLike) -> None:
        """Appends one sequence to the current document; an empty one is left out."""
        values = np.asarray(tokens)
        if values.size and (values.min() < 0 or values.max() >= self.vocab):
            wrong = int(values.min() if values.min() < 0 else values.max())
            raise DataError(f"token {wrong} is outside the vocabulary [0, {self.vocab})", self.prefix)
        for first in range(0, values.size, _MOST_TOKENS):
            part = values[first : first + _MOST_TOKENS].astype("<" + np.dtype(self.dtype).str[1:])
            self._data.write(part.tobytes())
            self._sizes.append(part.size)
            self.num_tokens += part.size

    def end_document(self) -> None:
        """Closes the current document; what is added next belongs to another one."""
        self._boundaries.append(len(self._sizes))

    def extend(self, file: TokenFile) -> None:
        """Appends all documents of a token file of the same dtype, its sequences as they are."""
        if file.dtype != self.dtype:
            raise DataError(f"holds {file.dtype}, and cannot be appended to {self.dtype}", file.prefix)
        if self._boundaries[-1] != len(self._sizes):
            self.end_document()
        first = len(self._sizes)
        for start in range(0, len(file.data), _COPY):
            self._data.write(file.data[start : start + _COPY].tobytes())
        self._sizes.frombytes(file.sequence_sizes.astype(np.int32).tobytes())
        self._boundaries.frombytes((file.document_boundaries[1:].astype(np.int64) + first).tobytes())
        self.num_tokens += len(file)

    def close(self) -> None:
        """Makes the pair visible, whole and durable. A document that was not ended is ended."""
        if self._boundaries[-1] != len(self._sizes):
            self.end_document()
        _sync(self._data)
        with Path(self._temporary + ".idx").open("wb") as index:
            index.write(encode_header(self.dtype, len(self._sizes), len(self._boundaries)))
            sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
            ends = np.cumsum(sizes, dtype=np.int64)
            index.write(sizes.astype("<i4").tobytes())
            index.write(((ends - sizes) * np.dtype(self.dtype).itemsize).astype("<i8").tobytes())
            index.write(np.frombuffer(self._boundaries, np.int64).astype("<i8").tobytes())
            _sync(index)
        Path(self.prefix + ".idx").unlink(missing_ok=True)  # an old index never stands beside new data
        os.replace(self._temporary + ".bin", self.prefix + ".bin")
        os.replace(self._temporary + ".idx", self.prefix + ".idx")
        _sync_folder(Path(self.prefix).parent)

    def abort(self) -> None:
        """Removes what was written; an earlier pair of this name stays."""
        self._data.close()
        for suffix in (".bin", ".idx"):
            Path(self._temporary + suffix).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abort()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
