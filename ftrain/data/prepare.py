"""Text in, a token file out: files, folders and JSONL, streamed, with progress.

Memory stays bounded whatever the input: a text is tokenised in pieces of about 4 MiB that end after a line, so a file larger
than memory is one document of several sequences. (A tokenizer with merges across line ends may cut such a giant a little
differently at those seams; the byte tokenizer does not care.) The order of documents is the order given, folders sorted by
path, so that the same input gives the same bytes everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftrain.data.errors import InputError
from ftrain.data.tokenizer import Tokenizer
from ftrain.data.writer import TokenWriter

PIECE = 4 << 20  # characters tokenised at once
_JSONL = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a preparation stands. `bytes_done` counts whole files and, inside a file, what has been read."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PrepareReport:
    """What a preparation made."""

    prefix: str
    documents: int
    tokens: int
    bytes_read: int
    dtype: str
    skipped: tuple[str, ...]  # files of a folder that are no text


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read; `lines` if each line is a JSON document."""

    path: Path
    size_bytes: int
    lines: bool


def prepare(
    inputs: Sequence[str | Path],
    out_prefix: str,
    *,
    tokenizer: Tokenizer,
    progress: Callable[[Progress], None] | None = None,
    key: str = "text",
) -> PrepareReport:
    """Writes `out_prefix`.bin/.idx, whole or not at all, from text files (a document each), folders of them, and JSONL files
    (a document a line, its text under `key`)."""
    files, skipped = find_inputs(inputs)
    total, done = sum(file.size_bytes for file in files), 0
    with TokenWriter(out_prefix, vocab=tokenizer.vocab) as out:
        for file in files:
            for pieces, read in _documents(file, key):
                for piece in pieces:
                    out.add(tokenizer.encode(piece))
                out.add([tokenizer.eod])
                out.end_document()
                if progress and read:
                    progress(Progress(done + read, total, out.num_documents, out.num_tokens))
            done += file.size_bytes
            if progress:
                progress(Progress(done, total, out.num_documents, out.num_tokens))
    return PrepareReport(out_prefix, out.num_documents, out.num_tokens, total, out.dtype, tuple(skipped))


def find_inputs(inputs: Sequence[str | Path]) -> tuple[list[InputFile], list[str]]:
    """The files to read, in order, and those of a folder that are passed over because they are no text."""
    files: list[InputFile] = []
    skipped: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            for inner in sorted(path.rglob("*")):
                hidden = any(part.startswith(".") for part in inner.relative_to(path).parts)
                if inner.is_file() and not hidden:
                    (files.append(_input(inner)) if _is_text(inner) else skipped.append(str(inner)))
        elif path.is_file():
            files.append(_input(path))
        else:
            raise InputError("no such file or folder", str(path))
    if not files:
        raise InputError(f"no text found ({len(skipped)} files are no text)", ", ".join(str(name) for name in inputs))
    return files, skipped


def read_text(path: Path) -> Iterator[str]:
    """A text file in pieces that end after a line where there is one; bytes that are no UTF-8 survive a byte tokenizer."""
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        while piece := file.read(PIECE):
            yield piece + file.readline(PIECE)


def _documents(file: InputFile, key: str) -> Iterator[tuple[Iterator[str], int]]:
    """Each document's pieces and, inside a JSONL file, the bytes read so far now and then (else 0)."""
    if not file.lines:
        yield read_text(file.path), 0
        return
    with file.path.open("rb") as lines:
        read = 0
        for number, line in enumerate(lines, start=1):
            read += len(line)
            if line.strip():
                yield iter((_json_text(line, key, f"{file.path}:{number}"),)), read if number % 256 == 0 else 0


def _json_text(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"is not JSON: {error}", where) from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise InputError(f"has no text under `{key}`; it has: {keys}", where)
    return text


def _input(path: Path) -> InputFile:
    return InputFile(path, path.stat().st_size, path.suffix.lower() in _JSONL)


def _is_text(path: Path) -> bool:
    """No NUL byte in the first 8 KiB, as grep and git decide it."""
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)
