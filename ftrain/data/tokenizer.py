"""From text to ids and back. `byte` is built in, so that a new machine trains on real text with nothing to download.

A tokenizer is asked for three things only: ids, text, and the id that ends a document. Files of Hugging Face's `tokenizers`
library fit the same face; the library is imported when such a file is named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ftrain.data.errors import LibraryMissingError, TokenizerError
from ftrain.data.sampler import Ints

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|end|>", "<eos>", "</s>", "<EOD>", "[EOS]")


class Tokenizer(Protocol):
    """Text to ids and back."""

    name: str
    vocab: int  # ids are in [0, vocab)
    eod: int  # the id that ends a document

    def encode(self, text: str) -> Ints:
        """The ids of a text, without any special token."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """A text for people: what is no valid text shows as a replacement character."""


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    name = "byte"
    vocab = 257
    eod = 256

    def encode(self, text: str) -> Ints:
        """The bytes of the text; bytes that `prepare` could not read as UTF-8 come back unchanged."""
        try:
            data = text.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError:  # half a surrogate pair, as JSON may hold: there are no bytes for it
            data = text.encode("utf-8", errors="replace")
        return np.frombuffer(data, np.uint8).astype(np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of the bytes; the end of a document shows as <eod>."""
        values = np.asarray(ids, np.int64)
        pieces = np.split(values, np.flatnonzero(values == self.eod) + 1)
        return "".join(
            piece[piece < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")
            + ("<eod>" if piece.size and piece[-1] == self.eod else "")
            for piece in pieces
        )


class FileTokenizer:
    """A `tokenizer.json` of the Hugging Face `tokenizers` library."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._inner = _open(path)
        self.vocab = int(self._inner.get_vocab_size(with_added_tokens=True))
        known = [self._inner.token_to_id(name) for name in END_NAMES]
        ends = [number for number in known if number is not None]
        if not ends:
            raise TokenizerError(f"has no end-of-document token; known names: {', '.join(END_NAMES)}", path)
        self.eod = int(ends[0])

    def encode(self, text: str) -> Ints:
        """The ids of the text; no special token is added."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return np.array(self._inner.encode(clean, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text, special tokens shown by name."""
        return str(self._inner.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer a config names: `byte`, the path of a tokenizer.json, or that of a tiktoken file."""
    from ftrain.data.tiktoken_file import SUFFIXES, TiktokenTokenizer

    if name == "byte":
        return ByteTokenizer()
    return TiktokenTokenizer(name) if name.endswith(SUFFIXES) else FileTokenizer(name)


def _open(path: str) -> Any:
    if not Path(path).is_file():
        raise TokenizerError("no such file; a tokenizer is `byte`, a Hugging Face tokenizer.json, or a .tiktoken file", path)
    try:
        import tokenizers
    except ImportError as error:
        hint = "pip install 'ftrain-runtime[tokenizers]'"
        raise LibraryMissingError(f"needs the `tokenizers` library: {hint}", path) from error
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"is not a tokenizer file: {error}", path) from error
