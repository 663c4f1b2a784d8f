"""What can go wrong with data, as one tree; each error names the file or source it is about.

DataError                 (a ValueError: the data that were named cannot be used as asked)
  TokenFileError          a .bin/.idx pair that is missing, truncated or breaks the format
  TokenizerError          a tokenizer that cannot be loaded, or ids that do not fit it
    LibraryMissingError   the library that reads that kind of tokenizer is not installed
  InputError              text that cannot be prepared: no such file, a broken JSONL line
"""

from __future__ import annotations


class DataError(ValueError):
    """The data cannot be used as asked; `path` is the file, folder or source it is about."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class TokenFileError(DataError):
    """A .bin/.idx pair that is missing, truncated or breaks the format."""


class TokenizerError(DataError):
    """A tokenizer that cannot be loaded, or ids that do not fit it."""


class LibraryMissingError(TokenizerError):
    """The tokenizer may be all right; here it cannot be read."""


class InputError(DataError):
    """Text that cannot be prepared."""
