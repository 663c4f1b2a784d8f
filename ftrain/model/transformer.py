"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

The modules know nothing of data parallelism, buckets or checkpoints; their parameters are placed into the engine's flat
buffers by `place`. A stage of a pipeline is the same class with some ends missing: layer 7 is `layers.7` wherever it lives.
Parameters are created without storage, so that building the largest model costs nothing.

    embedding                                           [vocab, hidden]
    layers.N.attention_norm, layers.N.mlp_norm          [hidden]
    layers.N.attention.wq, wk, wv, wo                   [heads x K, hidden], ..., [hidden, heads x K]
    layers.N.mlp.w1 (gate), w3 (up), w2 (down)          [ffn, hidden], [ffn, hidden], [hidden, ffn]
    norm                                                [hidden]
    head                                                [vocab, hidden], absent if tied
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ftrain.config import Model
from ftrain.model.attention import block_attention, rotary_tables
from ftrain.model.functional import Weight, embed, head_loss, linear, precise, project, rms_norm, rotate, swiglu, token_losses
from ftrain.parallel.layout import head_dim, num_kv_heads
from ftrain.parallel.optimizer import View

Tables = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.head_dim = head_dim(model)
        queries, keys = model.heads * self.head_dim, num_kv_heads(model) * self.head_dim
        self.wq, self.wk, self.wv = _empty(queries, model.hidden), _empty(keys, model.hidden), _empty(keys, model.hidden)
        self.wo = _empty(model.hidden, queries)

    def forward(self, x_BTD: torch.Tensor, tables: Tables) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in project(x_BTD, self.wq, self.wk, self.wv))
        out_BTHK = block_attention(rotate(q, *tables), rotate(k, *tables), v)
        return linear(out_BTHK.flatten(2), self.wo)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            _empty(model.ffn, model.hidden),
            _empty(model.hidden, model.ffn),
            _empty(model.ffn, model.hidden),
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        gate, up = project(x_BTD, self.w1, self.w3)
        return linear(swiglu(gate, up), self.w2)


class Block(nn.Module):
    """One decoder layer: attention and MLP, each on a normalised input, each added to the residual stream."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.eps = model.norm_eps
        self.attention_norm, self.mlp_norm = _empty(model.hidden), _empty(model.hidden)
        self.attention, self.mlp = Attention(model), Mlp(model)

    def forward(self, x_BTD: torch.Tensor, tables: Tables) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        x_BTD = x_BTD + self.attention(rms_norm(x_BTD, self.attention_norm, self.eps), tables)
        change: torch.Tensor = self.mlp(rms_norm(x_BTD, self.mlp_norm, self.eps))
        return x_BTD + change


class Transformer(nn.Module):
    """The layers of one pipeline stage, with the embedding if it is the first and norm and head if it is the last."""

    def __init__(self, model: Model, *, dtype: torch.dtype, layers: range | None = None) -> None:
        """`dtype` is that of the activations; `layers` the numbers of the layers held, all by default."""
        super().__init__()
        layers = range(model.layers) if layers is None else layers
        self.model, self.dtype = model, dtype
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.layers
        self.embedding = _empty(model.vocab, model.hidden) if self.is_first or (self.is_last and model.tied) else None
        self.layers = nn.ModuleDict({str(number): Block(model) for number in layers})
        self.norm = _empty(model.hidden) if self.is_last else None
        self.head = _empty(model.vocab, model.hidden) if self.is_last and not model.tied else None

    def place(self, views: Mapping[str, View]) -> None:
        """Put every parameter where the optimizer keeps it: `views` by name, each a weight and its `main_grad`."""
        own = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        given = {name: tuple(view.weight.shape) for name, view in views.items()}
        if own != given:
            raise ValueError(f"the model has parameters {own}, the layout {given}")
        for name, view in views.items():
            path, _, leaf = name.rpartition(".")
            weight = Weight(view.weight)
            weight.main_grad = view.main_grad
            setattr(self.get_submodule(path), leaf, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B, T] (first stage) or activations [B, T, D] -> activations, normalised on the last stage."""
        if self.is_first:
            assert self.embedding is not None
            x = embed(x, self.embedding, self.dtype)
        tables = self.tables(x.shape[1], x.device)
        for block in self.layers.values():
            x = block(x, tables)
        return x if self.norm is None else rms_norm(x, self.norm, self.model.norm_eps)

    def loss(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor, valid_BT: torch.Tensor, scale: float) -> torch.Tensor:
        """scale * the summed cross-entropy over valid positions of the last stage's activations, fp64."""
        return head_loss(x_BTD.flatten(0, 1), self.output, targets_BT.flatten(), valid_BT.flatten(), scale)

    def losses(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of each position, [B, T], without gradients."""
        return token_losses(x_BTD.flatten(0, 1), self.output, targets_BT.flatten()).view(targets_BT.shape)

    def logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary, in fp32 at least, without gradients."""
        return (x_BTD @ self.output.to(x_BTD.dtype).t()).to(precise(x_BTD.dtype))

    def tables(self, length: int, device: torch.device) -> Tables:
        """The rotary tables for sequences of this length."""
        return rotary_tables(length, head_dim(self.model), self.model.rope_base, precise(self.dtype), device)

    @property
    def output(self) -> torch.Tensor:
        """The matrix of the output head."""
        weight = self.embedding if self.head is None else self.head
        assert weight is not None, "only the last stage has a head"
        return weight


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))
