"""The differentiable pieces of the model, written so that no parameter ever has a `.grad` (`ftrain.parallel.weight` says why).

Each backward adds its weight gradient, in fp32, straight into `weight.main_grad`, and tells autograd that there is none (but
for parameters that FSDP gathered, whose gradient it returns).
Backward passes are by hand, so they also choose what is kept: the input of each group of projections once, no softmax
probabilities next to the logits, no product of the gate. These are the pieces of one process; those that tensor parallelism
cuts have their twins in `ftrain.parallel.tensor`.

Shape suffixes: B sequences, T positions, D width, N rows (B x T), V vocabulary, H heads, K head size, F inner width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from ftrain.model.fused import EAGER, Kernels
from ftrain.parallel.weight import Weight, accumulate, accumulate_rows, add_grad, linear, precise, project

__all__ = ["Weight", "embed", "head_loss", "linear", "precise", "project", "rms_norm", "rotate", "swiglu", "token_losses"]


def embed(tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of the embedding matrix, in the compute dtype."""
    output: torch.Tensor = _Embed.apply(tokens, weight, dtype)
    return output


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Kernels = EAGER) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich, arXiv 1910.07467)."""
    output: torch.Tensor = _RmsNorm.apply(x, weight, eps, kernels)
    return output


def rotate(x_BTHK: torch.Tensor, cos_T1K: torch.Tensor, sin_T1K: torch.Tensor, kernels: Kernels = EAGER) -> torch.Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864), on the halves of a head as Hugging Face's Llama has it."""
    output: torch.Tensor = _Rotate.apply(x_BTHK, cos_T1K, sin_T1K, kernels)
    return output


def swiglu(gate: torch.Tensor, up: torch.Tensor, kernels: Kernels = EAGER) -> torch.Tensor:
    """silu(gate) * up (Shazeer, arXiv 2002.05202)."""
    output: torch.Tensor = _SwiGlu.apply(gate, up, kernels)
    return output


def head_loss(
    x_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    valid_N: torch.Tensor,
    scale: float,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """scale * the sum of the cross-entropy over valid positions, an fp64 scalar; logits and softmax in fp32 at least.

    `z_loss` times the squared logarithm of the softmax's denominator (PaLM, arXiv 2204.02311) is learned from and not shown:
    the value stays the cross-entropy, comparable between runs.

    The gradient of the logits is made in the forward pass, in their place: one pass with an exponential instead of two, and
    only one [N, V] matrix is ever alive.
    """
    loss: torch.Tensor = _HeadLoss.apply(x_ND, weight_VD, targets_N, valid_N, scale, z_loss)
    return loss


def token_losses(x_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of each position, without gradients."""
    return _softmax_in_place(_logits(x_ND, weight_VD), targets_N)[0]


class _Embed(Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        rows: torch.Tensor = F.embedding(tokens, weight)
        return rows.to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        return None, accumulate_rows(ctx.weight, tokens.reshape(-1), dy.reshape(-1, dy.shape[-1])), None


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: Kernels) -> torch.Tensor:
        normed, inverse = kernels.norm(x, weight, eps)
        ctx.save_for_backward(x, inverse)
        ctx.weight, ctx.kernels = weight, kernels
        return normed

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dweight = ctx.kernels.norm_backward(dy, *ctx.saved_tensors, ctx.weight)
        return dx, add_grad(ctx.weight, dweight), None, None


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        ctx.cos, ctx.sin, ctx.kernels = cos, sin, kernels  # cached tables, not activations
        return kernels.rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.kernels.rotate(dy, ctx.cos, ctx.sin, -1), None, None, None


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.gate(gate, up)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.kernels.gate_backward(dy, *ctx.saved_tensors), None


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        valid: torch.Tensor,
        scale: float,
        z_loss: float,
    ) -> torch.Tensor:
        targets = targets * valid  # a masked target may be anything, also outside the vocabulary
        exps = _logits(x, weight)
        losses, sums, largest = _softmax_in_place(exps, targets)
        share = valid.to(losses.dtype) * scale
        weighted = share * (1 + 2 * z_loss * (sums.log() + largest)) if z_loss else share
        grads = exps.mul_((weighted / sums).unsqueeze(-1))
        grads.scatter_add_(-1, targets.unsqueeze(-1), -share.unsqueeze(-1))
        ctx.save_for_backward(x, grads.to(x.dtype))
        ctx.weight = weight
        return (losses * valid).sum(dtype=torch.float64) * scale

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, grads = ctx.saved_tensors
        grads = grads.mul_(dloss)
        return grads @ ctx.weight.to(x.dtype), accumulate(ctx.weight, grads, x), None, None, None, None


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype)).to(precise(x.dtype))


def _softmax_in_place(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropies, sums of exponentials, largest logits; the logits become exponentials of the distance to the largest."""
    largest = logits_NV.amax(-1, keepdim=True)
    shifted = logits_NV.sub_(largest)
    chosen = shifted.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    sums = shifted.exp_().sum(-1)
    return sums.log() - chosen, sums, largest.squeeze(-1)
