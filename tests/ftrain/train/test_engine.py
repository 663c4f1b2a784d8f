"""The engine against the plain reference: one process, many replicas, exact and in working precision."""

import pytest
import torch
from reference import Reference
from tiny import data_of, tiny
from world import run_world

from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.train.lr import learning_rate
from ftrain.train.step import Engine

STEPS = 4


def engine_of(config, rank=0, **hooks):
    engine = Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=data_of(config), **hooks)
    engine.init_state()
    return engine


def train(engine, steps):
    size = engine.config.batch.global_batch
    first = engine.step
    return [engine.train_step(step=step + 1, first_sequence=step * size) for step in range(first, first + steps)]


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
    import msgspec

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
        ((ours[name].double() - theirs[name].double()).abs().max() / theirs[name].double().abs().max()).item() for name in theirs
    )


MODELS = [
    pytest.param({}, id="untied"),
    pytest.param({"tied": True, "kv_heads": 0}, id="tied"),
    pytest.param({"head_dim": 6, "kv_heads": 1, "layers": 3, "vocab": 67}, id="odd"),
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_one_process_is_the_reference_in_fp64(model, micro):
    config = tiny(model=model, batch={"micro_batch": micro})
    engine = engine_of(config)
    results = train(engine, STEPS)
    reference, expected = reference_run(config, torch.float64, STEPS)
    for result, (loss, norm) in zip(results, expected, strict=True):
        assert result.loss == pytest.approx(loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    for slot in ("master", "exp_avg", "exp_avg_sq"):
        assert error(whole(engine, slot), reference.state(slot)) < 1e-12


@pytest.mark.parametrize("model", MODELS)
def test_one_process_is_the_reference_in_fp32(model):
    config = tiny(model=model, machine={"compute_dtype": "float32"})
    engine = engine_of(config)
    results = train(engine, 1)
    reference, expected = reference_run(config, torch.float32, 1)
    assert results[0].loss == pytest.approx(expected[0][0], rel=1e-6)
    assert results[0].grad_norm == pytest.approx(expected[0][1], rel=1e-5)
    assert error(whole(engine, "exp_avg"), reference.state("exp_avg")) < 1e-5


def test_no_parameter_ever_has_a_grad():
    engine = engine_of(tiny())
    seen = []
    engine.progress = lambda phase, _: seen.append(phase) or [_assert_no_grad(p) for p in engine.model.parameters()]
    train(engine, 2)
    for parameter in engine.model.parameters():
        _assert_no_grad(parameter)
        assert parameter.main_grad.abs().max() > 0
    assert seen[:4] == ["data", "forward", "backward", "forward"]
    assert seen[-1] == "update"


def _assert_no_grad(parameter):
    assert parameter.grad is None


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


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_replicas_are_the_reference_in_fp64(ranks):
    config = tiny(ranks=ranks, batch={"global_batch": 16})
    results, arrays, loss = run_sharded(config, STEPS)
    reference, expected = reference_run(config, torch.float64, STEPS)
    for result, (mean, norm) in zip(results, expected, strict=True):
        assert result.loss == pytest.approx(mean, rel=1e-12)
        assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    for slot in ("master", "exp_avg", "exp_avg_sq"):
        ours = {name.removeprefix(f"{slot}/"): value for name, value in arrays.items() if name.startswith(f"{slot}/")}
        assert error(ours, reference.state(slot)) < 1e-12
    one = engine_of(tiny_one(config))
    train(one, STEPS)
    assert loss == pytest.approx(one.evaluate(), rel=1e-12)
