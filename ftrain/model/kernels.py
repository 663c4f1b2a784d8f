"""Attention of a rectangle of queries and keys: forward with its lse, and backward from a given one.

PyTorch's fused CPU kernel, through the operators below `scaled_dot_product_attention`, which hides the lse and calls backward
with its own; on other devices the formulas written out (GPUs have flash kernels with the same arguments: they belong here once
there is a GPU to run them on). Both take heads in groups, [N, heads of a group, T, K], keys and values expanded along the
second dim: nothing is copied per query head, and gradients come back per query head, for the caller to sum.

A mask is added to the scores: 0, or -inf for what is not seen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ftrain.parallel.weight import precise

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Heads(NamedTuple):
    """The operands, [N, H, T, K] and twice [N, H, S, K]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def forward(heads: Heads, *, causal: bool, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N, H, T, K] and lse [N, H, T]; 0 and -inf for a row that sees nothing. `causal`: T = S, no later keys."""
    out, lse = _fused(heads, causal, mask) if heads.q.is_cpu else written_out(heads, causal, mask)
    if mask is not None:  # the fused kernel says 0 of rows that see nothing
        lse = lse.masked_fill(~mask.isfinite().any(-1).expand_as(lse), float("-inf"))
    return out, lse


def backward(
    dout: torch.Tensor, heads: Heads, out: torch.Tensor, lse: torch.Tensor, *, causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, of the operands' shapes, given the output and lse over *all* keys that the queries see."""
    lse = lse.masked_fill(lse == float("-inf"), 0)  # sees nothing anywhere: exp(-inf - 0) = 0, where -inf - -inf is NaN
    if not heads.q.is_cpu:
        return written_out_backward(dout, heads, out, lse, causal=causal, mask=mask)
    dq, dk, dv = _flash_backward(dout, *heads, out, lse, 0.0, causal, attn_mask=mask)
    return dq, dk, dv


def _fused(heads: Heads, causal: bool, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _flash(*heads, 0.0, causal, attn_mask=mask)
    return out, lse


def written_out(heads: Heads, causal: bool, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The formulas of `forward`."""
    scores = _scores(heads, causal, mask)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1)).exp_()
    return probabilities.to(heads.v.dtype) @ heads.v, lse


def written_out_backward(
    dout: torch.Tensor, heads: Heads, out: torch.Tensor, lse: torch.Tensor, *, causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formulas of `backward` (Dao, arXiv 2307.08691, section 3)."""
    probabilities = (_scores(heads, causal, mask) - lse.unsqueeze(-1)).exp_()
    rows = (dout * out).sum(-1, keepdim=True, dtype=probabilities.dtype)
    dscores = (dout @ heads.v.mT).to(probabilities.dtype).sub_(rows).mul_(probabilities).mul_(heads.q.shape[-1] ** -0.5)
    dscores, probabilities = dscores.to(dout.dtype), probabilities.to(dout.dtype)
    return dscores @ heads.k, dscores.mT @ heads.q, probabilities.mT @ dout


def _scores(heads: Heads, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    scores: torch.Tensor = (heads.q @ heads.k.mT).to(precise(heads.q.dtype)) * heads.q.shape[-1] ** -0.5
    if causal:
        length = scores.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(future, float("-inf"))
    if mask is not None:
        scores += mask
    return scores
