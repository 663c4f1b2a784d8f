"""A large preparation, by several processes, that goes on where it was interrupted.

The input is cut into units (`ftrain.data.slices`); each becomes a token file of its own in a folder beside the output, written
whole or not at all. What is there already is taken as it is if it was made of the same input by the same tokenizer, which a
fingerprint of both says; otherwise the folder is begun anew. When all are there they are joined in the order of the input, and
the folder goes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftrain.data import prepare as preparing
from ftrain.data import slices as slicing
from ftrain.data.slices import InputFile, Slice
from ftrain.data.tokenizer import Tokenizer, load_tokenizer
from ftrain.data.tokens import TokenFile
from ftrain.data.writer import TokenWriter

VERSION = 1


@dataclass(frozen=True, slots=True)
class Made:
    """What was joined; `resumed`: units that were there already."""

    documents: int
    tokens: int
    dtype: str
    resumed: int


def in_parts(
    files: Sequence[InputFile],
    out_prefix: str,
    *,
    tokenizer: Tokenizer,
    progress: Callable[[preparing.Progress], None] | None,
    key: str,
    workers: int,
) -> Made:
    """Make what is missing, then join. After an error or an interruption what is finished stays."""
    units = slicing.cut(files, slicing.UNIT)
    folder = parts_folder(out_prefix)
    _begin(folder, _fingerprint(units, tokenizer, key))
    prefixes = [str(folder / f"{number:06d}") for number in range(len(units))]
    missing = [number for number, prefix in enumerate(prefixes) if not Path(prefix + ".idx").exists()]
    tally = _Tally(units, prefixes, progress)
    tally.add(number for number in range(len(units)) if number not in set(missing))
    if workers == 1:
        for number in missing:
            make(prefixes[number], units[number], tokenizer.name, key)
            tally.add([number])
    else:
        _spread([(number, prefixes[number], units[number]) for number in missing], tokenizer.name, key, workers, tally)
    with TokenWriter(out_prefix, vocab=tokenizer.vocab) as out:
        for prefix in prefixes:
            out.extend(TokenFile(prefix))
    shutil.rmtree(folder)
    return Made(out.num_documents, out.num_tokens, out.dtype, len(units) - len(missing))


def parts_folder(out_prefix: str) -> Path:
    """Where units lie until they are joined."""
    path = Path(out_prefix)
    return path.parent / f".{path.name}.parts"


def make(prefix: str, unit: Sequence[Slice], tokenizer_name: str, key: str) -> None:
    """One unit's token file, in whatever process."""
    tokenizer = load_tokenizer(tokenizer_name)
    with TokenWriter(prefix, vocab=tokenizer.vocab) as out:
        preparing.write(unit, out, tokenizer=tokenizer, key=key, tell=lambda done: None)


class _Tally:
    """What is finished, for the progress."""

    def __init__(
        self, units: Sequence[Sequence[Slice]], prefixes: Sequence[str], progress: Callable[[preparing.Progress], None] | None
    ) -> None:
        self._sizes = [sum(part.size_bytes for part in unit) for unit in units]
        self._prefixes, self._progress = prefixes, progress
        self._done = self._documents = self._tokens = 0

    def add(self, numbers: Any) -> None:
        """These units are finished."""
        for number in numbers:
            self._done += self._sizes[number]
            if self._progress is not None:
                file = TokenFile(self._prefixes[number])
                self._documents, self._tokens = self._documents + file.num_documents, self._tokens + len(file)
                self._progress(preparing.Progress(self._done, sum(self._sizes), self._documents, self._tokens))


def _spread(
    work: Sequence[tuple[int, str, Sequence[Slice]]], tokenizer_name: str, key: str, workers: int, tally: _Tally
) -> None:
    """The first error ends it; units under way are finished, those that wait are not begun."""
    context = multiprocessing.get_context("spawn")  # a fork would copy whatever threads the caller has
    with ProcessPoolExecutor(min(workers, len(work) or 1), mp_context=context) as pool:
        futures = {pool.submit(make, prefix, unit, tokenizer_name, key): number for number, prefix, unit in work}
        try:
            for future in as_completed(futures):
                future.result()
                tally.add([futures[future]])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _begin(folder: Path, fingerprint: str) -> None:
    """The folder of this very preparation: an earlier one's is used again, another one's is not."""
    plan = folder / "plan.json"
    if plan.is_file() and plan.read_text(encoding="utf-8") == fingerprint:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    temporary = folder / ".plan"
    temporary.write_text(fingerprint, encoding="utf-8")
    os.replace(temporary, plan)


def _fingerprint(units: Sequence[Sequence[Slice]], tokenizer: Tokenizer, key: str) -> str:
    """Of everything the bytes depend on: files by name, size and time of change."""
    parts = [[str(part.path.absolute()), part.start, part.stop, _stamp(part.path)] for unit in units for part in unit]
    lengths = [len(unit) for unit in units]
    name = tokenizer.name
    told = [VERSION, lengths, parts, name, _stamp(Path(name)) if Path(name).is_file() else None, key]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _stamp(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]
