"""Tensor and sequence parallel training against one process: gradients, norms, masters, moments, losses."""

import pytest
import torch
from layouts import Run, deviations, laid_out, one_process, run_layouts
from tiny import tiny

from ftrain.parallel.layout import Kind

STEPS = 2  # the second begins with moments, and with weights that every rank has updated

MODELS = {
    "untied": {"heads": 4, "kv_heads": 2, "vocab": 64},
    "tied, prime vocabulary": {"heads": 4, "kv_heads": 4, "vocab": 61, "tied": True},
    "copies of kv heads": {"heads": 4, "kv_heads": 1, "vocab": 67},
    "last part of the vocabulary empty": {"heads": 4, "kv_heads": 2, "vocab": 9, "tied": True},
    "options": {"heads": 4, "kv_heads": 2, "vocab": 61, "qk_norm": True, "z_loss": 0.01, "layers": 1},
    "options, copies": {"heads": 8, "kv_heads": 2, "vocab": 61, "qk_norm": True, "z_loss": 0.01, "tied": True, "layers": 1},
}
LAYOUTS = [
    {"ranks": 2, "tp": 2},
    {"ranks": 2, "tp": 2, "sp": False},
    {"ranks": 4, "tp": 4},
    {"ranks": 4, "tp": 4, "sp": False, "tp_overlap": True},
    {"ranks": 4, "tp": 2},
    {"ranks": 4, "tp": 2, "order": ("dp", "tp", "cp", "pp"), "sp_regather": False},
    {"ranks": 4, "tp": 2, "sp": False},
]


def base(model, dtype="float64"):
    return tiny(model=model, batch={"global_batch": 6, "micro_batch": 2}, machine={"compute_dtype": dtype})


def name_of(parallel):
    return ",".join(f"{key}={value}" for key, value in parallel.items() if key != "order")


@pytest.fixture(scope="module")
def runs():
    """Every model under every layout, by (model, layout); the one process is layout None."""
    found = {}
    for ranks in (1, 2, 4):
        layouts = [None] if ranks == 1 else [layout for layout in LAYOUTS if layout["ranks"] == ranks]
        keys = [(model, layout) for model in MODELS for layout in layouts]
        configs = [laid_out(base(MODELS[m]), **layout) if layout else one_process(base(MODELS[m])) for m, layout in keys]
        for (model, layout), run in zip(keys, run_layouts(configs, STEPS), strict=True):
            found[model, name_of(layout) if layout else None] = run
    return found


@pytest.mark.dist
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", [name_of(layout) for layout in LAYOUTS])
def test_it_is_one_process_in_fp64(model, layout, runs):
    found = deviations(runs[model, layout], runs[model, None])
    assert max(found.values()) < 1e-12, found


def _defect(engine):
    """Forget that norms have seen only their part of the positions."""
    for region in engine.optimizer.regions:
        for slot in region.bucket.slots:
            if slot.spec.name.endswith("norm") and slot.spec.tp.kind is Kind.PARTIAL:
                object.__setattr__(slot.spec, "tp", type(slot.spec.tp)(Kind.REPLICATED))


@pytest.mark.dist
def test_an_unreduced_norm_gradient_is_noticed():
    with pytest.raises(AssertionError, match=r"copies of \S*layers\.0\.attention_norm differ"):
        run_layouts([laid_out(base(MODELS["untied"]), ranks=2, tp=2)], STEPS, _defect)


@pytest.mark.dist
def test_the_switches_do_not_change_a_bit():
    config = laid_out(base(MODELS["untied"], "float32"), ranks=4, tp=2)
    configs = [config] + [
        laid_out(config, **change)
        for change in ({}, {"tp_overlap": True}, {"sp_regather": False}, {"sp_regather": False, "tp_overlap": True})
    ]
    first, *others = run_layouts(configs, STEPS)
    for other in others:
        same(first, other)


def same(one: Run, other: Run):
    assert (one.results, one.loss) == (other.results, other.loss)
    for ours, theirs in [(one.grads, other.grads), *((one.state[slot], other.state[slot]) for slot in one.state)]:
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_as_near_to_the_truth_as_one_process(dtype):
    """The certificate's rule: error(layout) <= 4 x max(error(one process), eps). One step from the same state."""
    eps = torch.finfo(getattr(torch, dtype)).eps
    rows = [laid_out(base(MODELS["untied"], dtype), **layout) for layout in LAYOUTS if layout["ranks"] == 4]
    exact = exact_step(base(MODELS["untied"]))
    (single,) = run_layouts([one_process(rows[0])], 1)
    allowed = deviations(single, exact)
    for config, run in zip(rows, run_layouts(rows, 1), strict=True):
        for kind, found in deviations(run, exact).items():
            assert found <= 4 * max(allowed[kind], eps), (config.parallel, kind)


def exact_step(config):
    """fp64, but with the weights that fp32 training computes with: the rounded masters."""
    (run,) = run_layouts([one_process(config)], 1, _round_weights)
    return run


def _round_weights(engine):
    for region in engine.optimizer.regions:
        region.weights.copy_(region.weights.bfloat16())
