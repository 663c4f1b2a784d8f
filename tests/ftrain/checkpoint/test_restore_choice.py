"""Which checkpoint of a run is loaded: never a tainted one by itself, and always the one that a person names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ftrain.checkpoint.restore import restore
from ftrain.parallel.arrays import StatePiece
from storage.box import Box
from storage.keys import pack_name
from storage.memory import MemoryStore
from storage.merge import merge
from storage.pack import ArraySpec
from storage.run import RunStore
from tests.storage.building import build_pack

SPEC = ArraySpec(name="master/w", shape=(4, 6), dtype="float32", tile=(2, 6))


class OneArray:
    """An engine whose whole state is one matrix."""

    layout = "one"
    phase = 0

    def __init__(self) -> None:
        self.tensor = torch.zeros(SPEC.shape)

    def pieces(self) -> Sequence[StatePiece]:
        return [StatePiece(SPEC.name, Box.whole(SPEC.shape), self.tensor, SPEC.dtype)]

    def array_specs(self) -> Sequence[ArraySpec]:
        return [SPEC]

    def after_load(self) -> None:
        """Nothing follows from the state."""


@pytest.fixture
def run() -> RunStore:
    """Steps 10, 20 and 30, each full of its own number; 20 and 30 are tainted."""
    run = RunStore(MemoryStore())
    epoch = run.take_epoch(owner={}, starts_from=None)
    for step in (10, 20, 30):
        values = {SPEC.name: torch.full(SPEC.shape, float(step)).numpy().view("<u4")}
        data, delivery = build_pack({SPEC.name: SPEC}, values, [(SPEC.name, Box.whole(SPEC.shape))], pack_name(epoch, 0, 0))
        run.store.put(run.pack_key(step, epoch, 0, 0), data)
        run.commit(merge([delivery], step=step, epoch=epoch, attempt=0, progress={"step": step}, created_s=0.0))
    run.taint(after=10, reason="loss spike")
    run.take_epoch(owner={}, starts_from=10)
    return run


@pytest.mark.parametrize(("named", "loaded"), [(10, 10), (20, 20), (30, 30), (25, 10), (40, 10)])
def test_a_tainted_checkpoint_is_loaded_only_if_it_is_named(run: RunStore, named: int, loaded: int) -> None:
    engine = OneArray()
    found = restore(engine, slots={}, run=run, storage_step=named, rank=0, world=1)
    assert (found.source, found.step) == ("storage", loaded)
    assert torch.equal(engine.tensor, torch.full(SPEC.shape, float(loaded)))


def test_a_named_one_that_is_damaged_falls_back_on_what_counts_and_says_why(run: RunStore) -> None:
    key = run.pack_key(30, 0, 0, 0)
    data = bytearray(run.store.get(key))
    data[0] ^= 1
    run.store.put(key, bytes(data))
    found = restore(OneArray(), slots={}, run=run, storage_step=30, rank=0, world=1)
    assert found.step == 10
    assert any(step == 30 and "crc32c" in why for step, why in found.passed_over)
