"""A corpus that is learnt at once, but for what some updates read: that is noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ftrain.data.dataset import Dataset
from ftrain.data.writer import TokenWriter
from ftrain.load import load
from tests.runs import TinyRun

BATCH, SEQ = 8, 32  # of a TinyRun
WATCH = ("--set", "optimizer.lr=1e-2", "--set", "recovery.spike_z=8")
"""With this each spike is seen as soon as it comes."""


def spoiled_corpus(folder: Path, bad: tuple[int, int], *, steps: int) -> str:
    """Two tokens in turn; noise for the updates from the first to the last of `bad`."""
    prefix = str(folder / "corpus")
    tokens = np.resize(np.array([7, 8]), 2000 * SEQ + 1)
    _write(prefix, tokens)
    run = TinyRun(folder=folder / "look", corpus=prefix, steps=steps)
    order = Dataset(load(run.config, []), root=str(folder))
    noise = np.random.default_rng(0)
    batch = order.sequences((bad[0] - 1) * BATCH, (bad[1] - bad[0] + 1) * BATCH)
    for window in batch.ids.tolist():
        tokens[window * SEQ : (window + 1) * SEQ] = noise.integers(10, 250, SEQ)
    _write(prefix, tokens)
    return prefix


def _write(prefix: str, tokens: np.ndarray) -> None:
    with TokenWriter(prefix, vocab=257) as out:
        out.add(tokens)
        out.end_document()
