"""The training stream: a global batch is a pure function of its position, whatever the number of ranks.

There is no iterator and no state to save: the cursor of a run is one number, the sequences consumed. A rank asks for the
sequences of its micro-batches by their global index, so another number of ranks, another micro-batch size or a restart changes
who reads what, never what is read. The order is

    global index -> (source, index in that source's stream)          by `Blend`
    index        -> pass = index // windows, place = index % windows
    window       =  permutation of the source's windows, keyed by (seed, source, pass), at `place`

so each window of a source comes exactly once per pass over that source. A later phase of a run reads on where its `Reading`
says (`ftrain.data.reading`). The held-out slice is ordered the same way under a fixed key: runs with different seeds are judged
on the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftrain.config import Config
from ftrain.data import entropy
from ftrain.data.blend import Blend
from ftrain.data.errors import DataError
from ftrain.data.reading import HELDOUT, ORDER, Reading, blend_key
from ftrain.data.sampler import Ints, derive, permute
from ftrain.data.source import Source, Span
from ftrain.data.stdlib import STDLIB, ensure_stdlib
from ftrain.data.tokens import TokenFile


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences as arrays. B sequences of T tokens; `targets` are the tokens one place later."""

    tokens: Ints  # [B, T]
    targets: Ints  # [B, T]
    valid: npt.NDArray[np.bool_]  # [B, T]: this target counts in the loss
    documents: Ints  # [B, T]: number of the token's document within its sequence, from 0
    sources: Ints  # [B]: number of the source in `data.sources`
    ids: Ints  # [B]: window within that source (training or held-out windows, each counted from 0)

    def __len__(self) -> int:
        return len(self.tokens)


class Dataset:
    """All corpora of a config. Any process may build one; they agree without talking to each other."""

    def __init__(self, config: Config, *, root: str, reading: Reading | None = None) -> None:
        """`root` is the cache folder in which the built-in corpus is prepared on first use; `reading`: of a later phase."""
        data = config.data
        self.seq_len, self.vocab, self.isolates = data.seq_len, config.model.vocab, data.isolate_documents
        files = [TokenFile(ensure_stdlib(root) if item.path == STDLIB else item.path) for item in data.sources]
        self.sources = [Source(f, seq_len=data.seq_len, heldout_fraction=data.heldout_fraction) for f in files]
        self.weights = tuple(item.weight for item in data.sources)
        self._seed = config.run.seed
        self._heldout = _Stream([s.heldout for s in self.sources], self.weights, seed=0, purpose=HELDOUT)
        self.go_on(reading or Reading(0, tuple(range(len(files))), (0,) * len(files)))
        if config.evaluate.every_steps and config.evaluate.sequences > self.num_heldout:
            longest = max(source.heldout.stop - source.heldout.start - 1 for source in self.sources)
            fits = longest // config.evaluate.sequences
            shorter = f"data.seq_len = {fits} or less, or " if fits > 0 else ""
            none = f"{shorter}evaluate.every_steps = 0"
            fewer = f"evaluate.sequences = {self.num_heldout} or less" if self.num_heldout else none
            raise DataError(
                f"evaluate.sequences = {config.evaluate.sequences}, but data.heldout_fraction = {data.heldout_fraction} "
                f"leaves {self.num_heldout} held-out sequences of {self.seq_len} tokens: set {fewer}, or hold out more"
            )

    def go_on(self, reading: Reading) -> None:
        """Read as a phase does whose stream begins there: `sequences` counts from its first one."""
        spans = [source.train for source in self.sources]
        self._train = _Stream(spans, self.weights, seed=self._seed, purpose=ORDER, reading=reading)

    @property
    def train_tokens_per_pass(self) -> int:
        """Training targets in one pass over every source, masked ones included."""
        return self._train.num_windows * self.seq_len

    @property
    def num_heldout(self) -> int:
        """Held-out sequences in all."""
        return self._heldout.num_windows

    @property
    def identity(self) -> str:
        """16 hex digits that tell these corpora from others: a resumed run compares them."""
        parts = b"".join(source.identity() for source in self.sources)
        return hashlib.sha256(parts).hexdigest()[:16]

    def sequences(self, first: int, count: int) -> Batch:
        """The training sequences with global indices [first, first + count)."""
        return self._batch(self._train, first, count)

    def heldout(self, first: int, count: int) -> Batch:
        """The held-out sequences [first, first + count), in an order that no seed and no layout changes."""
        if first + count > self.num_heldout:
            raise DataError(f"held-out sequences [{first}, {first + count}) of {self.num_heldout}")
        return self._batch(self._heldout, first, count)

    def num_valid(self, first: int, count: int) -> int:
        """How many targets of these training sequences count, from the index alone: known before any token is read."""
        masked = 0
        if self.isolates:
            masked = sum(len(self.sources[s].document_starts(span, w)) for s, span, w in self._train.windows(first, count))
        return count * self.seq_len - masked

    def bigram_entropy(self, *, sequences: int | None = None) -> float:
        """Nats per target of the held-out text under the bigram counts of the training text (`ftrain.data.entropy`); over
        the first `sequences` held-out sequences, or all of them."""
        return entropy.bigram(self._pairs(sequences), self._shares(), vocab=self.vocab)

    def unigram_entropy(self, *, sequences: int | None = None) -> float:
        """The same under the counts of single tokens."""
        return entropy.unigram(self._pairs(sequences), self._shares(), vocab=self.vocab)

    def _batch(self, stream: _Stream, first: int, count: int) -> Batch:
        if first < 0 or count < 1:
            raise ValueError(f"sequences [{first}, {first + count}): start at 0 or above, at least one")
        places = list(stream.windows(first, count))
        rows = np.stack([self.sources[source].window(span, window) for source, span, window in places])
        valid = np.ones((count, self.seq_len), np.bool_)
        documents = np.zeros((count, self.seq_len), np.int64)
        for row, (source, span, window) in enumerate(places):
            starts = self.sources[source].document_starts(span, window)
            valid[row, starts] = not self.isolates
            documents[row, starts[starts + 1 < self.seq_len] + 1] = 1  # a start is a target: the token one place on
        documents = documents.cumsum(1)
        if rows.max() >= self.vocab or rows.min() < 0:
            row = int(np.argmax((rows >= self.vocab).any(axis=1) | (rows < 0).any(axis=1)))
            prefix = self.sources[places[row][0]].file.prefix
            raise DataError(f"holds token {rows[row].max()}, model.vocab is {self.vocab}: another tokenizer made it", prefix)
        numbers = np.array([(source, window) for source, _, window in places], np.int64)
        return Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), valid, documents, numbers[:, 0], numbers[:, 1])

    def _pairs(self, sequences: int | None) -> Iterator[tuple[Ints, Ints]]:
        """(tokens, targets) of the held-out targets that count, in blocks."""
        stop = self.num_heldout if sequences is None else sequences
        for first in range(0, stop, 256):
            batch = self.heldout(first, min(256, stop - first))
            yield batch.tokens[batch.valid], batch.targets[batch.valid]

    def _shares(self) -> list[entropy.Share]:
        return [
            entropy.Share(source.file, source.train.stop, weight)
            for source, weight in zip(self.sources, self.weights, strict=True)
        ]


class _Stream:
    """The order of windows: blend, then a permutation for each pass of each source."""

    def __init__(
        self, spans: list[Span], weights: tuple[float, ...], *, seed: int, purpose: int, reading: Reading | None = None
    ) -> None:
        self._numbers = [number for number, span in enumerate(spans) if span.num_windows]  # a tiny tail may hold no window
        self._spans, self._seed, self._purpose = spans, seed, purpose
        self._start = reading.start if reading else 0
        self._names = reading.numbers if reading else tuple(range(len(spans)))
        self._before = reading.before if reading else (0,) * len(spans)
        self.num_windows = sum(span.num_windows for span in spans)
        self._blend = Blend([weights[number] for number in self._numbers], blend_key(seed, purpose)) if self._numbers else None

    def windows(self, first: int, count: int) -> Iterator[tuple[int, Span, int]]:
        """(source number, its span, window) of the positions [first, first + count)."""
        assert self._blend is not None, "an empty stream was asked for a window"
        first += self._start
        chosen, index = self._blend.locate(np.arange(first, first + count, dtype=np.int64))
        window = np.empty(count, np.int64)
        for slot in np.unique(chosen).tolist():
            mine = chosen == slot
            number = self._numbers[slot]
            total = self._spans[number].num_windows
            passes, place = np.divmod(index[mine] + self._before[number], total)
            window[mine] = permute(total, derive(self._seed, self._purpose, self._names[number], passes), place)
        for slot, found in zip(chosen.tolist(), window.tolist(), strict=True):
            number = self._numbers[slot]
            yield number, self._spans[number], found
