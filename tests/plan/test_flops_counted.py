"""The model's operations by formula, against those that torch counts in an update of the engine: the same number.

Attention is asked of PyTorch's plain kernel, which computes all scores: that is the count in full, 12 q s. The default formula
takes half of it, because a causal mask leaves half of the scores.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, addmm_flop

from ftrain.plan import cost, profile
from ftrain.plan.setup import Setup, options_of
from tests.engines import engine_of
from tests.tiny import tiny


def added(_: Any, a: Any, b: Any, **kwargs: Any) -> int:
    """Of a product that is added in place, which torch's counter does not know: gradients of matrices are."""
    return int(addmm_flop(None, a, b))


CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied, no groups of heads": {"tied": True, "kv_heads": 4},
    "heads of another width": {"head_dim": 12},
    "experts, two of four": {"experts": 4, "experts_per_token": 2},
    "experts, one of eight": {"experts": 8, "experts_per_token": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_that_torch_counts(case: str) -> None:
    config = tiny(model=CASES[case], machine={"compute_dtype": "float32"})
    setup = Setup(config=config, profile=profile.load("laptop"), options=options_of(config))
    engine = engine_of(config)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added}) as counter, sdpa_kernel(SDPBackend.MATH):
        engine.train_step(step=1, first_sequence=0)
    counted = counter.get_total_flops()
    assert counted == cost.step_flops(setup, causal=False)
    core = 12 * config.model.layers * setup.queries * config.data.seq_len * setup.tokens_per_update
    assert cost.step_flops(setup) == counted - core // 2


def test_the_formula_that_is_printed_is_the_one_that_is_used() -> None:
    """Matrices by hand, of Mixtral's sizes: 6 h (2q + 2kv + 3 k f + E) a layer, 6 q s of its attention, 6 h V."""
    config = tiny(
        model={"layers": 3, "experts": 8, "experts_per_token": 2, "ffn": 14336, "hidden": 4096, "heads": 32, "kv_heads": 8}
    )
    setup = Setup(config=config, profile=profile.load("laptop"), options=options_of(config))
    h, q, kv, f, e, k, s, v = 4096, 4096, 1024, 14336, 8, 2, 12, 61
    assert cost.token_flops(setup) == 3 * (6 * h * (2 * q + 2 * kv + 3 * k * f + e) + 6 * q * s) + 6 * h * v
