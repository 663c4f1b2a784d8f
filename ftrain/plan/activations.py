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
from ftrain.plan.setup import Recompute, Setup


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that a layer keeps: bytes per micro-batch on one rank."""

    name: str
    formula: str
    nbytes: Fraction
    kept_when: tuple[Recompute, ...]


def saved_tensors(setup: Setup) -> tuple[Saved, ...]:
    """What one layer keeps, and under which recompute policies. t: TP, r: t under sequence parallelism, else 1; g: r if
    inputs are gathered again, else 1; w: bytes of an activation."""
    model, mesh, t, r, w = setup.config.model, setup.mesh, setup.mesh.tp, setup.sp, setup.width
    g = r if setup.config.parallel.sp_regather else 1
    tokens = Fraction(setup.config.data.seq_len * setup.config.batch.micro_batch, mesh.cp)
    normed = w * tokens * (Fraction(setup.queries, t) + setup.local_keys) if model.qk_norm else Fraction(0)
    heads = normed / w / head_dim(setup.config)
    exact = max(4, w)  # of norms, softmax and loss
    always: tuple[Recompute, ...] = ("none", "selective", "full")
    some: tuple[Recompute, ...] = ("none", "selective")
    rows: tuple[tuple[str, str, Fraction, tuple[Recompute, ...]], ...] = (
        ("layer input", "w sbh / r", w * tokens * model.hidden / r, always),
        ("normed input of attention", "w sbh / g", w * tokens * model.hidden / g, some),
        ("q, k, v", "w sb (q + 2kv) / t", w * tokens * (Fraction(setup.queries, t) + 2 * setup.local_keys), some),
        ("q, k before their norm", "w sb (q + kv) / t", normed, some),
        ("attention output", "w sbq / t", w * tokens * setup.queries / t, some),
        ("log-sum-exp", "4 sba / t", exact * tokens * model.heads / t, ("none",)),
        ("input of the MLP's norm", "w sbh / r", w * tokens * model.hidden / r, some),
        ("normed input of the MLP", "w sbh / g", w * tokens * model.hidden / g, some),
        ("gate and up", "2w sbf / t", 2 * w * tokens * model.ffn / t, some),
        ("SwiGLU product", "w sbf / t", w * tokens * model.ffn / t, some),
        ("root mean squares of the norms", "8 sb / r, 4 sb a head", exact * (2 * tokens / r + heads), some),
    )
    return tuple(Saved(name, formula, value, kept) for name, formula, value, kept in rows if value)


def layer_bytes(setup: Setup) -> Fraction:
    """Activations of one layer and micro-batch on one rank."""
    return sum((item.nbytes for item in saved_tensors(setup) if setup.options.recompute in item.kept_when), start=Fraction(0))


def working_bytes(setup: Setup) -> Fraction:
    """Recompute rebuilds one layer at a time: the part of a layer that is not kept, once."""
    return sum(
        (item.nbytes for item in saved_tensors(setup) if setup.options.recompute not in item.kept_when), start=Fraction(0)
    )


def head_bytes(setup: Setup) -> Fraction:
    """What the end of the model keeps of each micro-batch: the last norm's input and output, and the gradient of the logits,
    w sbV / t, which is made in the forward pass."""
    model, w, r = setup.config.model, setup.width, setup.sp
    g = r if setup.config.parallel.sp_regather else 1
    tokens = Fraction(setup.config.data.seq_len * setup.config.batch.micro_batch, setup.mesh.cp)
    norm = w * tokens * model.hidden * (Fraction(1, r) + Fraction(1, g)) + max(4, w) * tokens / r
    return norm + w * tokens * vocabulary_rows(setup)


def logits_bytes(setup: Setup) -> Fraction:
    """The logits in fp32, for as long as the loss is made of them: 4 sbV / t. Where activations are as wide, they become their
    own gradient in place."""
    tokens = Fraction(setup.config.data.seq_len * setup.config.batch.micro_batch, setup.mesh.cp)
    return 4 * tokens * vocabulary_rows(setup) if setup.width < 4 else Fraction(0)


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
