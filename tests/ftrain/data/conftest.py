"""Data for the tests: token files whose tokens say where they are, and one prepared standard library for the session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from ftrain.config import Config
from ftrain.data.stdlib import ensure_stdlib
from ftrain.data.writer import TokenWriter
from ftrain.load import parse

# how long an example takes on a busy machine, or waits for the disk, proves nothing
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

CONFIG = """
run = {url = "unused", steps = 10}
model = {layers = 1, hidden = 8, heads = 1, ffn = 8, vocab = 1_000_000}
data = {sources = [{path = "unset"}], tokenizer = "unused.json", seq_len = 8, heldout_fraction = 0.1}
batch = {global_batch = 4}
optimizer = {lr = 1}
"""

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config() -> MakeConfig:
    """A config over token files; `overrides` as for --set."""

    def make(prefixes: Sequence[str], *overrides: str, weights: Sequence[float] | None = None) -> Config:
        pairs = zip(prefixes, weights or [1.0] * len(prefixes), strict=True)
        sources = ", ".join(f"{{path = '{prefix}', weight = {weight}}}" for prefix, weight in pairs)
        return parse(CONFIG, [f"data.sources=[{sources}]", *overrides])

    return make


@pytest.fixture
def counting_file(tmp_path: Path) -> Callable[..., str]:
    """Writes a file whose token at position p is `base` + p, in documents of the given lengths."""

    def write(name: str, lengths: Sequence[int], base: int = 0) -> str:
        with TokenWriter(str(tmp_path / name), vocab=1_000_000) as out:
            position = 0
            for length in lengths:
                out.add(base + np.arange(position, position + length))
                out.end_document()
                position += length
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="session")
def stdlib_root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder with the standard library corpus in it."""
    root = str(tmp_path_factory.mktemp("cache"))
    ensure_stdlib(root)
    return root
