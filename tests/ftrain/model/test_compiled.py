"""Compiled kernels compute what the eager ones do; a whole step stays within the certificate's bound of fp32."""

import msgspec
import pytest
import torch
from engines import engine_of, error, initial, train, whole
from reference import Reference
from tiny import data_of, tiny

from ftrain.model.fused import EAGER, CompileError, compiled
from ftrain.parallel.weight import precise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor imports torch's own old parts


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_kernel_computes_what_its_eager_form_does(dtype):
    generator = torch.Generator().manual_seed(1)

    def random(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, dy, weight = random(2, 5, 24), random(2, 5, 24), random(24, dtype=torch.bfloat16)
    _, inverse = EAGER.norm(x, weight, 1e-5)
    heads, table = random(2, 5, 3, 8), random(5, 1, 4, dtype=precise(dtype))
    calls = {
        "norm": (x, weight, 1e-5),
        "norm_backward": (dy, x, inverse, weight),
        "rotate": (heads, table, table, -1),
        "gate": (x, dy),
        "gate_backward": (dy, x, x),
    }
    kernels, eps = compiled("cpu"), torch.finfo(dtype).eps
    for name, args in calls.items():
        ours, theirs = getattr(kernels, name)(*args), getattr(EAGER, name)(*args)
        for a, b in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (ours, theirs)), strict=True):
            assert a.dtype == b.dtype
            assert (a - b).abs().max() <= 8 * eps * b.abs().max(), name  # a few roundings in another order


@pytest.mark.slow
def test_steps_with_compiled_kernels_stay_within_the_certificate_s_bound():
    """error(compiled against fp64) <= 4 x max(error(eager against fp64), epsilon), on the worst array of each kind."""
    config = tiny(model={"qk_norm": True}, machine={"compute_dtype": "float32"})
    rounded = {name: master.bfloat16().float() for name, master in initial(config).items()}  # what forward sees
    oracle = Reference(config, rounded, torch.float64)
    oracle.step(data_of(config).sequences(0, config.batch.global_batch), config.optimizer.lr)
    found = {}
    for compile_ in (False, True):
        engine = engine_of(msgspec.structs.replace(config, machine=msgspec.structs.replace(config.machine, compile=compile_)))
        assert (engine.passes.kernels is EAGER) != compile_
        engine.prepare()
        train(engine, 1)
        found[compile_] = error(whole(engine, "exp_avg"), oracle.state("exp_avg"))
    assert found[True] <= 4 * max(found[False], torch.finfo(torch.float32).eps)
    assert found[True] != found[False]


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiled.cache_clear()
    with pytest.raises(CompileError, match=r"needs a C\+\+ compiler.*no-such-compiler.*or set machine.compile = false"):
        engine_of(tiny(machine={"compile": True}))
    compiled.cache_clear()
