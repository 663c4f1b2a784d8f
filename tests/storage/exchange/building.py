"""A tiny model's whole state as a committed checkpoint, and the same values as arrays."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ftrain.config import Model
from ftrain.parallel.arrays import StateTypes, array_specs
from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import MeshShape
from storage.box import Box
from storage.exchange.tensor import bfloat16_bits
from storage.exchange.write import Incoming, write_checkpoint
from storage.objects import ObjectStore
from storage.pack import ArraySpec
from storage.run import RunStore

MODEL = Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, rope_base=10_000.0)
State = dict[str, NDArray[Any]]


def random_state(specs: list[ArraySpec], seed: int = 0) -> State:
    """Masters and moments of random values, weights rounded."""
    rng = np.random.default_rng(seed)
    state: State = {spec.name: rng.normal(0, 0.1, spec.shape).astype("<f4") for spec in specs if spec.dtype == "float32"}
    for spec in specs:
        if spec.dtype == "bfloat16":
            state[spec.name] = bfloat16_bits(state[f"master/{spec.name.partition('/')[2]}"])
    return state


def save_model(store: ObjectStore, model: Model = MODEL, *, step: int = 7, seed: int = 0, **how: int) -> tuple[RunStore, State]:
    """A run with one checkpoint of a random state of `model`."""
    specs = array_specs(parameters(model, MeshShape()), MeshShape(), bucket_bytes=2**20, types=StateTypes())
    state = random_state(specs, seed)
    run = RunStore(store)
    epoch = run.take_epoch(owner={"test": True}, starts_from=None)
    progress = {"step": step, "sequences": 8 * step, "tokens": 128 * step, "imported": {"model": msgspec.to_builtins(model)}}

    def incoming(spec: ArraySpec) -> Incoming:
        def read(box: Box) -> NDArray[Any]:
            return state[spec.name][(*box.slices(), ...)]

        return Incoming(spec, read)

    write_checkpoint(run, [incoming(s) for s in specs], step=step, epoch=epoch, progress=progress, created_s=1e9, **how)
    return run, state
