"""The peers' model: the same Llama-style decoder as ours, written as anybody would write it in plain PyTorch.

`nn.Linear`, `F.rms_norm`, SDPA, autograd's own gradients. Parameters have our names with `.weight` behind, so that both sides
can start from the same values, and a benchmark can check that both learn the same. Imports nothing but torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Shape(NamedTuple):
    """Sizes of the model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    eps: float
    rope_base: float

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


def rotary(shape: Shape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [T, K/2]."""
    frequencies = shape.rope_base ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [B, H, T, K]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Norm(nn.Module):
    """RMSNorm by the fused function."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        keys = shape.kv_heads * shape.head_dim
        self.wq = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.wk, self.wv = nn.Linear(shape.hidden, keys, bias=False), nn.Linear(shape.hidden, keys, bias=False)
        self.wo = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=grouped)
        attended: torch.Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return attended


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(shape.hidden, shape.ffn, bias=False), nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.w2 = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(shape.hidden, shape.eps), Norm(shape.hidden, shape.eps)
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """Some layers of the model, with the embedding if they are the first and the head if they are the last."""

    def __init__(self, shape: Shape, length: int, layers: range | None = None) -> None:
        super().__init__()
        layers = range(shape.layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == shape.layers
        self.embedding = nn.Embedding(shape.vocab, shape.hidden) if first else None
        self.layers = nn.ModuleDict({str(number): Block(shape) for number in layers})
        self.norm = Norm(shape.hidden, shape.eps) if last else None
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False) if last else None
        cos, sin = rotary(shape, length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] or activations [B, T, D] -> activations, or logits [B, T, V]."""
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay on matrices only, as ours."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
