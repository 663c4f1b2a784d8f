"""The engine against the plain reference: one process, many replicas, exact and in working precision."""

import pytest
import torch
from engines import engine_of, error, reference_run, run_sharded, tiny_one, train, whole
from tiny import tiny

STEPS = 4

MODELS = [
    pytest.param({}, id="untied"),
    pytest.param({"tied": True, "kv_heads": 0}, id="tied"),
    pytest.param({"head_dim": 6, "kv_heads": 1, "layers": 3, "vocab": 67}, id="odd"),
    pytest.param({"qk_norm": True, "z_loss": 0.01}, id="options"),
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


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3, 7, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5, 6))])
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
