"""Attention behind one seam, `block_attention`, and the rotary tables.

    block_attention(q, k, v, q_pos, k_pos, doc) -> out, lse

is attention of some queries to some keys, wherever in the sequence they stand: one block of what context parallelism makes of
attention. `lse`, the logarithm of each row's sum of exponentials, is what makes blocks addable: two partial results are merged
with weights exp(lse - lse of both). A row that sees nothing has lse = -inf and output 0, and merges without a NaN.

Backward of a block needs the *merged* output and lse: with them the softmax of all blocks is right in each of them
(P = exp(scores - lse), D = rowsum(dout x out)), and the blocks' gradients are plain summands (Dao, arXiv 2307.08691).

One process takes PyTorch's own function, which is also what the blocks are tested against.

Shape suffixes: B sequences, T positions, S key positions, H query heads, G key/value heads, K head size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd import Function

from ftrain.model import kernels
from ftrain.parallel.context import ContextGroup, Spans, take
from ftrain.parallel.weight import precise

Documents = tuple[torch.Tensor, torch.Tensor]
"""Numbers of the documents that queries [B, T] and keys [B, S] belong to: they see each other within one only."""


def attention(
    q_BTHK: torch.Tensor,
    k_BTGK: torch.Tensor,
    v_BTGK: torch.Tensor,
    group: ContextGroup | None = None,
    documents_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention, [B, T, H, K] in and out; k and v may have fewer heads, each then serves a group of queries.

    With a group, each rank has its positions of q, k and v, and gets those of the output. `documents_BT`: the number of the
    document that each position of the *whole* sequences belongs to.
    """
    if group is not None:
        output: torch.Tensor = _Context.apply(q_BTHK, k_BTGK, v_BTGK, group, documents_BT)
        return output
    grouped = q_BTHK.shape[2] != k_BTGK.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGK))
    mask = None if documents_BT is None else _same_document(documents_BT, documents_BT).tril().unsqueeze(1)
    causal = mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def block_attention(
    q_BTHK: torch.Tensor,
    k_BSGK: torch.Tensor,
    v_BSGK: torch.Tensor,
    q_pos: Spans,
    k_pos: Spans,
    doc: Documents | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries at `q_pos` to keys at `k_pos` (both ascending), none to a later one or into another document.

    Returns the output [B, T, H, K] and the lse [B, T, H]. A query that sees none has 0 and -inf.
    """
    causal, mask = _mask(q_pos, k_pos, doc, k_BSGK)
    out, lse = kernels.forward(_folded(q_BTHK, k_BSGK, v_BSGK), causal=causal, mask=mask)
    return _unfolded(out, k_BSGK), _unfolded(lse.unsqueeze(-1), k_BSGK).squeeze(-1)


class Merged(NamedTuple):
    """Attention of some queries to all the keys that they see, and the gradient of its output."""

    dout: torch.Tensor  # [B, T, H, K]
    out: torch.Tensor  # [B, T, H, K]
    lse: torch.Tensor  # [B, T, H]

    def rows(self, rows: slice) -> Merged:
        """Some of the queries."""
        return Merged(self.dout[:, rows], self.out[:, rows], self.lse[:, rows])


def block_attention_backward(
    merged: Merged,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    q_pos: Spans,
    k_pos: Spans,
    doc: Documents | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block adds to the gradients of its operands q, k and v, in fp32 at least.

    A key/value head's gradients are summed over the queries of its group.
    """
    q, k, v = operands
    groups, wide = k.shape[2], precise(q.dtype)
    causal, mask = _mask(q_pos, k_pos, doc, k)
    dout, out, lse = (_folded_queries(x, groups) for x in (merged.dout, merged.out, merged.lse.unsqueeze(-1)))
    dq, dk, dv = kernels.backward(dout, _folded(q, k, v), out, lse.squeeze(-1), causal=causal, mask=mask)
    dk, dv = (x.to(wide).sum(1).unflatten(0, (-1, groups)).transpose(1, 2) for x in (dk, dv))
    return _unfolded(dq, k).to(wide), dk, dv


def merge(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor) -> None:
    """Make `out` and `lse`, of some keys, those of these and other keys, whose own are `new` and `new_lse`. In place."""
    both = torch.logaddexp(lse, new_lse)
    base = both.masked_fill(both == float("-inf"), 0)  # nothing seen at all: exp(-inf - 0) = 0, where -inf - -inf is NaN
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(new.to(out.dtype), (new_lse - base).exp_().unsqueeze(-1))
    lse.copy_(both)


class Block(NamedTuple):
    """The part of the keys that a rank's queries see in what another rank has, and which of the queries do."""

    rows: slice  # the queries: those before them come too early
    keys: slice  # the keys: those behind them come too late
    q_pos: Spans
    k_pos: Spans

    def documents(self, whole_BT: torch.Tensor | None) -> Documents | None:
        """Those of the queries and of the keys."""
        return None if whole_BT is None else (take(whole_BT, self.q_pos), take(whole_BT, self.k_pos))


@lru_cache(maxsize=256)
def seen(q_pos: Spans, k_pos: Spans) -> Block:
    """What queries at some positions see of keys at others; there must be something."""
    first, last = k_pos[0].start, q_pos[-1].stop - 1
    skipped = sum(len(range(span.start, min(span.stop, max(span.start, first)))) for span in q_pos)
    kept = sum(len(range(span.start, min(span.stop, max(span.start, last + 1)))) for span in k_pos)
    rows = tuple(part for span in q_pos if (part := range(max(span.start, first), span.stop)))
    keys = tuple(part for span in k_pos if (part := range(span.start, min(span.stop, last + 1))))
    return Block(slice(skipped, skipped + sum(map(len, rows))), slice(0, kept), rows, keys)


class _Context(Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ContextGroup, documents: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.zeros_like(q, dtype=precise(q.dtype))
        lse = out.new_full(out.shape[:-1], float("-inf"))
        for source, (keys, values) in group.blocks(torch.stack([k, v])):
            block = seen(group.spans(q.shape[1]), group.spans(q.shape[1], source))
            operands = q[:, block.rows], keys[:, block.keys], values[:, block.keys]
            new, new_lse = block_attention(*operands, block.q_pos, block.k_pos, block.documents(documents))
            merge(out[:, block.rows], lse[:, block.rows], new, new_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.documents = group, documents
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, kv, merged = ctx.group, torch.stack([k, v]), Merged(dout, out, lse)
        dq, sums = torch.zeros_like(q, dtype=precise(q.dtype)), group.gradients(kv)
        for source, (keys, values) in group.blocks(kv):
            block = seen(group.spans(q.shape[1]), group.spans(q.shape[1], source))
            operands = q[:, block.rows], keys[:, block.keys], values[:, block.keys]
            doc = block.documents(ctx.documents)
            dq_part, dk, dv = block_attention_backward(merged.rows(block.rows), operands, block.q_pos, block.k_pos, doc)
            dq[:, block.rows] += dq_part
            sums.add(source, block.keys, dk, dv)
        dk, dv = sums.home().to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _mask(q_pos: Spans, k_pos: Spans, doc: Documents | None, k: torch.Tensor) -> tuple[bool, torch.Tensor | None]:
    """Whether the kernel's own triangle says who sees whom; otherwise what to add to scores, 0 or -inf, [B x G, 1, T, S], or
    None if everybody sees everybody.
    """
    same, earlier = q_pos == k_pos, k_pos[-1].stop - 1 <= q_pos[0].start
    if doc is None and (same or earlier):
        return same, None
    visible: torch.Tensor | None = None
    if not earlier:
        queries, keys = (torch.cat([torch.arange(x.start, x.stop, device=k.device) for x in spans]) for spans in (q_pos, k_pos))
        visible = (queries.unsqueeze(1) >= keys).unsqueeze(0)
    if doc is not None:
        within = _same_document(*doc)
        visible = within if visible is None else within & visible
    assert visible is not None
    added = torch.zeros(visible.shape, dtype=k.dtype, device=k.device).masked_fill_(~visible, float("-inf"))
    return False, added.unsqueeze(1).expand(k.shape[0], k.shape[2], -1, -1).flatten(0, 1).unsqueeze(1)


def _same_document(ours_BT: torch.Tensor, theirs_BS: torch.Tensor) -> torch.Tensor:
    """[B, T, S]"""
    return ours_BT.unsqueeze(2) == theirs_BS.unsqueeze(1)


def _folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> kernels.Heads:
    """[B x G, H / G, T, K] each: a key/value head is the same memory for all queries of its group."""
    queries = _folded_queries(q, k.shape[2])
    k, v = (x.transpose(1, 2).flatten(0, 1).unsqueeze(1).expand(-1, queries.shape[1], -1, -1) for x in (k, v))
    return kernels.Heads(queries, k, v)


def _folded_queries(x_BTHK: torch.Tensor, groups: int) -> torch.Tensor:
    folded: torch.Tensor = x_BTHK.transpose(1, 2).unflatten(1, (groups, -1))
    return folded.flatten(0, 1)


def _unfolded(x: torch.Tensor, k_BSGK: torch.Tensor) -> torch.Tensor:
    """Back to [B, T, H, ...]."""
    heads: torch.Tensor = x.unflatten(0, (-1, k_BSGK.shape[2]))
    return heads.flatten(1, 2).transpose(1, 2)


@lru_cache(maxsize=8)
def rotary_tables(
    spans: Spans, size: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency, [T, 1, K/2]; computed in fp64 so that every device has the same table."""
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    positions = torch.cat([torch.arange(span.start, span.stop, dtype=torch.float64) for span in spans])
    angles = torch.outer(positions, frequencies).unsqueeze(1)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)
