"""A small run and made-up data, for tests of the engine."""

from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from ftrain.config import Batch, Config, Data, Evaluate, Machine, Model, Optimizer, Parallel, Run, Schedule, Source

torch.set_num_threads(1)  # the machine is shared, and more threads gain nothing at this size


@dataclass
class FakeBatch:
    tokens: np.ndarray
    targets: np.ndarray
    valid: np.ndarray
    documents: np.ndarray


@dataclass
class FakeData:
    """Each sequence is a pure function of its index; about one target in five is masked, some with a wild value."""

    vocab: int
    seq_len: int

    def sequences(self, first, count):
        return self._batch(range(first, first + count), 1)

    def heldout(self, first, count):
        return self._batch(range(first, first + count), 2)

    def _batch(self, indices, stream):
        rows = [np.random.default_rng((stream, index)) for index in indices]
        text = np.stack([row.integers(0, self.vocab, self.seq_len + 1) for row in rows])
        valid = np.stack([row.random(self.seq_len) > 0.2 for row in rows])
        targets = np.where(valid, text[:, 1:], -100)
        documents = (np.stack([row.random(self.seq_len) for row in rows]) < 0.2).cumsum(1)
        return FakeBatch(text[:, :-1].copy(), targets, valid, documents)


def tiny(*, model=None, ranks=1, **sections):
    """A config that trains in milliseconds; `sections` are changes such as `batch={"global_batch": 16}`."""
    config = Config(
        run=Run(url="unused", steps=20, seed=3),
        model=msgspec.structs.replace(
            Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, init_std=0.2), **(model or {})
        ),
        data=Data(sources=(Source(path="unused"),), seq_len=12),
        batch=Batch(global_batch=8, micro_batch=1),
        parallel=Parallel(ranks=ranks, bucket_mib=0.01),
        # a large eps: AdamW divides by the size of each gradient, and would magnify last-bit differences of tiny ones
        optimizer=Optimizer(lr=0.01, clip_norm=1.0, eps=1e-4),
        schedule=Schedule(kind="cosine", warmup_steps=2),
        evaluate=Evaluate(sequences=6),
        machine=Machine(compute_dtype="float64"),
    )
    for name, changes in sections.items():
        config = msgspec.structs.replace(config, **{name: msgspec.structs.replace(getattr(config, name), **changes)})
    return config


def data_of(config):
    return FakeData(config.model.vocab, config.data.seq_len)
