"""One corpus as two lists of windows: what is trained on, and the tail that training never touches.

A window is `seq_len` tokens and the one after them, so that every token has a target. Windows lie back to back over the token
stream, documents included as they come; the held-out ones begin behind the last token that any training window reads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from ftrain.data.errors import DataError
from ftrain.data.sampler import Ints
from ftrain.data.tokens import TokenFile

_SAMPLE = 4096  # tokens at each place that the identity looks at


@dataclass(frozen=True, slots=True)
class Span:
    """Windows over tokens [start, stop) of a source."""

    start: int
    stop: int
    seq_len: int

    @property
    def num_windows(self) -> int:
        """How many windows fit; each needs a target for its last token."""
        return max(0, (self.stop - self.start - 1) // self.seq_len)

    def position(self, window: int) -> int:
        """The first token of a window."""
        return self.start + window * self.seq_len


class Source:
    """A token file, split."""

    def __init__(self, file: TokenFile, *, seq_len: int, heldout_fraction: float) -> None:
        self.file = file
        self.seq_len = seq_len
        split = file.num_tokens - int(file.num_tokens * heldout_fraction)
        self.train = Span(0, split, seq_len)
        self.heldout = Span(split, file.num_tokens, seq_len)
        if not self.train.num_windows:
            nearest = f": data.seq_len = {split - 1} or less" if split > 1 else ""
            needed = f"one sequence needs {seq_len + 1}{nearest}"
            raise DataError(f"has {split} training tokens of {file.num_tokens}, {needed}", file.prefix)

    def window(self, span: Span, number: int) -> Ints:
        """The `seq_len` + 1 tokens of a window."""
        position = span.position(number)
        return self.file.tokens(position, position + self.seq_len + 1)

    def document_starts(self, span: Span, number: int) -> Ints:
        """The targets of a window that begin a document, as indices in [0, seq_len)."""
        first = span.position(number) + 1
        return self.file.document_starts(first, first + self.seq_len) - first

    def identity(self) -> bytes:
        """Tells this corpus from another one without reading it all: sizes, and tokens at 64 places."""
        file = self.file
        digest = hashlib.sha256(f"{file.num_tokens} {file.num_sequences} {file.num_documents}".encode())
        for place in np.linspace(0, max(0, file.num_tokens - _SAMPLE), 64).astype(np.int64).tolist():
            digest.update(file.tokens(place, min(place + _SAMPLE, file.num_tokens)).tobytes())
        return digest.digest()
