"""Inputs of a preparation, and how they are cut into slices that can be read on their own.

A text file is one document and one slice. A JSONL file is cut at bytes: a slice has the lines that begin in it. A Parquet file
is cut between row groups. So a file of any size spreads over processes, and the documents come out in the order of the input
whoever reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from ftrain.data.errors import InputError

PIECE = 4 << 20  # characters tokenised at once
UNIT = 64 << 20  # bytes that are worth a process of their own

Kind = Literal["text", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file to read."""

    path: Path
    size_bytes: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a file: bytes [start, stop) of a JSONL file, row groups [start, stop) of a Parquet file, all of a text."""

    path: Path
    kind: Kind
    start: int
    stop: int
    size_bytes: int


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
                    file = _input(inner)
                    (files.append(file) if file.kind == "parquet" or _is_text(inner) else skipped.append(str(inner)))
        elif path.is_file():
            files.append(_input(path))
        else:
            raise InputError("no such file or folder", str(path))
    if not files:
        passed = f" ({len(skipped)} passed over: they are no text)" if skipped else ": there is no file"
        raise InputError(f"no text found{passed}", ", ".join(str(name) for name in inputs))
    return files, skipped


def _input(path: Path) -> InputFile:
    return InputFile(path, path.stat().st_size, _KINDS.get(path.suffix.lower(), "text"))


def _is_text(path: Path) -> bool:
    """No NUL byte in the first 8 KiB, as grep and git decide it."""
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)


def whole(file: InputFile) -> Slice:
    """All of a file."""
    stop = _parquet(file.path).metadata.num_row_groups if file.kind == "parquet" else file.size_bytes
    return Slice(file.path, file.kind, 0, stop, file.size_bytes)


def cut(files: Sequence[InputFile], unit: int = UNIT) -> list[tuple[Slice, ...]]:
    """All files in units of about `unit` bytes, in order: large files in several, small ones together."""
    units: list[tuple[Slice, ...]] = []
    gathered: list[Slice] = []
    for part in (part for file in files for part in _parts(file, unit)):
        gathered.append(part)
        if sum(each.size_bytes for each in gathered) >= unit:
            units.append(tuple(gathered))
            gathered = []
    return [*units, tuple(gathered)] if gathered else units


def _parts(file: InputFile, unit: int) -> Iterator[Slice]:
    if file.kind == "jsonl":
        for start in range(0, file.size_bytes, unit):
            stop = min(start + unit, file.size_bytes)
            yield Slice(file.path, file.kind, start, stop, stop - start)
    elif file.kind == "parquet":
        metadata = _parquet(file.path).metadata
        sizes = [metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups)]
        ends = [0, *accumulate(sizes)]
        marks = [file.size_bytes * end // (ends[-1] or 1) for end in ends]  # what they take of the file, compressed
        for index, (begin, end) in enumerate(pairwise(marks)):
            yield Slice(file.path, file.kind, index, index + 1, end - begin)
    else:
        yield whole(file)


def documents(part: Slice, key: str) -> Iterator[tuple[Iterator[str], int]]:
    """Each document's pieces and, inside a file of many, the bytes read so far now and then (else 0)."""
    if part.kind == "text":
        yield read_text(part.path), 0
    elif part.kind == "jsonl":
        yield from _lines(part, key)
    else:
        yield from _rows(part, key)


def read_text(path: Path) -> Iterator[str]:
    """A text file in pieces that end after a line where there is one; bytes that are no UTF-8 survive a byte tokenizer."""
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        while piece := file.read(PIECE):
            yield piece + file.readline(PIECE)


def _lines(part: Slice, key: str) -> Iterator[tuple[Iterator[str], int]]:
    """The lines that begin in [start, stop); the last may end beyond."""
    with part.path.open("rb") as file:
        position = part.start
        if part.start:  # the line that the byte before belongs to is the slice's before
            file.seek(part.start - 1)
            position += len(file.readline()) - 1
        number = 0
        while position < part.stop and (line := file.readline()):
            number += 1
            where = f"{part.path}:{number}" if not part.start else f"{part.path} (line at byte {position})"
            position += len(line)
            if line.strip():
                yield iter((_json_text(line, key, where),)), position - part.start if number % 256 == 0 else 0


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


def _rows(part: Slice, key: str) -> Iterator[tuple[Iterator[str], int]]:
    """The rows of the row groups, in bounded batches. A row without a text is an error, as a line without one is."""
    file = _parquet(part.path)
    if key not in file.schema_arrow.names:
        raise InputError(f"has no column `{key}`; it has: {', '.join(file.schema_arrow.names)}", str(part.path))
    done, rows = 0, sum(file.metadata.row_group(index).num_rows for index in range(part.start, part.stop)) or 1
    for batch in file.iter_batches(batch_size=1024, row_groups=range(part.start, part.stop), columns=[key]):
        for text in batch.column(0).to_pylist():
            done += 1
            if not isinstance(text, str):
                where = f"row {done} from row group {part.start} on has no text under `{key}`, but {type(text).__name__}"
                raise InputError(where, str(part.path))
            yield iter((text,)), part.size_bytes * done // rows if done % 256 == 0 else 0


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise InputError("is a Parquet file, which needs pyarrow: pip install 'ftrain-runtime[parquet]'", str(path)) from error
    try:
        return parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise InputError(f"is no Parquet file: {error}", str(path)) from error
