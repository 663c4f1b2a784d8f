"""The layers that tensor parallelism cuts (Megatron-LM, arXiv 1909.08053), as autograd functions with their collectives inside.

    column   x @ w.T, each rank some rows of w (heads, inner columns): widen the input, the output stays cut
    row      x @ w.T, each rank some columns of w: the ranks' products are summands, narrow them
    embed    each rank some rows of the embedding: others contribute zeros, narrow the sum (exact in any dtype)
    losses   each rank some columns of the logits: the softmax needs the largest logit and the sum of exponentials of all,
             two all-reduces of a number or two per position; no rank ever holds a row of the whole vocabulary

A column followed by a row needs nothing in between: that is the whole trick, and why a block costs one collective in and one
out. With a group of None these are the plain functions of one process.

What is kept for backward: with `regather` the cut input of a block (1/tp of it), gathered once more in backward; without it,
the whole input. With `overlap`, that gather runs beside the gradient of the input, and the narrowing of that gradient beside
the gradients of the weights: the same operations on the same operands, hence the same bits.

The vocabulary is cut as the placement table says, unpadded: a rank's part may be short or empty, and its logits then have few
columns or none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Function

from ftrain.parallel.mesh import Pending
from ftrain.parallel.ops import TensorGroup
from ftrain.parallel.weight import accumulate, accumulate_rows, linear, precise, project


def column(group: TensorGroup | None, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ w.T for several weights, each cut by rows: [B, T / tp, D] in, [B, T, own rows] out."""
    if group is None:
        return project(x, *weights)
    outputs: tuple[torch.Tensor, ...] = _Column.apply(group, x, *weights)
    return outputs


def row(group: TensorGroup | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T, the weight cut by columns as the input is: [B, T, own columns] in, [B, T / tp, D] out."""
    if group is None:
        return linear(x, weight)
    output: torch.Tensor = _Row.apply(group, x, weight)
    return output


def widened(group: TensorGroup | None, x: torch.Tensor) -> torch.Tensor:
    """What a block begins with that is no matrix: [B, T / tp, D] in, [B, T, D] out; gradients of it are summands."""
    if group is None:
        return x
    output: torch.Tensor = _Widened.apply(group, x)
    return output


def narrowed(group: TensorGroup | None, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """And ends with: summands [B, T, D] in, their sum out, [B, T / tp, D] in `dtype`."""
    if group is None:
        return y.to(dtype)
    output: torch.Tensor = _Narrowed.apply(group, y, dtype)
    return output


def embed_cut(group: TensorGroup, tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of an embedding matrix cut by rows: [B, T] in, [B, T / tp, D] out."""
    output: torch.Tensor = _Embed.apply(group, tokens, weight, dtype)
    return output


class Labels(NamedTuple):
    """What the loss is about, for all positions of a micro-batch in a row, the same on every tensor-parallel rank."""

    targets: torch.Tensor
    valid: torch.Tensor
    scale: float
    z_loss: float = 0.0


def head_loss_cut(group: TensorGroup, x: torch.Tensor, weight: torch.Tensor, labels: Labels) -> torch.Tensor:
    """`ftrain.model.functional.head_loss` with a head cut by rows; `x` is [N / tp, D]. Every rank returns the whole loss."""
    loss: torch.Tensor = _HeadLoss.apply(group, x, weight, labels)
    return loss


def token_losses_cut(group: TensorGroup, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each position, [N], without gradients; `x` is [N / tp, D]."""
    logits = _logits(group.widen(x).wait(), weight)
    return _softmax_in_place(group, logits, targets).losses


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = group.widen(x).wait()
        ctx.save_for_backward(x if group.regather else whole)
        ctx.group, ctx.weights = group, weights
        return tuple(F.linear(whole, weight.to(x.dtype)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (saved,) = ctx.saved_tensors
        dx, dweights = _column_backward(ctx.group, saved, ctx.weights, grads)
        return None, dx, *dweights


def _column_backward(
    group: TensorGroup, saved: torch.Tensor, weights: tuple[torch.Tensor, ...], grads: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The gradient of a column's input, narrowed, and what there is to return of those of its weights."""
    pending_x = group.widen(saved) if group.regather else Pending(saved)
    rows = [grad.flatten(0, -2) for grad in grads]
    dx_ND = rows[0] @ weights[0].to(saved.dtype)
    for dy_NO, weight in zip(rows[1:], weights[1:], strict=True):
        dx_ND.addmm_(dy_NO, weight.to(saved.dtype))
    pending_dx = group.narrow(dx_ND.view(*grads[0].shape[:-1], -1))
    x_ND = pending_x.wait().reshape(-1, saved.shape[-1])
    dweights = [accumulate(weight, dy_NO, x_ND) for dy_NO, weight in zip(rows, weights, strict=True)]
    return pending_dx.wait().to(saved.dtype), dweights


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.group, ctx.weight = group, weight
        return group.narrow(F.linear(x, weight.to(x.dtype))).wait().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor | None]:
        (x,) = ctx.saved_tensors
        whole = ctx.group.widen(dy).wait()
        dy_NO = whole.reshape(-1, whole.shape[-1])
        dweight = accumulate(ctx.weight, dy_NO, x.reshape(-1, x.shape[-1]))
        return None, (dy_NO @ ctx.weight.to(x.dtype)).view(x.shape), dweight


class _Widened(Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return group.widen(x).wait().view(x.shape if not group.sequence else (x.shape[0], -1, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _sum(ctx.group, dy).to(dy.dtype)


class _Narrowed(Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.group, ctx.dtype = group, y.dtype
        return _sum(group, y).to(dtype)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, ctx.group.widen(dout).wait().to(ctx.dtype), None


def _sum(group: TensorGroup, y: torch.Tensor) -> torch.Tensor:
    """`narrow`, of a tensor that others may still look at."""
    return group.narrow(y if group.sequence else y.clone()).wait()


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        own, is_mine = _own(group, tokens)
        ctx.save_for_backward(own, is_mine)
        ctx.group, ctx.weight = group, weight
        out = weight.new_zeros((*tokens.shape, weight.shape[1]), dtype=dtype)
        out[is_mine] = F.embedding(own[is_mine], weight).to(dtype)
        return group.narrow(out).wait().to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, None, torch.Tensor | None, None]:
        own, is_mine = ctx.saved_tensors
        whole = ctx.group.widen(dy).wait().view(*own.shape, dy.shape[-1])
        return None, None, accumulate_rows(ctx.weight, own[is_mine], whole[is_mine]), None


class _HeadLoss(Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, x: torch.Tensor, weight: torch.Tensor, labels: Labels) -> torch.Tensor:
        whole = group.widen(x).wait()
        exps = _logits(whole, weight)
        softmax = _softmax_in_place(group, exps, labels.targets * labels.valid)
        share = labels.valid.to(exps.dtype) * labels.scale
        weighted = share * (1 + 2 * labels.z_loss * softmax.log_denominator) if labels.z_loss else share
        grads = exps.mul_((weighted / softmax.sums).unsqueeze(-1))
        if len(group.vocabulary):
            grads.scatter_add_(-1, softmax.own.unsqueeze(-1), -(share * softmax.is_mine).unsqueeze(-1))
        ctx.save_for_backward(x if group.regather else whole, grads.to(x.dtype))
        ctx.group, ctx.weight = group, weight
        return (softmax.losses * labels.valid).sum(dtype=torch.float64) * labels.scale

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor | None, None]:
        saved, grads = ctx.saved_tensors
        dx, (dweight,) = _column_backward(ctx.group, saved, (ctx.weight,), (grads.mul_(dloss),))
        return None, dx, dweight, None


class _Softmax(NamedTuple):
    """Of each position: its loss, and what its gradient needs."""

    losses: torch.Tensor
    sums: torch.Tensor  # of the exponentials, over the whole vocabulary
    log_denominator: torch.Tensor
    own: torch.Tensor  # the target's row among this rank's; 0 if it is another's
    is_mine: torch.Tensor


def _softmax_in_place(group: TensorGroup, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> _Softmax:
    """The logits, of this rank's rows only, become exponentials of their distance to the largest of all."""
    own, is_mine = _own(group, targets_N)
    some = len(group.vocabulary) > 0
    largest = group.largest(logits_NV.amax(-1) if some else logits_NV.new_full(own.shape, float("-inf")))
    shifted = logits_NV.sub_(largest.unsqueeze(-1))
    chosen = shifted.gather(-1, own.unsqueeze(-1)).squeeze(-1) * is_mine if some else torch.zeros_like(largest)
    sums, chosen = group.sum(torch.stack([shifted.exp_().sum(-1), chosen])).unbind()
    logs = sums.log()
    return _Softmax(logs - chosen, sums, logs + largest, own, is_mine)


def _own(group: TensorGroup, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices among this rank's rows of the vocabulary (0 where it has none), and where it has one."""
    shifted = ids - group.vocabulary.start
    is_mine = (shifted >= 0) & (shifted < len(group.vocabulary))
    return shifted * is_mine, is_mine


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype)).to(precise(x.dtype))
