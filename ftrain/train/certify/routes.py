"""Which experts one process chose, so that a layout in the same rounded dtype computes with the same ones.

A router chooses the largest of its logits. Two logits that differ by less than a rounding may change places under another order
of summation, and then a position goes to another expert: a jump, however close the layout is to one process. In fp64 that does
not happen, and every layout chooses for itself. In the other modes the reference writes its choices down, the oracle and the
layouts compute with them, and how many positions would have chosen otherwise is counted and told.
"""

from __future__ import annotations

import io

import numpy as np
import torch

from ftrain.parallel.partition import microbatches
from ftrain.ramp import global_batch_at
from ftrain.train.step import Engine
from storage.objects import ObjectStore


class Routes:
    """The choices of one rank's routers; to be called as `Passes.choose` is."""

    def __init__(self, engine: Engine, store: ObjectStore, *, records: bool) -> None:
        """`records`: of one process, to be written to `store`; otherwise read from there."""
        self._engine, self._store, self._records = engine, store, records
        self._whole = torch.zeros(0)  # [layers, sequences of the update, T, K]
        self._rows: tuple[range, ...] = ()  # of each of this rank's micro-batches
        self._otherwise: dict[tuple[int, int], tuple[int, int]] = {}

    def begin(self, step: int, first_sequence: int) -> None:
        """An update begins, number `step`."""
        config, mesh = self._engine.config, self._engine.mesh
        count = global_batch_at(config, first_sequence)
        self._rows = microbatches(count, config.batch.micro_batch, mesh.shape.dp, mesh.coordinate.dp)
        self._otherwise = {}
        if self._records:
            shape = (config.model.layers, count, config.data.seq_len, config.model.experts_per_token)
            self._whole = torch.zeros(shape, dtype=torch.int64)
        else:
            self._whole = torch.from_numpy(np.load(io.BytesIO(self._store.get(_key(step))), allow_pickle=False))

    def __call__(self, microbatch: int, layer: int, own_BTK: torch.Tensor) -> torch.Tensor:
        """What is to be chosen where a router would choose `own_BTK`."""
        rows = self._rows[microbatch]
        chosen = self._whole[layer, rows.start : rows.stop]
        if self._records:
            chosen.copy_(own_BTK)
            return own_BTK
        context = self._engine.passes.context
        told = chosen if context is None else context.cut(chosen)
        differ = (told.sort(-1).values != own_BTK.sort(-1).values).any(-1)
        self._otherwise[microbatch, layer] = (int(differ.sum()), differ.numel())  # once, however often it is computed
        return told

    def end(self, step: int) -> tuple[int, int]:
        """It has ended: (choices that would have been others, choices); those of tensor-parallel ranks are the same ones."""
        if self._records:
            written = io.BytesIO()
            np.save(written, self._whole.numpy(), allow_pickle=False)
            self._store.put(_key(step), written.getvalue())
        if self._engine.mesh.coordinate.tp:
            return 0, 0
        return sum(n for n, _ in self._otherwise.values()), sum(n for _, n in self._otherwise.values())


def _key(step: int) -> str:
    return f"routes-{step:04d}.npy"
