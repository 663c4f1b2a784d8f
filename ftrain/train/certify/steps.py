"""What a rank does for a certificate: load a state through the checkpoint, update it, write gradients and state as packs.

The parent judges whole arrays that it reads like any checkpoint, so that what is certified is also what would be resumed. What
a checkpoint does not hold is told by digest: values that several ranks hold must be the same on all, and the weights that
forward computes with must be the rounded masters, everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count as count_from
from math import gcd
from typing import Any

import msgspec
import numpy as np
import torch

from ftrain.checkpoint.copy import TORCH_DTYPES, copy_pairs, run_copy
from ftrain.checkpoint.restore import live_digests, restore
from ftrain.config import Config
from ftrain.data.dataset import Batch, Dataset
from ftrain.parallel.arrays import MASTER, WEIGHTS, StatePiece
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.ramp import position
from ftrain.train.batch import Arrays
from ftrain.train.certify.messages import Held, JobDone, Ring, StepDone, Steps
from ftrain.train.certify.routes import Routes
from ftrain.train.step import Engine
from storage.digest import digest_box, digest_part
from storage.manifest import PackInfo, PackManifest
from storage.objects import open_store
from storage.pack import ArraySpec, plan_pack, seal
from storage.run import RunStore

GRAD = "grad"
EPOCH = ATTEMPT = 0


class Recorder:
    """The config's data, with a record of every training sequence that was read.

    Its tokens are renumbered, one to one, so that they lie all over the vocabulary: text of bytes uses its first half only, and
    what tensor parallelism does to the other parts would never be seen. And its documents are cut into short ones: whole ones
    are longer than a certificate's sequences, so that all ranks would have as many valid tokens, and no mask would mask any.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._factor = next(n for n in count_from(round(dataset.vocab * 0.618)) if gcd(n, dataset.vocab) == 1)
        self.read: list[tuple[int, str]] = []

    def sequences(self, first: int, count: int) -> Arrays:
        """As the dataset's, renumbered."""
        batch = self._renumbered(self._dataset.sequences(first, count))
        for row in range(count):
            values = (batch.tokens[row], batch.targets[row], batch.valid[row])
            self.read.append((first + row, hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()[:16]))
        return batch

    def heldout(self, first: int, count: int) -> Arrays:
        """As the dataset's, renumbered."""
        return self._renumbered(self._dataset.heldout(first, count))

    def _renumbered(self, batch: Batch) -> Batch:
        """In documents that are shorter where a sequence begins, so that no two parts of it have as many valid targets."""
        tokens, targets = ((ids * self._factor) % self._dataset.vocab for ids in (batch.tokens, batch.targets))
        ends = tokens % (2 + np.arange(tokens.shape[1])) == 0
        documents = np.cumsum(ends, 1) - ends
        valid = batch.valid & ~ends if self._dataset.isolates else batch.valid
        return replace(batch, tokens=tokens, targets=targets, valid=valid, documents=documents)

    def take(self) -> list[tuple[int, str]]:
        """What was read since the last call."""
        read, self.read = self.read, []
        return read


def engine_of(config: Config, rank: int, cache: str) -> tuple[Engine, Recorder]:
    """A rank's engine; `cache`: where the built-in corpus lies."""
    data = Recorder(Dataset(config, root=cache))
    return Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=data), data


def run_steps(job: Steps, rank: int, cache: str) -> JobDone:
    """Every update of a job on one rank. All ranks call it together."""
    engine, data = engine_of(job.config, rank, cache)
    engine.init_state()
    digests = live_digests(engine)
    states, results = (RunStore(open_store(url)) for url in (job.states, job.results))
    saved = [write(states, engine, _owned(engine.pieces()), step=0)] if job.role == "reference" else []
    routes = Routes(engine, open_store(job.routes), records=job.role == "reference") if job.routes else None
    engine.passes.choose = routes
    steps = []
    for step in range(job.steps):
        if job.role != "reference":
            load(engine, states, step)
        if job.role == "oracle":
            _round_weights(engine)
        steps.append(_update(engine, data, results, routes))
        if job.role == "reference":
            saved.append(write(states, engine, _owned(engine.pieces()), step=step + 1))
    return JobDone(digests=digests, steps=steps, states=[pack for pack in saved if pack])


def run_ring(job: Ring, rank: int, cache: str) -> JobDone:
    """One link of the ring on one rank."""
    engine, _ = engine_of(job.config, rank, cache)
    load(engine, RunStore(open_store(job.source)), job.step)
    digests = live_digests(engine)
    pack = write(RunStore(open_store(job.target)), engine, _owned(engine.pieces()), step=job.step)
    return JobDone(digests=digests, states=[pack] if pack else [])


def load(engine: Engine, run: RunStore, step: int) -> None:
    """The state of a step, and of no other, through the checkpoint; nothing of what the engine held before survives."""
    for piece in engine.pieces():
        piece.tensor.fill_(float("nan"))
    shape = engine.mesh.shape
    restored = restore(engine, slots={}, run=run, storage_step=step, rank=engine.mesh.rank, world=shape.world)
    if restored.step != step:
        raise ValueError(f"asked for the state of step {step}, got step {restored.step}: {restored.passed_over}")
    engine.after_load()
    engine.set_step(step)


def write(run: RunStore, engine: Engine, pieces: Sequence[StatePiece], *, step: int) -> PackManifest | None:
    """Store pieces as this rank's pack of a step; None if there are none."""
    if not pieces:
        return None
    specs = _specs(engine, with_grads=any(piece.array.startswith(f"{GRAD}/") for piece in pieces))
    layout = plan_pack(specs, [(piece.array, piece.box) for piece in pieces])
    buffer = np.zeros(layout.nbytes, np.uint8)
    run_copy(copy_pairs(buffer, layout, pieces))
    seal(buffer, layout)
    key = run.pack_key(step, EPOCH, ATTEMPT, engine.mesh.rank)
    run.store.put(key, buffer.tobytes())
    digests = dict.fromkeys(specs, 0)
    for part in layout.parts:
        digests[part.array] = (digests[part.array] + digest_part(buffer, specs[part.array], part)) % 2**64
    info = PackInfo(name=key.rsplit("/", 1)[1], nbytes=layout.nbytes)
    return PackManifest(pack=info, arrays=list(specs.values()), parts=list(layout.parts), digests=digests)


def _update(engine: Engine, data: Recorder, results: RunStore, routes: Routes | None) -> StepDone:
    grads: list[StatePiece] = []

    def keep() -> None:
        grads.extend(_with_values(piece) for piece in engine.optimizer.grad_pieces())

    engine.before_update, step = keep, engine.step
    data.take()
    first = position(engine.config, step)
    if routes is not None:
        routes.begin(step + 1, first)
    result = engine.train_step(step=step + 1, first_sequence=first)
    flips, routed = (0, 0) if routes is None else routes.end(step + 1)
    engine.optimizer.finish()
    pieces = [*grads, *engine.pieces()]
    return StepDone(
        step=result.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        applied=result.applied,
        pack=write(results, engine, _owned(pieces), step=result.step) if result.applied else None,
        held=list(_held(engine, pieces)),
        data=data.take(),
        flips=flips,
        routed=routed,
    )


def _with_values(piece: StatePiece) -> StatePiece:
    """The same piece with values of its own."""
    return StatePiece(piece.array, piece.box, piece.tensor.clone(), piece.dtype, piece.owner)


def _owned(pieces: Sequence[StatePiece]) -> list[StatePiece]:
    return [piece for piece in pieces if piece.owner]


def _specs(engine: Engine, *, with_grads: bool) -> dict[str, ArraySpec]:
    specs = {spec.name: spec for spec in engine.array_specs()}
    if not with_grads:
        return specs
    masters = [spec for name, spec in specs.items() if name.startswith(f"{MASTER}/")]
    names = {spec.name: spec.name.replace(MASTER, GRAD, 1) for spec in masters}
    return {**{names[spec.name]: msgspec.structs.replace(spec, name=names[spec.name]) for spec in masters}, **specs}


def _held(engine: Engine, pieces: Sequence[StatePiece]) -> Iterator[Held]:
    """Digests of copies that others write, and of the weights that forward reads."""
    shapes = {spec.name: spec.shape for spec in engine.parameters}
    for piece in pieces:
        if not piece.owner:
            stored = piece.tensor.detach().to(TORCH_DTYPES[piece.dtype])
            yield _digest(piece.array, shapes[piece.array.partition("/")[2]], piece.box, stored)
    for spec, box, values in engine.optimizer.weights_in_use():
        yield _digest(f"{WEIGHTS}/{spec.name}", spec.shape, box, values)


def _digest(array: str, shape: tuple[int, ...], box: Any, values: torch.Tensor) -> Held:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    bits = values.detach().contiguous().view(integers).numpy()
    return Held(array=array, offset=box.offset, shape=box.shape, digest=digest_box(bits, shape, box))


def _round_weights(engine: Engine) -> None:
    """The weights that the other dtypes compute with, in fp64."""
    for _, _, weights in engine.optimizer.weights_in_use():
        weights.copy_(weights.bfloat16())
