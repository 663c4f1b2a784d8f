"""Tokenizers in tiktoken's form: a file of base64 tokens and their ranks, as OpenAI and Llama 3 publish them.

Such a file says which merges there are and nothing else: how text is split before merging, and which special tokens follow, is
known by the encoding's name. So files are recognised by their name, and one of your own may have a JSON file beside it:
`NAME.json` = {"pattern": REGEX, "special_tokens": {TEXT: ID}, "eod": TEXT}, where everything may be left out.
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftrain.data.errors import LibraryMissingError, TokenizerError
from ftrain.data.sampler import Ints

SUFFIXES = (".tiktoken", "tokenizer.model")

# How the published encodings split text; the regular expressions are part of their definition.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
KNOWN: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2": (GPT2, {"<|endoftext|>": 50256}),
    "r50k_base": (GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": (WORDS, {"<|endoftext|>": 100257}),
    "tokenizer": (WORDS, {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}),  # Llama 3's tokenizer.model
}
"""File name without suffix -> pattern and special tokens."""


class TiktokenTokenizer:
    """A tiktoken file; needs the `tiktoken` library."""

    def __init__(self, path: str) -> None:
        self.name = path
        ranks = read_ranks(path)
        pattern, special = _definition(Path(path), ranks)
        self.eod = next(number for text, number in special.items() if text == _end(Path(path), special))
        self.vocab = _size(ranks, special)
        self._inner = _encoding(path, pattern, ranks, special)

    def encode(self, text: str) -> Ints:
        """The ids of the text; what looks like a special token is text."""
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        return np.array(self._inner.encode_ordinary(clean), np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text, special tokens shown by name."""
        return str(self._inner.decode(np.asarray(ids, np.int64).tolist(), errors="replace"))


def vocabulary(path: str) -> int:
    """How many ids there are; does not need the library."""
    ranks = read_ranks(path)
    return _size(ranks, _definition(Path(path), ranks)[1])


def _size(ranks: dict[bytes, int], special: dict[str, int]) -> int:
    return 1 + max(*ranks.values(), *special.values())


def read_ranks(path: str) -> dict[bytes, int]:
    """Token -> rank of a tiktoken file. All 256 bytes must be there, so that every text has ids."""
    try:
        lines = Path(path).read_bytes().splitlines()
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in (line.split() for line in lines if line)}
    except (OSError, ValueError, binascii.Error) as error:
        raise TokenizerError(f"is not a tiktoken file (lines of base64 and a rank): {error}", path) from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(f"has no token for {len(missing)} single bytes, the first is {missing[0]}", path)
    return ranks


def _definition(path: Path, ranks: dict[bytes, int]) -> tuple[str, dict[str, int]]:
    """Pattern and special tokens: the file's own JSON before what its name says; else one end token after the ranks."""
    pattern, special = KNOWN.get(path.stem, (WORDS, {"<|endoftext|>": 1 + max(ranks.values())}))
    own = _own(path)
    return str(own.get("pattern", pattern)), {
        str(text): int(number) for text, number in own.get("special_tokens", special).items()
    }


def _own(path: Path) -> dict[str, Any]:
    beside = path.with_name(path.name + ".json")
    if not beside.is_file():
        return {}
    try:
        own = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"is not JSON: {error}", str(beside)) from error
    if not isinstance(own, dict) or set(own) - {"pattern", "special_tokens", "eod"}:
        raise TokenizerError("has other keys than pattern, special_tokens, eod", str(beside))
    return own


def _end(path: Path, special: dict[str, int]) -> str:
    from ftrain.data.tokenizer import END_NAMES

    wanted = _own(path).get("eod")
    names = [str(wanted)] if wanted is not None else list(END_NAMES)
    found = next((name for name in names if name in special), None)
    if found is None:
        raise TokenizerError(f"has no end-of-document token; known names: {', '.join(names)}", str(path))
    return found


def _encoding(path: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise LibraryMissingError("needs the `tiktoken` library: pip install 'ftrain-runtime[tokenizers]'", path) from error
    try:
        return tiktoken.Encoding(Path(path).stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except Exception as error:  # the library's extension raises what it likes
        raise TokenizerError(f"is refused by tiktoken: {error}", path) from error
