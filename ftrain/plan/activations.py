"""Bytes of activations that a layer keeps for its backward, listed tensor by tensor, and how many of them a rank holds.

Two counts stand side by side. The paper's closed formulas (GELU, f = 4h, dropout) are what the literature quotes. This
engine's layer is another one (SwiGLU, grouped queries, no dropout, attention that never writes its scores), so its memory is
added up from the tensors it saves; `benchmarks.memory` lays the storages found on running ranks beside the sum.
How many micro-batches are held is what the schedule object holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ftrain.combinations import head_dim
from ftrain.parallel.schedule import build, peak_in_flight
from ftrain.plan.params import vocabulary_rows
from ftrain.plan.setup import Quantity, Recompute, Setup


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that a layer keeps: bytes per micro-batch on one rank."""

    name: str
    formula: str
    nbytes: Quantity
    kept_when: tuple[Recompute, ...]


Row = tuple[str, str, Quantity, tuple[Recompute, ...]]
ALWAYS: tuple[Recompute, ...] = ("none", "selective", "full")
SOME: tuple[Recompute, ...] = ("none", "selective")


def saved_tensors(setup: Setup) -> tuple[Saved, ...]:
    """What one layer keeps, and under which recompute policies. t: TP, r: t under sequence parallelism, else 1; g: r if
    inputs are gathered again, else 1; w: bytes of an activation."""
    if "saved" not in setup.memo:
        setup.memo["saved"] = _saved_tensors(setup)
    found: tuple[Saved, ...] = setup.memo["saved"]
    return found


def _saved_tensors(setup: Setup) -> tuple[Saved, ...]:
    model, t, r, w = setup.config.model, setup.mesh.tp, setup.sp, setup.width
    g = r if setup.config.parallel.sp_regather else 1
    tokens, queries = setup.tokens, setup.ratio(setup.queries, t)
    stream = w * tokens * model.hidden
    normed = w * tokens * (queries + setup.local_keys) if model.qk_norm else 0
    heads = normed / w / head_dim(setup.config)
    exact = setup.exact
    rows: tuple[Row, ...] = (
        ("layer input", "w sbh / r", stream / r, ALWAYS),
        ("normed input of attention", "w sbh / g", stream / g, SOME),
        ("q, k, v", "w sb (q + 2kv) / t", w * tokens * (queries + 2 * setup.local_keys), SOME),
        ("q, k before their norm", "w sb (q + kv) / t", normed, SOME),
        ("attention output", "w sbq / t", w * tokens * setup.queries / t, SOME),
        ("log-sum-exp", "4 sba / t", exact * tokens * model.heads / t, ("none",)),
        ("input of the MLP's norm", "w sbh / r", stream / r, SOME),
        *(_experts(setup, tokens) if model.experts else _mlp(setup, w * tokens, g)),
        ("root mean squares of the norms", "8 sb / r, 4 sb a head", exact * (2 * tokens / r + heads), SOME),
    )
    return tuple(Saved(name, formula, value, kept) for name, formula, value, kept in rows if value)


def _mlp(setup: Setup, row: Quantity, g: int) -> tuple[Row, ...]:
    """The SwiGLU of a dense layer; `row`: bytes of a column of its activations."""
    model, t = setup.config.model, setup.mesh.tp
    return (
        ("normed input of the MLP", "w sbh / g", row * model.hidden / g, SOME),
        ("gate and up", "2w sbf / t", 2 * row * model.ffn / t, SOME),
        ("SwiGLU product", "w sbf / t", row * model.ffn / t, SOME),
    )


def _experts(setup: Setup, tokens: Quantity) -> tuple[Row, ...]:
    """A router, and the SwiGLUs of its experts on k rows for each token (fewer with a capacity below 1), used alike."""
    model, row = setup.config.model, setup.width * setup.expert_rows
    rows, inner = row * model.hidden, row * model.ffn / setup.mesh.tp
    exact = setup.exact
    choice = exact + 8 * (4 if setup.mesh.ep > 1 else 3)  # its weight, its number, its way there and back
    return (
        ("normed input of the router", "w sbh / r", setup.width * tokens * model.hidden / setup.sp, SOME),
        ("scores of the experts", "4 sbE / r", exact * tokens * model.experts / setup.sp, SOME),
        ("choices, weights and ways", f"{choice} sbk", choice * tokens * model.experts_per_token, SOME),
        ("rows of the experts", "w sbkh", rows, SOME),
        ("gate and up", "2w sbkf / t", 2 * inner, SOME),
        ("SwiGLU product", "w sbkf / t", inner, SOME),
        ("what the experts made", "w sbkh", rows, SOME),
    )


def layer_bytes(setup: Setup) -> Quantity:
    """Activations of one layer and micro-batch on one rank."""
    return _kept(setup, setup.options.recompute)


def working_bytes(setup: Setup) -> Quantity:
    """Recompute rebuilds one layer at a time: the part of a layer that is not kept, once."""
    return _kept(setup, "none") - _kept(setup, setup.options.recompute)


def _kept(setup: Setup, policy: Recompute) -> Quantity:
    known: dict[Recompute, Quantity] = setup.memo.setdefault("kept", {})
    if policy not in known:
        known[policy] = sum(item.nbytes for item in saved_tensors(setup) if policy in item.kept_when)
    return known[policy]


def head_bytes(setup: Setup) -> Quantity:
    """What the end of the model keeps of each micro-batch: the last norm's input and output, and the gradient of the logits,
    w sbV / t, which is made in the forward pass."""
    model, w, r = setup.config.model, setup.width, setup.sp
    g = r if setup.config.parallel.sp_regather else 1
    tokens = setup.tokens
    norm = w * tokens * model.hidden * (setup.ratio(1, r) + setup.ratio(1, g)) + setup.exact * tokens / r
    return norm + w * tokens * vocabulary_rows(setup)


def logits_bytes(setup: Setup) -> Quantity:
    """The logits in fp32, for as long as the loss is made of them: 4 sbV / t. Where activations are as wide, they become their
    own gradient in place."""
    return 4 * setup.tokens * vocabulary_rows(setup) if setup.width < 4 else 0


def in_flight(setup: Setup) -> tuple[int, ...]:
    """(virtual stage, micro-batch) pairs that each pipeline rank holds at once."""
    return held(setup.options.schedule, p=setup.mesh.pp, m=setup.microbatches, v=setup.chunks)


def heads_in_flight(setup: Setup) -> int:
    """Micro-batches whose end of the model is held at once, by the rank with the head."""
    m, p = setup.microbatches, setup.mesh.pp
    return {"gpipe": m, "zb-h1": min(m, p)}.get(setup.options.schedule, 1) if p > 1 else 1


def held(name: str, *, p: int, m: int, v: int) -> tuple[int, ...]:
    """The same for any schedule. The closed forms are tested to be what `peak_in_flight` reads off the schedule."""
    if name == "gpipe":
        return (m,) * p
    if name == "1f1b":
        return tuple(min(m, p - i) for i in range(p))
    if name == "interleaved":
        return tuple(min(v * m, 2 * (p - i - 1) + (v - 1) * p + 1) for i in range(p))
    if name == "zb-h1":
        return (min(m, p),) * p
    return peak_in_flight(build(name, num_ranks=p, num_microbatches=min(m, 2 * p), num_chunks=v))


def paper_layer_bytes(setup: Setup) -> dict[str, Fraction]:
    """The closed formulas of arXiv 2205.05198, table 2, per layer: by name."""
    model, mesh = setup.config.model, setup.mesh
    s, b, h, a, t = setup.config.data.seq_len, setup.config.batch.micro_batch, model.hidden, model.heads, mesh.tp
    sbh = Fraction(s * b * h, mesh.cp)
    scores = Fraction(5 * a * s, h)
    return {
        "nothing": sbh * (34 + scores),
        "TP": sbh * (10 + Fraction(24, t) + scores / t),
        "TP + SP": sbh * (Fraction(34, t) + scores / t),
        "TP, selective": sbh * (10 + Fraction(24, t)),
        "TP + SP, selective": sbh * Fraction(34, t),
        "full": 2 * sbh,
    }
