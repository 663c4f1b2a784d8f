"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied or untied head.

The modules know nothing of data parallelism, buckets or checkpoints; their parameters are placed into the engine's flat
buffers by `place`. A stage of a pipeline is the same class with some ends missing: layer 7 is `layers.7` wherever it lives.
Parameters are created without storage, so that building the largest model costs nothing. With a tensor-parallel group the
modules have the shapes of this rank's part (its heads, its inner columns, its rows of the vocabulary), and what passes between
blocks is cut along the positions (`ftrain.parallel.ops`); `place` holds these shapes against the placement table's.

    embedding                                           [vocab, hidden]
    layers.N.attention_norm, layers.N.mlp_norm          [hidden]
    layers.N.attention.wq, wk, wv, wo                   [heads x K, hidden], ..., [hidden, heads x K]
    layers.N.mlp.w1 (gate), w3 (up), w2 (down)          [ffn, hidden], [ffn, hidden], [hidden, ffn]
    layers.N.moe.router, w1, w3, w2                     instead, with experts: see `ftrain.model.moe`
    layers.N.attention.q_norm, k_norm                   [K], if `qk_norm`
    norm                                                [hidden]
    head                                                [vocab, hidden], absent if tied
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ftrain.config import Model, Recompute
from ftrain.model.attention import attention, rotary_tables
from ftrain.model.functional import embed, head_loss, rms_norm, rotate, swiglu, token_losses
from ftrain.model.fused import EAGER, Kernels
from ftrain.model.moe import ALONE, Groups, Moe
from ftrain.model.recompute import again
from ftrain.parallel.context import ContextGroup
from ftrain.parallel.expert import Routing
from ftrain.parallel.layout import head_dim, num_kv_heads
from ftrain.parallel.ops import TensorGroup
from ftrain.parallel.optimizer import View
from ftrain.parallel.tensor import Labels, column, embed_cut, head_loss_cut, row, token_losses_cut
from ftrain.parallel.weight import Weight, precise


class Positions(NamedTuple):
    """Which positions of its sequences a rank computes, and what else layers need to know of them."""

    tables: tuple[torch.Tensor, torch.Tensor]  # rotary cos and sin of them
    group: ContextGroup | None = None  # the ranks that have the others
    documents: torch.Tensor | None = None  # [B, whole T], if attention stays within documents
    routing: Routing = Routing()


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, model: Model, group: TensorGroup | None, recompute: Recompute, kernels: Kernels = EAGER) -> None:
        super().__init__()
        self.head_dim, self.eps, self.group, self.kernels = head_dim(model), model.norm_eps, group, kernels
        self.recompute = recompute == "selective"
        tp = 1 if group is None else group.size
        queries, keys = model.heads // tp * self.head_dim, max(1, num_kv_heads(model) // tp) * self.head_dim
        self.wq, self.wk, self.wv = _empty(queries, model.hidden), _empty(keys, model.hidden), _empty(keys, model.hidden)
        self.wo = _empty(model.hidden, queries)
        self.q_norm = _empty(self.head_dim) if model.qk_norm else None
        self.k_norm = _empty(self.head_dim) if model.qk_norm else None

    def forward(self, x_BTD: torch.Tensor, positions: Positions) -> torch.Tensor:
        """[B, T, D] -> [B, T, D], all heads of this rank"""
        outputs = column(self.group, x_BTD, self.wq, self.wk, self.wv)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in outputs)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (rms_norm(x, w, self.eps, self.kernels) for x, w in ((q, self.q_norm), (k, self.k_norm)))

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k = (rotate(x, *positions.tables, self.kernels) for x in (q, k))
            return attention(q, k, v, positions.group, positions.documents)

        out_BTHK = again(core, q, k, v) if self.recompute else core(q, k, v)
        return row(self.group, out_BTHK.flatten(2), self.wo)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Model, group: TensorGroup | None, kernels: Kernels = EAGER) -> None:
        super().__init__()
        self.group, self.kernels = group, kernels
        inner = model.ffn if group is None else model.ffn // group.size
        self.w1, self.w2, self.w3 = (
            _empty(inner, model.hidden),
            _empty(model.hidden, inner),
            _empty(inner, model.hidden),
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        gate, up = column(self.group, x_BTD, self.w1, self.w3)
        return row(self.group, swiglu(gate, up, self.kernels), self.w2)


class Block(nn.Module):
    """One decoder layer: attention and an MLP, or experts, each on a normalised input, each added to the residual stream."""

    def __init__(
        self, model: Model, groups: Groups, recompute: Recompute, kernels: Kernels = EAGER, *, number: int = 0
    ) -> None:
        """`number`: of the layer."""
        super().__init__()
        self.eps, self.kernels = model.norm_eps, kernels
        self.attention_norm, self.mlp_norm = _empty(model.hidden), _empty(model.hidden)
        self.attention = Attention(model, groups.tensor, recompute, kernels)
        self.mlp = None if model.experts else Mlp(model, groups.tensor, kernels)
        self.moe = Moe(model, number, groups, kernels) if model.experts else None
        self.recompute = recompute == "full"

    def forward(self, x_BTD: torch.Tensor, positions: Positions) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]"""
        return again(lambda x: self._apply_to(x, positions), x_BTD) if self.recompute else self._apply_to(x_BTD, positions)

    def _apply_to(self, x_BTD: torch.Tensor, positions: Positions) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(rms_norm(x_BTD, self.attention_norm, self.eps, self.kernels), positions)
        normed = rms_norm(x_BTD, self.mlp_norm, self.eps, self.kernels)
        change: torch.Tensor
        if self.moe is None:
            assert self.mlp is not None
            change = self.mlp(normed)
        else:
            change = self.moe(normed, positions.routing)
        return x_BTD + change


class Transformer(nn.Module):
    """The layers of one pipeline stage, with the embedding if it is the first and norm and head if it is the last."""

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype,
        layers: range | None = None,
        groups: Groups = ALONE,
        recompute: Recompute = "none",
        kernels: Kernels = EAGER,
    ) -> None:
        """`dtype` is that of the activations; `layers` the numbers of the layers held, all by default."""
        super().__init__()
        layers = range(model.layers) if layers is None else layers
        self.model, self.dtype, self.kernels = model, dtype, kernels
        self.group, self.context = groups.tensor, groups.context
        matrix = (model.vocab if self.group is None else len(self.group.vocabulary), model.hidden)
        self.is_first, self.is_last = layers.start == 0, layers.stop == model.layers
        self.embedding = _empty(*matrix) if self.is_first or (self.is_last and model.tied) else None
        self.layers = nn.ModuleDict({str(n): Block(model, groups, recompute, kernels, number=n) for n in layers})
        self.norm = _empty(model.hidden) if self.is_last else None
        self.head = _empty(*matrix) if self.is_last and not model.tied else None

    def place(self, views: Mapping[str, View]) -> None:
        """Put every parameter where the optimizer keeps it: `views` by name, each a weight and its `main_grad`."""
        own = dict(self.named_parameters())
        nothing = {
            name: torch.empty(p.shape, dtype=self.dtype) for name, p in own.items() if not p.numel()
        }  # of the vocabulary
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items() if name not in nothing}
        given = {name: tuple(view.weight.shape) for name, view in views.items()}
        if shapes != given:
            raise ValueError(f"the model has parameters {shapes}, the layout {given}")
        for name, view in [*views.items(), *((name, View(empty, empty)) for name, empty in nothing.items())]:
            path, _, leaf = name.rpartition(".")
            weight = Weight(view.weight)
            weight.main_grad = view.main_grad
            setattr(self.get_submodule(path), leaf, weight)

    def forward(
        self,
        x: torch.Tensor,
        part: Sequence[str] | None = None,
        documents: torch.Tensor | None = None,
        routing: Routing | None = None,
    ) -> torch.Tensor:
        """Tokens [B, T] (first stage) or activations [B, T, D] -> activations, normalised on the last stage.

        `part`: only these of the stage's `blocks`, in order; the first's input is then what the block before it returned.
        `documents`, [B, T] of whole sequences: attention does not look from one into another. `routing`: for the experts.
        """
        for name in self.blocks if part is None else part:
            if name == "embedding":
                assert self.embedding is not None
                embedded = embed if self.group is None else partial(embed_cut, self.group)
                x = embedded(x, self.embedding, self.dtype)
            elif name == "head":
                assert self.norm is not None
                x = rms_norm(x, self.norm, self.model.norm_eps, self.kernels)
            else:
                positions = self.positions(x.shape[1] * self._cuts, x.device, documents)
                x = self.layers[name.removeprefix("layers.")](x, positions._replace(routing=routing or Routing()))
        return x

    @property
    def blocks(self) -> tuple[str, ...]:
        """What the stage applies, in order, as the placement table names it; the head's matrix comes with `loss`."""
        layers = (f"layers.{number}" for number in self.layers)
        return (*(("embedding",) if self.is_first else ()), *layers, *(("head",) if self.is_last else ()))

    def stream_shape(self, sequences: int, length: int) -> tuple[int, ...]:
        """The shape of the activations between two stages; `length`: positions of this rank."""
        return sequences, length // self._cuts, self.model.hidden

    def loss(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor, valid_BT: torch.Tensor, scale: float) -> torch.Tensor:
        """scale * the summed cross-entropy over valid positions of the last stage's activations, fp64."""
        x, targets, valid, z_loss = x_BTD.flatten(0, 1), targets_BT.flatten(), valid_BT.flatten(), self.model.z_loss
        if self.group is None:
            return head_loss(x, self.output, targets, valid, scale, z_loss)
        return head_loss_cut(self.group, x, self.output, Labels(targets, valid, scale, z_loss))

    def losses(self, x_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of each position, [B, T], without gradients."""
        of = token_losses if self.group is None else partial(token_losses_cut, self.group)
        return of(x_BTD.flatten(0, 1), self.output, targets_BT.flatten()).view(targets_BT.shape)

    def logits(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Logits over the vocabulary, in fp32 at least, without gradients; of one process only."""
        assert self.group is None, "no rank holds all columns of the logits"
        return (x_BTD @ self.output.to(x_BTD.dtype).t()).to(precise(x_BTD.dtype))

    def positions(self, length: int, device: torch.device, documents: torch.Tensor | None = None) -> Positions:
        """This rank's positions, `length` of each sequence."""
        spans = (range(length),) if self.context is None else self.context.spans(length)
        tables = rotary_tables(spans, head_dim(self.model), self.model.rope_base, precise(self.dtype), device)
        return Positions(tables, self.context, documents)

    @property
    def _cuts(self) -> int:
        """In how many parts the positions are cut between blocks."""
        return self.group.size if self.group is not None and self.group.sequence else 1

    @property
    def output(self) -> torch.Tensor:
        """The matrix of the output head."""
        weight = self.embedding if self.head is None else self.head
        assert weight is not None, "only the last stage has a head"
        return weight


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))
