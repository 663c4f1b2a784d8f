"""Text in, a token file out: files, folders, JSONL and Parquet, streamed, with progress.

Memory stays bounded whatever the input: a text is tokenised in pieces of about 4 MiB that end after a line, so a file larger
than memory is one document of several sequences. (A tokenizer with merges across line ends may cut such a giant a little
differently at those seams; the byte tokenizer does not care.) The order of documents is the order given, folders sorted by
path, so that the same input gives the same bytes everywhere, by however many processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftrain.data.slices import UNIT, Slice, documents, find_inputs, whole
from ftrain.data.tokenizer import Tokenizer
from ftrain.data.writer import TokenWriter

__all__ = ["PrepareReport", "Progress", "find_inputs", "prepare", "write"]

SMALL = 4 * UNIT  # bytes that one process prepares at once, with nothing to go on from


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
    resumed: int = 0  # units that an earlier, interrupted preparation had finished


def prepare(
    inputs: Sequence[str | Path],
    out_prefix: str,
    *,
    tokenizer: Tokenizer,
    progress: Callable[[Progress], None] | None = None,
    key: str = "text",
    workers: int = 1,
) -> PrepareReport:
    """Writes `out_prefix`.bin/.idx, whole or not at all, from text files (a document each), folders of them, JSONL files (a
    document a line, its text under `key`) and Parquet files (a document a row, from the column `key`).

    With several workers, or from much input, finished units are kept beside the output until it is whole: the same call goes
    on after an interruption. The bytes written do not depend on any of this.
    """
    from ftrain.data.parts import in_parts

    files, skipped = find_inputs(inputs)
    total = sum(file.size_bytes for file in files)
    if workers > 1 or total > SMALL:
        made = in_parts(files, out_prefix, tokenizer=tokenizer, progress=progress, key=key, workers=workers)
        return PrepareReport(out_prefix, made.documents, made.tokens, total, made.dtype, tuple(skipped), made.resumed)
    with TokenWriter(out_prefix, vocab=tokenizer.vocab) as out:

        def tell(done: int) -> None:
            if progress:
                progress(Progress(done, total, out.num_documents, out.num_tokens))

        write([whole(file) for file in files], out, tokenizer=tokenizer, key=key, tell=tell)
    return PrepareReport(out_prefix, out.num_documents, out.num_tokens, total, out.dtype, tuple(skipped))


def write(slices: Iterable[Slice], out: TokenWriter, *, tokenizer: Tokenizer, key: str, tell: Callable[[int], None]) -> None:
    """Tokenise slices, in order; `tell` gets the bytes that are behind."""
    done = 0
    for part in slices:
        for pieces, read in documents(part, key):
            for piece in pieces:
                out.add(tokenizer.encode(piece))
            out.add([tokenizer.eod])
            out.end_document()
            if read:
                tell(done + min(read, part.size_bytes))
        done += part.size_bytes
        tell(done)
