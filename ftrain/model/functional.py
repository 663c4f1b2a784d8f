"""The differentiable pieces of the model, written so that no parameter ever has a `.grad`.

autograd would give each bf16 parameter a bf16 gradient and add micro-batches up in it: 1 % off after 64 of them. Here each
backward adds its weight gradient, in fp32, straight into `weight.main_grad`, and tells autograd that there is none. The bf16
weight is kept as it is and upcast where it is used: a transient copy, much cheaper than the matmul that follows, and bf16
matmuls are many times slower where the hardware lacks them.

Backward passes are by hand, so they also choose what is kept: the input of each group of projections once, no softmax
probabilities next to the logits, no product of the gate.

Shape suffixes: B sequences, T positions, D width, N rows (B x T), V vocabulary, H heads, K head size, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function


class Weight(torch.nn.Parameter):
    """A parameter whose gradient is added to `main_grad` instead of appearing in `.grad`."""

    main_grad: torch.Tensor


def project(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ w.T for several weights [out, in] of the same input [..., in], which is kept once."""
    outputs: tuple[torch.Tensor, ...] = _Project.apply(x, *weights)
    return outputs


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T"""
    return project(x, weight)[0]


def embed(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the embedding matrix, in the compute dtype."""
    output: torch.Tensor = _Embed.apply(tokens, weight, dtype)
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich, arXiv 1910.07467)."""
    output: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return output


def rotate(x_BTHK: torch.Tensor, cos_T1K: torch.Tensor, sin_T1K: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864), on the halves of a head as Hugging Face's Llama has it."""
    output: torch.Tensor = _Rotate.apply(x_BTHK, cos_T1K, sin_T1K)
    return output


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer, arXiv 2002.05202)."""
    output: torch.Tensor = _SwiGlu.apply(gate, up)
    return output


def head_loss(
    x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, valid_N: torch.Tensor, scale: float
) -> torch.Tensor:
    """scale * the sum of the cross-entropy over valid positions, an fp64 scalar; logits and softmax in fp32 at least.

    The gradient of the logits is made in the forward pass, in their place: one pass with an exponential instead of two, and
    only one [N, V] matrix is ever alive.
    """
    loss: torch.Tensor = _HeadLoss.apply(x_ND, weight_VD, targets_N, valid_N, scale)
    return loss


def token_losses(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each position, without gradients."""
    return _softmax_in_place(_logits(x_ND, weight_VD), targets_N)[0]


def accumulate(weight: torch.Tensor, dy_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
    """weight.main_grad += dy.T @ x, summed in the gradient's own precision."""
    grad = main_grad(weight)
    if grad.dtype == dy_NO.dtype:
        grad.addmm_(dy_NO.t(), x_NI)
    elif grad.is_cuda:
        grad.add_(torch.mm(dy_NO.t(), x_NI, out_dtype=grad.dtype))
    else:
        grad.addmm_(dy_NO.t().to(grad.dtype), x_NI.to(grad.dtype))


def main_grad(weight: torch.Tensor) -> torch.Tensor:
    """The buffer a weight's gradient is added to."""
    assert isinstance(weight, Weight), "a differentiated weight has a main_grad"
    return weight.main_grad


def precise(dtype: torch.dtype) -> torch.dtype:
    """fp32 for half-width types, the type itself otherwise: for reductions, norms, angles and the loss."""
    return torch.float32 if dtype.itemsize < 4 else dtype


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.weights = weights
        return tuple(F.linear(x, weight.to(x.dtype)) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x_ND = x.reshape(-1, x.shape[-1])
        dx_ND: torch.Tensor | None = None
        for weight, grad in zip(ctx.weights, grads, strict=True):
            dy_NO = grad.reshape(-1, grad.shape[-1])
            accumulate(weight, dy_NO, x_ND)
            wide = weight.to(x.dtype)
            dx_ND = dy_NO @ wide if dx_ND is None else dx_ND.addmm_(dy_NO, wide)
        assert dx_ND is not None
        return dx_ND.view(x.shape), *(None for _ in grads)


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        rows: torch.Tensor = F.embedding(tokens, weight)
        return rows.to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        grad, rows = main_grad(ctx.weight), dy.reshape(-1, dy.shape[-1])
        rows = rows.to(grad.dtype)
        if grad.is_cuda:  # index_add_ uses atomics there, whose order is not reproducible
            grad.index_put_((tokens.reshape(-1),), rows, accumulate=True)
        else:
            grad.index_add_(0, tokens.reshape(-1), rows)
        return None, None, None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(precise(x.dtype))
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse)
        ctx.weight = weight
        normed: torch.Tensor = wide * inverse
        return normed.mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        size, wide = x.shape[-1], inverse.dtype
        weight = ctx.weight.to(wide)
        normed, dy = x * inverse, dy.to(wide)
        product = (dy * normed).view(-1, size)
        main_grad(ctx.weight).add_(product.sum(0))
        mean = torch.mv(product, weight).div_(size).view(inverse.shape)
        dx = torch.mul(dy, weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return dx.to(x.dtype), None, None


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.cos, ctx.sin = cos, sin  # cached tables, not activations
        return _rotated(x, cos, sin, sign=1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotated(dy, ctx.cos, ctx.sin, sign=-1), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, sign: int) -> torch.Tensor:
    wide = x.to(cos.dtype)
    out = torch.empty_like(wide)
    (first, second), (out_first, out_second) = wide.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out.to(x.dtype)


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor, scale: float
    ) -> torch.Tensor:
        targets = targets * valid  # a masked target may be anything, also outside the vocabulary
        exps = _logits(x, weight)
        losses, sums = _softmax_in_place(exps, targets)
        share = valid.to(losses.dtype) * scale
        grads = exps.mul_((share / sums).unsqueeze(-1))
        grads.scatter_add_(-1, targets.unsqueeze(-1), -share.unsqueeze(-1))
        ctx.save_for_backward(x, grads.to(x.dtype))
        ctx.weight = weight
        return (losses * valid).sum(dtype=torch.float64) * scale

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x, grads = ctx.saved_tensors
        grads = grads.mul_(dloss)
        accumulate(ctx.weight, grads, x)
        return grads @ ctx.weight.to(x.dtype), None, None, None, None


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype)).to(precise(x.dtype))


def _softmax_in_place(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropies and sums of exponentials; the logits become the exponentials."""
    shifted = logits_NV.sub_(logits_NV.amax(-1, keepdim=True))
    chosen = shifted.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    sums = shifted.exp_().sum(-1)
    return sums.log() - chosen, sums
