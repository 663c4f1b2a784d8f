"""Building and running engines in tests: one process, a world of them, and the reference beside them."""

import msgspec
import torch
from reference import Reference
from tiny import data_of
from world import run_world

from ftrain.lr import learning_rate
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.ramp import position
from ftrain.train.step import Engine


def engine_of(config, rank=0, **hooks):
    engine = Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=data_of(config), **hooks)
    engine.init_state()
    return engine


def train(engine, steps):
    first = engine.step
    return [
        engine.train_step(step=step + 1, first_sequence=position(engine.config, step)) for step in range(first, first + steps)
    ]


def whole(engine, slot):
    """Arrays of a one-process engine, by parameter."""
    prefix = f"{slot}/"
    arrays = {spec.name: torch.zeros(spec.shape, dtype=engine.types.state) for spec in engine.parameters}
    for piece in engine.pieces():
        if piece.array.startswith(prefix):
            arrays[piece.array.removeprefix(prefix)][piece.box.slices()] = piece.tensor
    return arrays


def initial(config):
    """The initial masters, whole."""
    return whole(engine_of(tiny_one(config)), "master")


def tiny_one(config):
    return msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, ranks=1))


def reference_run(config, dtype, steps):
    reference = Reference(config, initial(config), dtype)
    data, size, results = data_of(config), config.batch.global_batch, []
    for step in range(steps):
        lr = learning_rate(step + 1, schedule=config.schedule, peak=config.optimizer.lr, total=config.run.steps)
        results.append(reference.step(data.sequences(step * size, size), lr))
    return reference, results


def error(ours, theirs):
    """Largest difference over the array's largest value; the worst array."""
    return max(
        ((ours[name].double() - theirs[name].double()).abs().max() / theirs[name].double().abs().max()).item()
        for name in theirs
    )


def _shards(rank, config, steps):
    engine = engine_of(config, rank)
    results = train(engine, steps)
    pieces = [(p.array, p.box, p.tensor.clone()) for p in engine.pieces()]
    weights = torch.cat([region.weights.float() for region in engine.optimizer.regions])
    return results, pieces, weights, engine.evaluate()


def run_sharded(config, steps):
    """All results, assembled arrays by full name, and the evaluation, from a world of `ranks`."""
    worlds = run_world(_shards, config.parallel.ranks, config, steps)
    results, _, weights, loss = worlds[0]
    assert all(other[0] == results and other[3] == loss for other in worlds)
    assert all(torch.equal(other[2], weights) for other in worlds)
    arrays = {}
    for _, pieces, _, _ in worlds:
        for name, box, tensor in pieces:
            arrays.setdefault(name, []).append((box, tensor))
    return results, {name: assemble(parts) for name, parts in arrays.items()}, loss


def assemble(parts):
    stop = [max(box.stop[dim] for box, _ in parts) for dim in range(parts[0][0].ndim)]
    out = torch.full(stop, float("nan"), dtype=parts[0][1].dtype)
    for box, tensor in parts:
        assert out[box.slices()].isnan().all()
        out[box.slices()] = tensor
    assert not out.isnan().any()
    return out
