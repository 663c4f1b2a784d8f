"""From ranges of compressed chunks to batches that look as if nothing had ever been compressed.

So whoever checks, adds up or copies chunks knows nothing of compression. A batch is inflated in pieces of bounded size, however
much its few bytes may come to: moments that are all zero inflate to a hundred times their size, quite without malice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from storage.compress import inflate
from storage.fetch import Batch, WrongChunk
from storage.flights import flights
from storage.reshard import PartRead, PlannedRange, Span

__all__ = ["Inflater"]


Parts = Sequence[PartRead] | Mapping[int, PartRead]


class _Run(NamedTuple):
    """Compressed chunks that lie back to back in a buffer."""

    span: Span
    pack: int
    shift: int
    """From the byte in the pack to the byte in the buffer."""


class Inflater:
    """Makes the batches of one load or verification; a batch is valid only until the next one is asked for."""

    def __init__(self, *, scratch_bytes: int) -> None:
        """`scratch_bytes`: what a batch may come to, unless a single chunk has more."""
        self._most = scratch_bytes
        self._scratch = np.empty(0, np.uint8)

    def batches(self, batch: Batch, parts: Parts) -> Iterator[Batch]:
        """The same chunks as they would lie uncompressed, each with room for a checksum; or the batch, if it is so already."""
        if not any(parts[span.part].starts is not None for planned, _ in batch.placed for span in planned.spans):
            yield batch
            return

        def size(run: _Run) -> int:
            return run.span.count * parts[run.span.part].geometry.stride

        for runs in flights(self._runs(batch, parts), self._most, size=size):
            yield self._inflated(batch, parts, runs, sum(map(size, runs)))

    def _runs(self, batch: Batch, parts: Parts) -> Iterator[_Run]:
        """The chunks of a batch, so few at a time that they fit the scratch."""
        for planned, start in batch.placed:
            for span in planned.spans:
                part = parts[span.part]
                assert part.starts is not None  # all parts of a checkpoint are compressed, or none is
                most, stop = max(1, self._most // part.geometry.stride), span.first + span.count
                for first in range(span.first, stop, most):
                    last = min(first + most, stop)
                    piece = Span(span.part, first, last - first, int(part.starts[first]), int(part.starts[last]))
                    yield _Run(piece, planned.pack, start - planned.start)

    def _inflated(self, batch: Batch, parts: Parts, runs: Sequence[_Run], nbytes: int) -> Batch:
        if len(self._scratch) < nbytes:
            self._scratch = np.empty(max(nbytes, self._most), np.uint8)
        placed, wrong, at = list[tuple[PlannedRange, int]](), dict[int, WrongChunk](), 0
        for run in runs:
            span = run.span
            stop = at + span.count * parts[span.part].geometry.stride
            wrong.update(self._inflate(batch, parts[span.part], run, at))
            placed.append((PlannedRange(run.pack, at, stop, (Span(span.part, span.first, span.count, at, stop),)), at))
            at = stop
        return Batch(self._scratch[:nbytes], tuple(placed), wrong)

    def _inflate(self, batch: Batch, part: PartRead, run: _Run, at: int) -> Iterator[tuple[int, WrongChunk]]:
        """Inflate chunks to where byte `at` of the scratch is; yields those that are wrong, which are zeros then."""
        assert part.starts is not None
        for number in range(run.span.first, run.span.first + run.span.count):
            start, stop = part.starts[number : number + 2].tolist()
            values = self._scratch[at : at + part.geometry.chunk_nbytes]
            problem = inflate(batch.buffer[start + run.shift : stop + run.shift], values)
            if problem:
                values[:] = 0
                yield at, WrongChunk(run.pack, start, problem)
            at += part.geometry.stride
