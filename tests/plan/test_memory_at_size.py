"""Activations of the largest configs at their own size: a rank's step on the meta device, where tensors have no bytes.

The engine runs its own program, 1F1B with all micro-batches in flight, in the dtype of GPUs; a fake process group stands for
the 16,384 ranks. Attention is replaced by what a fused kernel keeps: q, k, v, the output and a log-sum-exp in fp32. A first
stage under tensor parallelism looks its tokens up by value, and meta tensors have none: `benchmarks.memory` has it, small.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.testing._internal.distributed.fake_pg import FakeStore

import ftrain.model.attention
import ftrain.train.step
from benchmarks.memory_rank import Live
from ftrain.load import load
from ftrain.parallel.mesh import Mesh, Pending
from ftrain.parallel.shape import Coordinate, mesh_shape
from ftrain.plan import memory, profile
from ftrain.plan.setup import Setup, options_of
from ftrain.train.batch import Sequences
from ftrain.train.step import Engine


class Fused(Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, _out, _lse = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def found(config: Any, pp: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that a rank keeps between two actions of a step."""
    functions = ftrain.model.attention.F
    monkeypatch.setattr(functions, "scaled_dot_product_attention", lambda q, k, v, **_: Fused.apply(q, k, v))
    monkeypatch.setattr(ftrain.train.step, "compute_dtype", lambda config, device: torch.bfloat16)
    shape, live = mesh_shape(config), Live()
    rank = shape.rank(Coordinate(pp=pp))
    dist.init_process_group("fake", rank=rank, world_size=shape.world, store=FakeStore())
    try:
        engine = Engine(
            config,
            mesh=Mesh(shape, rank),
            device="meta",
            dataset=None,
            progress=lambda *_: live.look(),  # type: ignore[arg-type]
        )
        monkeypatch.setattr(
            engine.mesh, "start_transfers", lambda transfers, axis="pp": [Pending(tensor) for tensor, _, _ in transfers]
        )
        tokens = torch.empty(config.batch.micro_batch, config.data.seq_len, dtype=torch.int64, device="meta")
        batch = Sequences(tokens, tokens, tokens.bool())
        with live:
            engine.passes.accumulate([batch] * (config.batch.global_batch // shape.dp // config.batch.micro_batch), 1.0)
    finally:
        dist.destroy_process_group()
    return live.between


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pp", "overrides"),
    [
        pytest.param("llama3-405b", 1, ("parallel.recompute=none",), id="405B, second stage, without recompute"),
        pytest.param("llama3-405b", 15, ("parallel.recompute=none",), id="405B, last stage: norm, head and loss"),
        pytest.param("llama3-405b", 1, (), id="405B as it ships"),
        pytest.param("llama3-8b", 0, ("parallel.tp=1", "batch.global_batch=128"), id="8B whole on a card"),
    ],
)
def test_activations_at_size_are_those_of_the_plan(
    name: str, pp: int, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what is kept, a rank has one message or two in its hands: activations or gradients between two stages."""
    config = load(f"configs/{name}.toml", overrides)
    setup = Setup(config=config, profile=profile.load("h100"), options=options_of(config))
    planned = float(memory.all_ranks(setup)[pp].activations)
    hand = 2 * float(memory._whole(setup)) / setup.sp + 8e6
    assert planned <= found(config, pp, monkeypatch) <= planned + hand
