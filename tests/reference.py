"""The plain model and optimizer that every parallel run is compared with.

One process, ordinary autograd, `.grad`, `torch.optim.AdamW`, `clip_grad_norm_`; written from the papers' formulas and sharing
no code with the engine: only initial values are handed over. Slow on purpose where that is clearer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F


def forward(weights: dict[str, torch.Tensor], model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V]; the dtype is that of the weights."""
    x = weights["embedding"][tokens]
    for layer in range(model.layers):
        own = {name: weights[f"layers.{layer}.{name}"] for name in LAYER + QK_NORMS * model.qk_norm}
        h = norm(x, own["attention_norm"], model.norm_eps)
        x = x + attention(h, own, model) @ own["attention.wo"].T
        h = norm(x, own["mlp_norm"], model.norm_eps)
        x = x + (F.silu(h @ own["mlp.w1"].T) * (h @ own["mlp.w3"].T)) @ own["mlp.w2"].T
    head = weights["embedding"] if model.tied else weights["head"]
    return norm(x, weights["norm"], model.norm_eps) @ head.T


LAYER = (
    "attention_norm",
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "mlp_norm",
    "mlp.w1",
    "mlp.w2",
    "mlp.w3",
)
QK_NORMS = ("attention.q_norm", "attention.k_norm")


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def attention(h, own, model):
    """Masked softmax attention, written out; positions by complex rotation of (first half, second half)."""
    batch, length, _ = h.shape
    size = model.head_dim or model.hidden // model.heads
    kv_heads = model.kv_heads or model.heads
    q = (h @ own["attention.wq"].T).view(batch, length, model.heads, size)
    k = (h @ own["attention.wk"].T).view(batch, length, kv_heads, size)
    if model.qk_norm:
        q, k = (norm(x, own[f"attention.{name}"], model.norm_eps) for x, name in ((q, "q_norm"), (k, "k_norm")))
    q, k = rotate(q, model.rope_base), rotate(k, model.rope_base)
    v = (h @ own["attention.wv"].T).view(batch, length, kv_heads, size)
    group = model.heads // kv_heads
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(batch, length, model.heads * size)


def rotate(x, base):
    size = x.shape[-1]
    exponents = torch.arange(size // 2, dtype=torch.float64) * 2 / size
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] / base**exponents
    turn = torch.polar(torch.ones_like(angles), angles)[:, None, :]
    complex_type = torch.complex128 if x.dtype == torch.float64 else torch.complex64
    z = torch.complex(x[..., : size // 2], x[..., size // 2 :]) * turn.to(complex_type)
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


def loss_sum(weights, model, tokens, targets, valid):
    """Cross-entropy summed over the valid positions."""
    return summed_losses(weights, model, tokens, targets, valid)[0]


def summed_losses(weights, model, tokens, targets, valid):
    """The same, and what is learned from: with the z-loss."""
    logits = forward(weights, model, tokens).flatten(0, 1)[valid.flatten()]
    cross_entropy = F.cross_entropy(logits, targets[valid], reduction="sum")
    return cross_entropy, cross_entropy + model.z_loss * logits.logsumexp(-1).square().sum()


@dataclass
class Reference:
    """One-process training. fp64: everything exact. fp32: computes with bf16-rounded weights, keeps fp32 masters."""

    config: object
    masters: dict[str, torch.Tensor]
    dtype: torch.dtype = torch.float64
    grads: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self):
        self.params = {name: torch.nn.Parameter(value.detach().clone().to(self.dtype)) for name, value in self.masters.items()}
        options = self.config.optimizer
        decay = [p for p in self.params.values() if p.ndim == 2]
        plain = [p for p in self.params.values() if p.ndim == 1]
        self.adamw = torch.optim.AdamW(
            [{"params": decay, "weight_decay": options.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            foreach=False,
        )

    def weights(self):
        """What the forward pass sees."""
        if self.dtype == torch.float64:
            return {name: p.detach().clone().requires_grad_() for name, p in self.params.items()}
        return {name: p.detach().bfloat16().to(self.dtype).requires_grad_() for name, p in self.params.items()}

    def step(self, batch, lr):
        """One update on a whole global batch; returns (mean loss, gradient norm before clipping)."""
        tokens, targets, valid = (torch.from_numpy(np.asarray(a)) for a in (batch.tokens, batch.targets, batch.valid))
        weights = self.weights()
        loss, learned = (x / valid.sum() for x in summed_losses(weights, self.config.model, tokens, targets, valid))
        learned.backward()
        self.grads = {name: weight.grad.detach().clone() for name, weight in weights.items()}
        for name, parameter in self.params.items():
            parameter.grad = weights[name].grad
        clip = self.config.optimizer.clip_norm or float("inf")
        total = torch.nn.utils.clip_grad_norm_(list(self.params.values()), clip, foreach=False)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        return float(loss.detach()), float(total)

    def state(self, slot):
        """Masters or moments by name."""
        if slot == "master":
            return {name: p.detach() for name, p in self.params.items()}
        return {name: self.adamw.state[p][slot] for name, p in self.params.items()}
