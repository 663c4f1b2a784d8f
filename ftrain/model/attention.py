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

    Returns the output [B, T, H, K] and the lse [B, T, H], both in fp32 at least. A query that sees none has 0 and -inf.
    """
    out, lse = _nothing_seen(q_BTHK)
    _see(out, lse, q_BTHK, k_BSGK, v_BSGK, _rectangle(q_pos, k_pos), doc)
    return out, lse


def block_attention_backward(
    dout_BTHK: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    merged: tuple[torch.Tensor, torch.Tensor],
    q_pos: Spans,
    k_pos: Spans,
    doc: Documents | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v of one block, in fp32 at least. `operands`: q, k, v; `merged`: out and lse over all blocks."""
    grads = [torch.zeros_like(x, dtype=precise(x.dtype)) for x in operands]
    part = _rectangle(q_pos, k_pos)
    if part is not None:
        dq, dk, dv = _backward(dout_BTHK, operands, merged, part, doc)
        grads[0][:, part.rows], grads[1][:, part.keys], grads[2][:, part.keys] = dq, dk, dv
    return grads[0], grads[1], grads[2]


class _Rectangle(NamedTuple):
    """The part of a block in which queries see keys."""

    rows: slice  # the queries that see any: those before them come too early
    keys: slice  # the keys that are seen by any: those behind them come too late
    causal: bool  # queries and keys are the same positions; otherwise, without a mask, every query sees every key
    mask: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # positions, where it is neither


@lru_cache(maxsize=256)
def _rectangle(q_pos: Spans, k_pos: Spans) -> _Rectangle | None:
    """What there is to compute; None if no query sees any key."""
    queries, keys = ([position for span in spans for position in span] for spans in (q_pos, k_pos))
    if not queries or not keys or queries[-1] < keys[0]:
        return None
    first = next(index for index, position in enumerate(queries) if position >= keys[0])
    stop = next((index for index, position in enumerate(keys) if position > queries[-1]), len(keys))
    rows, seen = queries[first:], keys[:stop]
    part = _Rectangle(slice(first, len(queries)), slice(0, stop), rows == seen)
    simple = part.causal or seen[-1] <= rows[0]
    return part if simple else part._replace(mask=(tuple(rows), tuple(seen)))


class _Context(Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ContextGroup, documents: torch.Tensor | None
    ) -> torch.Tensor:
        out, lse = _nothing_seen(q)
        for source, (k_block, v_block) in group.blocks(torch.stack([k, v])):
            part, doc = _between(group, q.shape[1], source, documents)
            _see(out, lse, q, k_block, v_block, part, doc)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.documents = group, documents
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, kv = ctx.group, torch.stack([k, v])
        dq, sums = torch.zeros_like(q, dtype=precise(q.dtype)), group.gradients(kv)
        for source, (k_block, v_block) in group.blocks(kv):
            part, doc = _between(group, q.shape[1], source, ctx.documents)
            assert part is not None, "head and tail see a part of every block"
            dq_part, dk, dv = _backward(dout, (q, k_block, v_block), (out, lse), part, doc)
            dq[:, part.rows] += dq_part
            sums.add(source, part.keys, dk, dv)
        dk, dv = sums.home().to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _between(
    group: ContextGroup, length: int, source: int, documents: torch.Tensor | None
) -> tuple[_Rectangle | None, Documents | None]:
    """What this rank's queries see of the block that `source` made."""
    mine, theirs = group.spans(length), group.spans(length, source)
    return _rectangle(mine, theirs), None if documents is None else (take(documents, mine), take(documents, theirs))


def _nothing_seen(q_BTHK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of queries before they have seen anything."""
    out = torch.zeros_like(q_BTHK, dtype=precise(q_BTHK.dtype))
    return out, out.new_full(out.shape[:-1], float("-inf"))


def _see(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: _Rectangle | None,
    doc: Documents | None,
) -> None:
    """Merge what the queries see of one more block into `out` and `lse`."""
    if part is None:
        return
    new, new_lse = _forward(q[:, part.rows], k[:, part.keys], v[:, part.keys], part, doc)
    _merge(out[:, part.rows], lse[:, part.rows], new.to(out.dtype), new_lse.to(lse.dtype))


def _merge(out: torch.Tensor, lse: torch.Tensor, new: torch.Tensor, new_lse: torch.Tensor) -> None:
    """The softmax over two sets of keys from those over each of them, in place."""
    both = torch.logaddexp(lse, new_lse)
    base = both.masked_fill(both == float("-inf"), 0)  # nothing seen at all: exp(-inf - 0) = 0, where -inf - -inf is NaN
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(new, (new_lse - base).exp_().unsqueeze(-1))
    lse.copy_(both)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: _Rectangle, doc: Documents | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, T, H, K] and lse [B, T, H] of a rectangle."""
    mask = _mask(part, doc, k)
    out, lse = kernels.forward(_folded(q, k, v), causal=part.causal and mask is None, mask=mask)
    return _unfolded(out, k), _unfolded(lse.unsqueeze(-1), k).squeeze(-1)


def _backward(
    dout: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    merged: tuple[torch.Tensor, torch.Tensor],
    part: _Rectangle,
    doc: Documents | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of a rectangle's queries, keys and values, in fp32 at least; a key/value head's are summed over its group."""
    q, k, v = operands[0][:, part.rows], operands[1][:, part.keys], operands[2][:, part.keys]
    groups, wide, mask = k.shape[2], precise(q.dtype), _mask(part, doc, k)
    dout, out = (_folded_queries(x[:, part.rows].to(q.dtype), groups) for x in (dout, merged[0]))
    lse = _folded_queries(merged[1][:, part.rows].unsqueeze(-1), groups).squeeze(-1)
    dq, dk, dv = kernels.backward(dout, _folded(q, k, v), out, lse, causal=part.causal and mask is None, mask=mask)
    dk, dv = (x.to(wide).sum(1).unflatten(0, (-1, groups)).transpose(1, 2) for x in (dk, dv))
    return _unfolded(dq, k).to(wide), dk, dv


def _mask(part: _Rectangle, doc: Documents | None, k: torch.Tensor) -> torch.Tensor | None:
    """What is added to scores, 0 or -inf, [B x G, 1, T, S]; None if the kernel knows without."""
    seen: torch.Tensor | None = None
    if part.mask is not None:
        rows, keys = (torch.tensor(positions, device=k.device) for positions in part.mask)
        seen = (rows.unsqueeze(1) >= keys).unsqueeze(0)
    if doc is not None:
        same = _same_document(doc[0][:, part.rows], doc[1][:, part.keys])
        seen = same.tril() if part.causal else same if seen is None else same & seen
    if seen is None:
        return None
    added = torch.zeros(seen.shape, dtype=k.dtype, device=k.device).masked_fill_(~seen, float("-inf"))
    return added.unsqueeze(1).expand(k.shape[0], k.shape[2], -1, -1).flatten(0, 1).unsqueeze(1)


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
