"""The founding rows that concern expert parallelism, by number, on the real engine."""

from pathlib import Path

import msgspec
import pytest
import torch

from ftrain.config import Model
from ftrain.load import ConfigProblems, load, num_parameters
from ftrain.model.moe import Groups, Moe
from ftrain.parallel.expert import ExpertGroup, Route, Routing, combine, dispatch
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import MeshShape, mesh_shape
from ftrain.parallel.weight import Weight
from tests.mixture import loop
from tests.world import run_world

ROOT = Path(__file__).parents[2]

CHOSEN = [(0, 2), (3, 1), (2, 3), (0, 1), (3, 0), (1, 2), (2, 0), (3, 1)]  # experts of each of 8 tokens, 4 on each rank
WEIGHTS = [(0.5 + token / 20, 0.5 - token / 20) for token in range(8)]
MODEL = Model(layers=1, hidden=8, heads=1, ffn=12, vocab=9, experts=4)


def _journey(rank):
    """What arrives at this rank's two experts, and what its four tokens get back. Expert e makes 10^e x of a token x."""
    mesh = Mesh(MeshShape(dp=2, ep=2), rank)
    mine = slice(4 * rank, 4 * rank + 4)
    tokens = torch.arange(1.0, 9.0, dtype=torch.float64)[mine].unsqueeze(1)
    way = Route.of(ExpertGroup.of(mesh), torch.tensor(CHOSEN[mine]), None, 4)
    arrived = dispatch(tokens, way)
    made = torch.cat([rows * 10.0 ** (2 * rank + e) for e, rows in enumerate(arrived.split(way.counts))])
    back = combine(made, torch.tensor(WEIGHTS[mine], dtype=torch.float64), way)
    return [rows.flatten().tolist() for rows in arrived.split(way.counts)], back.flatten().tolist()


@pytest.mark.dist
def test_row_40_eight_tokens_travel_to_their_experts_and_back_in_order():
    (first, second) = run_world(_journey, 2)
    assert first[0] + second[0] == [
        [token + 1.0 for token in range(8) if expert in CHOSEN[token]] for expert in range(4)
    ]  # all of rank 0's before those of rank 1, each in their order
    expected = [
        sum(weight * 10.0**expert * (token + 1) for expert, weight in zip(CHOSEN[token], WEIGHTS[token], strict=True))
        for token in range(8)
    ]
    assert first[1] + second[1] == pytest.approx(expected, rel=1e-15)


def _weights():
    generator = torch.Generator().manual_seed(3)
    shapes = {"router": (4, 8), "w1": (4, 12, 8), "w2": (4, 8, 12), "w3": (4, 12, 8)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def _inputs():
    return torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)  # x, gradient; rank


def _block(rank):
    """Output, gradient of the input, and this rank's gradients of weights: its own experts' are of all tokens."""
    mesh = Mesh(MeshShape(dp=2, ep=2), rank)
    block = Moe(MODEL, 0, Groups(experts=ExpertGroup.of(mesh)))
    for name, whole in _weights().items():
        weight = Weight(whole if name == "router" else whole[2 * rank : 2 * rank + 2].clone())
        weight.main_grad = torch.zeros_like(weight)
        setattr(block, name, weight)
    x, dy = _inputs()[:, rank].unsqueeze(1)
    x.requires_grad_()
    y = block(x, Routing(torch.full((1,), 0.25, dtype=torch.float64)))
    y.backward(dy)
    assert x.grad is not None
    return y.detach()[0], x.grad[0], {name: weight.main_grad for name, weight in block.named_parameters()}


@pytest.mark.dist
def test_row_40_a_block_is_a_loop_over_eight_tokens():
    weights = {name: value.requires_grad_() for name, value in _weights().items()}
    x, dy = _inputs()
    x.requires_grad_()
    outputs, losses = zip(*(loop(x[rank], weights, MODEL, 0.25) for rank in range(2)), strict=True)
    (sum(losses) + (torch.stack(outputs) * dy).sum()).backward()
    found = run_world(_block, 2)
    for index, whole in ((0, torch.stack(outputs)), (1, x.grad)):
        torch.testing.assert_close(torch.stack([rank[index] for rank in found]), whole, rtol=1e-12, atol=1e-12)
    grads = [rank[2] for rank in found]
    torch.testing.assert_close(grads[0]["router"] + grads[1]["router"], weights["router"].grad, rtol=1e-12, atol=1e-12)
    for name in ("w1", "w2", "w3"):
        torch.testing.assert_close(torch.cat([rank[name] for rank in grads]), weights[name].grad, rtol=1e-12, atol=1e-12)


def test_row_71_ep_is_not_used_by_the_dense_model():
    path = str(ROOT / "configs" / "llama3-405b.toml")
    dense = load(path)
    assert (dense.model.experts, dense.parallel.ep) == (0, 1)
    with pytest.raises(ConfigProblems, match=r"parallel\.ep: given 8, with model\.experts = 0.*nearest: 1"):
        load(path, ["parallel.ep=8"])
    assert num_parameters(dense) == 405_853_388_800


def test_row_71_ep_is_a_view_and_multiplies_no_ranks():
    sparse = load(str(ROOT / "configs" / "llama3-405b.toml"), ["model.experts=8", "parallel.ep=8"])
    mesh = mesh_shape(sparse)
    assert (mesh.world, mesh.shards, mesh.ep) == (16_384, 128, 8)
    assert msgspec.structs.replace(sparse.parallel, ep=1) == load(str(ROOT / "configs" / "llama3-405b.toml")).parallel
    assert mesh.expert_group(0) == mesh.group(0, ("cp", "dp"))[:8]
    assert mesh.expert_replicas(0) == mesh.group(0, ("cp", "dp"))[::8]
