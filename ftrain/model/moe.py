"""A mixture of experts instead of one SwiGLU, as Mixtral has it (arXiv 2401.04088).

    router     logits of each position for each expert, in fp32 at least; the k largest are chosen, and their softmax says with
               which weights the k outputs are added up
    balance    E / k x sum over experts of (share of the sequence's choices x mean probability over the sequence): 1 if all are
               chosen alike (Switch Transformers, arXiv 2101.03961). A sequence weighs as much as its valid tokens
    capacity   an expert takes so many positions of a sequence, the first ones; a later one goes on without that expert's share

Balance and capacity look at one sequence at a time, all of it, wherever its positions are: they are the same numbers under
every layout, and no batch that a sequence happens to be in changes what becomes of it. First come, first served keeps the
model causal: a position is never turned away for the sake of a later one.

The balance loss adds its gradient in the router's backward, and its value to nothing: the loss that is shown stays the
cross-entropy, comparable between runs, and a stage in the middle of a pipeline needs not be asked for a loss.

Under sequence parallelism a rank scores its own positions, and everybody gets everybody's scores: a few numbers a position.

    moe.router                [experts, hidden]
    moe.w1, moe.w3, moe.w2    [experts, ffn, hidden] twice, [experts, hidden, ffn]

Shape suffixes: B sequences, T positions, D width, E experts, K choices, N rows (B x T).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from ftrain.config import Model
from ftrain.model.functional import swiglu
from ftrain.model.fused import EAGER, Kernels
from ftrain.parallel.context import ContextGroup
from ftrain.parallel.expert import ExpertGroup, Route, Routing, combine, dispatch
from ftrain.parallel.ops import TensorGroup
from ftrain.parallel.tensor import narrowed, widened
from ftrain.parallel.weight import Weight, accumulate, linear, precise, project


@dataclass(frozen=True, slots=True)
class Groups:
    """With whom a rank computes a block."""

    tensor: TensorGroup | None = None
    context: ContextGroup | None = None
    experts: ExpertGroup | None = None


ALONE = Groups()


class Moe(nn.Module):
    """The experts of one layer that this rank has, and the layer's router."""

    def __init__(self, model: Model, number: int, groups: Groups, kernels: Kernels = EAGER) -> None:
        super().__init__()
        self.model, self.number, self.groups, self.kernels = model, number, groups, kernels
        own = model.experts // (1 if groups.experts is None else groups.experts.size)
        inner = model.ffn // (1 if groups.tensor is None else groups.tensor.size)
        self.router = _empty(model.experts, model.hidden)
        self.w1, self.w2, self.w3 = (
            _empty(own, inner, model.hidden),
            _empty(own, model.hidden, inner),
            _empty(own, inner, model.hidden),
        )

    def forward(self, x_BTD: torch.Tensor, routing: Routing) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]; between the blocks, as they are cut there."""
        weights, chosen, kept = route(x_BTD, self.router, Router(self.model, self.number, self.groups, routing))
        whole = widened(self.groups.tensor, x_BTD)
        ways = Route.of(self.groups.experts, chosen, kept, self.model.experts)
        made = self._experts(dispatch(whole.flatten(0, 1), ways), ways.counts)
        return narrowed(self.groups.tensor, combine(made, weights, ways).view(whole.shape), x_BTD.dtype)

    def _experts(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Each expert's SwiGLU of its own rows; of as many dims as a dense one's, for which kernels are compiled."""
        made = []
        for number, part in enumerate(rows.unsqueeze(0).split(counts, 1)):
            if counts[number]:
                gate, up = project(part, _matrix(self.w1, number), _matrix(self.w3, number))
                part = linear(swiglu(gate, up, self.kernels), _matrix(self.w2, number))
            made.append(part)
        return torch.cat(made, 1).squeeze(0)


def _matrix(stack: torch.Tensor, number: int) -> torch.Tensor:
    """One expert's, which adds its gradient to its part of the stack's."""
    if not isinstance(stack, Weight) or not torch.is_grad_enabled():
        return stack[number]
    matrix = Weight(stack.data[number])
    matrix.main_grad = stack.main_grad[number]
    return matrix


@dataclass(frozen=True, slots=True)
class Router:
    """What a layer's routing depends on besides its input and its matrix."""

    model: Model
    number: int  # of the layer
    groups: Groups
    routing: Routing

    def choose(self, logits_BTE: torch.Tensor) -> torch.Tensor:
        """The experts of each position, the likeliest first; of equal ones the first."""
        order = logits_BTE.sort(dim=-1, descending=True, stable=True).indices
        chosen = order[..., : self.model.experts_per_token]
        return chosen if self.routing.choose is None else self.routing.choose(self.number, chosen)

    def whole(self, chosen_BTK: torch.Tensor) -> torch.Tensor:
        """The choices of all positions of the sequences."""
        context = self.groups.context
        return chosen_BTK if context is None else context.whole(chosen_BTK)

    def counts(self, whole_BTK: torch.Tensor) -> torch.Tensor:
        """How often each expert was chosen in each sequence, [B, E]. (One-hot rows would take E numbers a choice.)"""
        whole_BN = whole_BTK.flatten(1)
        return whole_BN.new_zeros(len(whole_BN), self.model.experts).scatter_add_(1, whole_BN, torch.ones_like(whole_BN))

    def kept(self, whole_BTK: torch.Tensor, counts_BE: torch.Tensor) -> torch.Tensor | None:
        """Which of this rank's choices their experts have room for; None: all."""
        if not self.model.capacity:
            return None
        whole_BN = whole_BTK.flatten(1)
        sorted_BN, order_BN = whole_BN.sort(dim=1, stable=True)
        firsts_BE = counts_BE.cumsum(1) - counts_BE
        before_BN = torch.arange(whole_BN.shape[1], device=whole_BN.device) - firsts_BE.gather(1, sorted_BN)
        fits_BN = before_BN < capacity(self.model, whole_BTK.shape[1])
        kept = torch.empty_like(fits_BN).scatter_(1, order_BN, fits_BN).view(whole_BTK.shape)
        return kept if self.groups.context is None else self.groups.context.cut(kept)

    def slope(self, counts_BE: torch.Tensor, length: int, wide: torch.dtype) -> torch.Tensor | None:
        """Of the balance losses in each expert's probability at one of the `length` positions of each sequence, [B, E]."""
        balance, model = self.routing.balance, self.model
        if balance is None:
            return None
        return counts_BE.to(wide) * (balance.to(wide) * model.experts / (model.experts_per_token * length**2)).unsqueeze(-1)


def capacity(model: Model, length: int) -> int:
    """Positions of a sequence of so many that one expert takes at most; the factor is taken as it is written."""
    return math.ceil(Fraction(repr(model.capacity)) * length * model.experts_per_token / model.experts)


def route(
    x_BTD: torch.Tensor, weight_ED: torch.Tensor, router: Router
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Of each position of this rank's sequences: weights [N, K], experts [N, K], and which of these have room (None: all)."""
    weights, chosen, kept = _Router.apply(x_BTD, weight_ED, router)
    return weights, chosen, kept


class _Router(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, router: Router
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        group = router.groups.tensor
        wide = x.to(precise(x.dtype))
        own = F.linear(wide, weight.to(wide.dtype))
        logits = own if group is None else group.widen(own).wait()
        chosen = router.choose(logits)
        whole = router.whole(chosen)
        counts = router.counts(whole)
        kept = router.kept(whole, counts)
        softmax = logits.gather(-1, chosen).softmax(-1)
        ctx.save_for_backward(x, own, chosen, softmax, kept, router.slope(counts, whole.shape[1], wide.dtype))
        ctx.weight, ctx.router = weight, router
        weights = softmax if kept is None else softmax * kept
        return weights.flatten(0, 1), chosen.flatten(0, 1), None if kept is None else kept.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, dweights: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, own, chosen, softmax, kept, slope = ctx.saved_tensors
        group: TensorGroup | None = ctx.router.groups.tensor
        dweights = dweights.view(softmax.shape) if kept is None else dweights.view(softmax.shape) * kept
        dchosen = softmax * (dweights - (dweights * softmax).sum(-1, keepdim=True))
        dlogits = own.new_zeros(*chosen.shape[:-1], own.shape[-1]).scatter_(-1, chosen, dchosen)
        if group is not None:  # each rank knows what its columns of the experts say of the weights
            dlogits = group.narrow(dlogits).wait()
        dlogits = dlogits.reshape(-1, own.shape[-1])
        if slope is not None:
            dlogits = dlogits + _balance_gradient(own.flatten(0, 1), slope, chosen.shape[1], group)
        wide = x.to(own.dtype)
        dweight = accumulate(ctx.weight, dlogits, wide.flatten(0, 1))
        return (dlogits @ ctx.weight.to(own.dtype)).view(x.shape).to(x.dtype), dweight, None


def _balance_gradient(own_NE: torch.Tensor, slope_BE: torch.Tensor, length: int, group: TensorGroup | None) -> torch.Tensor:
    """Of the balance losses in the logits of this rank's rows: all of them, or its run if positions are cut over tp."""
    index = group.mesh.coordinate.tp if group is not None and group.sequence else 0
    first = index * len(own_NE)
    sequences = torch.arange(first, first + len(own_NE), device=own_NE.device) // length
    probabilities, slope = own_NE.softmax(-1), slope_BE[sequences]
    return probabilities * (slope - (probabilities * slope).sum(-1, keepdim=True))


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))
