"""How well a table of counts predicts the held-out text: what a language model must beat to be called one.

For held-out pairs (a, b), with counts c over the training text and a vocabulary of V tokens, add-one smoothed:

    unigram = mean of -ln( (c(b) + 1)    / (sum over x of c(x) + V) )
    bigram  = mean of -ln( (c(a, b) + 1) / (sum over x of c(a, x) + V) )

in nats per target, over exactly the targets that count in the loss, so that a model's held-out loss over the same sequences
is directly comparable. In a blend each source's counts are scaled to its share. Counting a bigram table takes V * V
numbers, so this is for small vocabularies: it is meant for bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftrain.data.errors import DataError
from ftrain.data.sampler import Ints
from ftrain.data.tokens import TokenFile

LARGEST_VOCAB = 4096
_BLOCK = 1 << 20

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens [0, stop) of a file, as a part of a blend."""

    file: TokenFile
    stop: int
    weight: float


def bigram(pairs: Iterable[tuple[Ints, Ints]], shares: list[Share], *, vocab: int) -> float:
    """Cross-entropy of the targets given the token before each, in nats."""
    if vocab > LARGEST_VOCAB:
        raise DataError(f"a bigram table over {vocab} tokens is too large; at most {LARGEST_VOCAB}")
    counts = np.zeros(vocab * vocab)
    for share, scale in _scaled(shares):
        for block in _blocks(share):
            counts += scale * np.bincount(block[:-1] * vocab + block[1:], minlength=vocab * vocab)
    table = counts.reshape(vocab, vocab) + 1
    log_p = np.log(table) - np.log(table.sum(axis=1, keepdims=True))
    return _mean((log_p[tokens, targets] for tokens, targets in pairs))


def unigram(pairs: Iterable[tuple[Ints, Ints]], shares: list[Share], *, vocab: int) -> float:
    """Cross-entropy of the targets by their frequency alone, in nats."""
    counts = np.ones(vocab)
    for share, scale in _scaled(shares):
        for block in _blocks(share):
            counts += scale * np.bincount(block[:-1], minlength=vocab)
    log_p = np.log(counts) - np.log(counts.sum())
    return _mean((log_p[targets] for _, targets in pairs))


def _scaled(shares: list[Share]) -> list[tuple[Share, float]]:
    """Each source with the factor that gives its counts its part of the blend; one source alone: 1."""
    total, weights = sum(share.stop for share in shares), sum(share.weight for share in shares)
    return [(share, share.weight / weights * total / share.stop) for share in shares]


def _blocks(share: Share) -> Iterator[Ints]:
    """The tokens in blocks that overlap by one, so that each pair is counted once."""
    for first in range(0, share.stop - 1, _BLOCK):
        yield share.file.tokens(first, min(first + _BLOCK + 1, share.stop))


def _mean(blocks: Iterable[Floats]) -> float:
    total, count = 0.0, 0
    for block in blocks:
        total -= float(block.sum())
        count += block.size
    if not count:
        raise DataError("there is no held-out text: data.heldout_fraction leaves none")
    return total / count
