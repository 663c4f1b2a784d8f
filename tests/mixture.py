"""A mixture of experts as a loop over positions: what tests hold the engine's against."""

import math
from fractions import Fraction

import torch
import torch.nn.functional as F


def loop(x_TD, weights, of, balance=0.0):
    """One sequence, one position after the other, and `balance` times its balance loss; `of`: the model."""
    router, w1, w2, w3 = (weights[name] for name in ("router", "w1", "w2", "w3"))
    room = [math.ceil(Fraction(str(of.capacity)) * len(x_TD) * of.experts_per_token / of.experts) or 10**9] * of.experts
    out, (chosen, probability) = [], torch.zeros(2, of.experts, dtype=x_TD.dtype)
    for x in x_TD:
        logits = router @ x
        best = sorted(range(of.experts), key=lambda e: (-logits[e].item(), e))[: of.experts_per_token]
        shares = logits[best].softmax(0)
        y = torch.zeros_like(x)
        for expert, share in zip(best, shares, strict=True):
            chosen[expert] += 1
            if room[expert]:
                room[expert] -= 1
                y = y + share * (w2[expert] @ (F.silu(w1[expert] @ x) * (w3[expert] @ x)))
        probability = probability + logits.softmax(0)
        out.append(y)
    count = len(x_TD) * of.experts_per_token
    return torch.stack(out), balance * of.experts * (chosen / count * probability / len(x_TD)).sum()
