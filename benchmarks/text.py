"""Data that costs nothing: random tokens, made beforehand, the same global batch in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftrain.config import Config


@dataclass(frozen=True, slots=True)
class Arrays:
    """A batch as the data layer makes it."""

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]
    documents: npt.NDArray[np.int64]


class Text:
    """Random tokens, made beforehand: data costs nothing on either side. The same global batch in each step."""

    def __init__(self, config: Config, seed: int) -> None:
        shape = (config.batch.global_batch, config.data.seq_len + 1)
        numbers = np.random.default_rng(seed).integers(0, config.model.vocab, shape)
        self._tokens, self._targets = numbers[:, :-1].copy(), numbers[:, 1:].copy()
        self._valid = np.ones_like(self._tokens, dtype=bool)

    def sequences(self, first: int, count: int) -> Arrays:
        """Training sequences."""
        begin = first % len(self._tokens)
        rows = slice(begin, begin + count)
        return Arrays(self._tokens[rows], self._targets[rows], self._valid[rows], np.zeros_like(self._tokens[rows]))

    heldout = sequences
