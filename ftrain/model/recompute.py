"""Forward work that is done again in backward instead of being remembered.

    none        every input that a backward pass needs is kept
    selective   the core of attention (rotation, softmax, weighted values) is done again from the projections: much memory and
                little work where attention keeps its probabilities; a fused kernel has dropped them already
    full        of a layer only its input is kept, and the whole layer is done again: a third more compute

The same operations on the same values: gradients are the same bits under all three. Selective: Korthikanti et al., arXiv
2205.05198; full: Chen et al., arXiv 1604.06174. Matrix gradients of the inner backward go to `main_grad` as always, or are put
off with those of the outer one (zero bubble).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function


def again(work: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """work(*inputs), of which only the inputs are kept; all of them are differentiated."""
    if not torch.is_grad_enabled():
        return work(*inputs)
    output: torch.Tensor = _Again.apply(work, *inputs)
    return output


class _Again(Function):
    @staticmethod
    def forward(ctx: Any, work: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.work = work
        ctx.save_for_backward(*inputs)
        return work(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.work(*leaves)
        torch.autograd.backward(output, dy)
        return None, *(leaf.grad for leaf in leaves)
