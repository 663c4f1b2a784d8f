"""What a mixture of experts costs: a block against a plain loop over experts in PyTorch, and what sharing the experts out adds.

    over_plain_loop   seconds of our block over those of the peer's, which gathers each expert's rows, computes, and adds them
                      up with `index_add`; one process, one thread, in turns. Both have the same values and give the same
    cpu_of_ep2        processor seconds of two ranks that share the experts, half of the positions each, over those of one
                      process: what the journey to the experts and back costs, wherever there are fewer cores

`python -m benchmarks.experts --json`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import common
from benchmarks.ranks import world
from ftrain.config import Model
from ftrain.model.moe import Groups, Moe
from ftrain.parallel.expert import ExpertGroup, Routing
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import MeshShape
from ftrain.parallel.weight import Weight

Block = Callable[[torch.Tensor], torch.Tensor]
STD = 0.05
FULL = (Model(layers=1, hidden=512, heads=8, ffn=1024, vocab=9, experts=8), 2048)
TINY = (Model(layers=1, hidden=32, heads=1, ffn=64, vocab=9, experts=4), 64)


def values(model: Model) -> dict[str, torch.Tensor]:
    """The weights of a block."""
    generator = torch.Generator().manual_seed(1)
    up, down = (model.experts, model.ffn, model.hidden), (model.experts, model.hidden, model.ffn)
    shapes = {"router": (model.experts, model.hidden), "w1": up, "w2": down, "w3": up}
    return {name: torch.randn(shape, generator=generator) * STD for name, shape in shapes.items()}


def ours(model: Model, group: ExpertGroup | None = None, rank: int = 0) -> Block:
    """The engine's block, with the experts of a rank."""
    block = Moe(model, 0, Groups(experts=group))
    own = model.experts // (1 if group is None else group.size)
    for name, whole in values(model).items():
        weight = Weight(whole if name == "router" else whole[rank * own : (rank + 1) * own].clone())
        weight.main_grad = torch.zeros_like(weight)
        setattr(block, name, weight)

    def forward(x_BTD: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = block(x_BTD, Routing())
        return y

    return forward


def plain(model: Model) -> Block:
    """The peer."""
    weights = {name: value.requires_grad_() for name, value in values(model).items()}

    def forward(x_BTD: torch.Tensor) -> torch.Tensor:
        for weight in weights.values():
            weight.grad = None
        x = x_BTD.flatten(0, 1)
        best, chosen = (x @ weights["router"].t()).topk(model.experts_per_token)
        shares, out = best.softmax(-1), torch.zeros_like(x)
        for expert in range(model.experts):
            rows, which = torch.where(chosen == expert)
            gate, up = (F.linear(x[rows], weights[name][expert]) for name in ("w1", "w3"))
            made = F.linear(F.silu(gate) * up, weights["w2"][expert]) * shares[rows, which, None]
            out = out.index_add(0, rows, made)
        return out.view(x_BTD.shape)

    return forward


def seconds(block: Block, x: torch.Tensor, *, backward: bool) -> float:
    """Of one pass."""
    leaf, begin = x.clone().requires_grad_(), time.perf_counter()
    y = block(leaf)
    if backward:
        torch.autograd.backward(y, x)
    return time.perf_counter() - begin


def over_plain_loop(model: Model, x: torch.Tensor, rounds: int) -> dict[str, float | None]:
    """The median ratio of passes that follow each other."""
    blocks = {"ours": ours(model), "plain": plain(model)}
    torch.testing.assert_close(blocks["ours"](x), blocks["plain"](x), rtol=1e-3, atol=1e-4)
    found: dict[str, float | None] = {}
    for name, backward in (("forward", False), ("forward and backward", True)):
        cases = {who: lambda _, b=block, w=backward: seconds(b, x, backward=w) for who, block in blocks.items()}
        taken = common.interleaved(cases, rounds)
        pairs = zip(taken["ours"], taken["plain"], strict=True)
        found[name] = common.ratio(common.median(one / other for one, other in pairs), 1.0)
    return found


def shared_out(rank: int, model: Model, x: torch.Tensor, rounds: int) -> list[float]:
    """Processor seconds of forward and backward of half of the positions, on one of two ranks."""
    mesh = Mesh(MeshShape(dp=2, ep=2), rank)
    block, mine = ours(model, ExpertGroup.of(mesh), rank), x.chunk(2, 1)[rank]
    return _cpu(block, mine, rounds)


def _cpu(block: Block, x: torch.Tensor, rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        seconds(block, x, backward=True)
        taken.append(time.process_time() - begin)
    return taken[1:]


def cpu_of_ep2(model: Model, x: torch.Tensor, rounds: int) -> float | None:
    """Over one process, by medians over the rounds."""
    ranks: Sequence[list[float]] = world(shared_out, 2, model, x, rounds)
    two = common.median(sum(entry) for entry in zip(*ranks, strict=True))
    return common.ratio(two, common.median(_cpu(ours(model), x, rounds)))


def main() -> int:
    """The benchmark's command line."""
    options = common.options(__doc__.splitlines()[0] if __doc__ else "", rounds=15).parse_args()
    torch.set_num_threads(1)
    machine = common.Machine()
    model, length = TINY if options.tiny else FULL
    x = torch.randn(1, length, model.hidden, generator=torch.Generator().manual_seed(options.seed))
    ratios = over_plain_loop(model, x, options.rounds)
    result: dict[str, Any] = {
        "over_plain_loop": ratios,  # at most 1: not slower than the plain loop
        "cpu_of_ep2": cpu_of_ep2(model, x, options.rounds),
        "positions": length,
        "experts": [model.experts, model.experts_per_token, model.hidden, model.ffn],
        "machine": machine.record(),
    }
    common.emit(result, quiet=options.json, rows=[(name, f"{value} of the plain loop") for name, value in ratios.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
