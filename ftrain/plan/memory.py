"""`ftrain plan memory`: does it fit, and what takes the room.

Fit comes before throughput: a layout that does not fit has no speed. The ideal rows (`ftrain.plan.state`) give the founding
documents' numbers; below them stand the real ranks, stage by stage, where the ends carry the embedding and the head, norms
exist once per TP rank, and the first stages hold the most activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from ftrain.parallel.schedule import AHEAD, rank_of
from ftrain.parallel.shape import SHARD_AXES
from ftrain.plan import state
from ftrain.plan.activations import (
    head_bytes,
    heads_in_flight,
    in_flight,
    layer_bytes,
    logits_bytes,
    paper_layer_bytes,
    saved_tensors,
    working_bytes,
)
from ftrain.plan.figure import Answer, Section, Table, Value, nbytes, number, percent, size, why
from ftrain.plan.params import Shard, alignment, heaviest, replicated, shard
from ftrain.plan.setup import MEGATRON_MEMORY, SELECTIVE, Quantity, Recompute, Setup, layout
from ftrain.units import plural

NOT_INCLUDED = (
    "CUDA context, NCCL channels and library workspaces (a few GB on a GPU)",
    "allocator fragmentation",
    "data loader and its prefetched batches",
    "evaluation, and anything a user's hook keeps",
)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted bytes of the most loaded rank of one pipeline rank. (Sums are kept, hence no slots.)"""

    pp: int
    layers: int
    params: int
    weights: Quantity
    gradients: Quantity
    master: Quantity
    moments: Quantity
    alignment: Quantity
    """Padding of the flat buffers that the records lie in."""
    activations: Quantity
    """Kept for backward."""
    buffers: Quantity
    """What an action needs while it runs."""

    @cached_property
    def state(self) -> Quantity:
        """What stays from step to step."""
        return self.weights + self.gradients + self.master + self.moments + self.alignment

    @cached_property
    def total(self) -> Quantity:
        """All that is predicted."""
        return self.state + self.activations + self.buffers


def all_ranks(setup: Setup, *, only: tuple[int, ...] = (), aligned: bool = True) -> tuple[RankMemory, ...]:
    """The memory of every pipeline rank (or of `only` those), of its most loaded TP rank.

    `aligned`: with the padding of the buffers, for which they are planned as the engine does.
    """
    stage_layer, head = layer_bytes(setup) / setup.chunks, heads_in_flight(setup) * head_bytes(setup)
    buffers, split = buffer_bytes(setup) + working_bytes(setup), state.shares(setup)
    found, head_rank, held = [], _head_rank(setup), in_flight(setup)
    for pp in only or range(setup.mesh.pp):
        own = shard(setup, pp)
        updated = own.common - (own.head if setup.config.model.tied else 0)  # at the other end of a tied embedding
        updated += own.experts * setup.mesh.ep  # shared by so many ranks fewer
        found.append(
            RankMemory(
                pp=pp,
                layers=own.layers,
                params=own.total,
                weights=setup.ratio(state.WEIGHT * own.total, split["weights"]),
                gradients=setup.ratio(state.GRADIENT * own.total, split["gradients"]),
                master=setup.ratio(state.MASTER * updated, split["master"]),
                moments=setup.ratio(state.MOMENTS * updated, split["moments"]),
                alignment=_alignment(setup, pp) if aligned else 0,
                activations=held[pp] * own.layers * stage_layer + (head if pp == head_rank else 0),
                buffers=buffers + _gathered(setup, own) + (logits_bytes(setup) if pp == head_rank else 0),
            )
        )
    return tuple(found)


def _alignment(setup: Setup, pp: int) -> Quantity:
    """Padding of the buffers, at the bytes per parameter of what lies in them."""
    common, experts = (state.bytes_per_param(split(setup)) for split in (state.shares, state.expert_shares))
    found = alignment(setup, pp)
    return sum((count * (common if sharers == 1 else experts) for sharers, count in found.items()), start=Fraction(0))


def heaviest_ranks(setup: Setup) -> tuple[RankMemory, ...]:
    """The ranks among which the worst one is: no other holds more parameters or more micro-batches. Without alignment, which
    takes a few percent: a search asks for hundreds of layouts."""
    return all_ranks(setup, only=heaviest(setup), aligned=False)


def _head_rank(setup: Setup) -> int:
    """The pipeline rank that computes the logits: the last, or the first on a V."""
    return rank_of(setup.mesh.pp * setup.chunks - 1, num_ranks=setup.mesh.pp, placement=setup.placement)


def buffer_bytes(setup: Setup) -> Quantity:
    """Communication buffers: two whole activations for TP, other ranks' keys and values for CP, rows to experts of other ranks
    as they go and as they come for EP, and the messages of PP."""
    rows = 2 * setup.width * setup.expert_rows * setup.config.model.hidden if setup.mesh.ep > 1 else 0
    return (2 * _whole(setup) if setup.mesh.tp > 1 else 0) + exchange_bytes(setup) + rows + link_bytes(setup)


def exchange_bytes(setup: Setup) -> Quantity:
    """Keys, values and their fp32 gradients of the layer at work (`ftrain.parallel.context`): with a ring two blocks each,
    otherwise one's own and everybody's gathered.
    """
    mesh, config = setup.mesh, setup.config
    if mesh.cp == 1:
        return 0
    block = 2 * setup.tokens * setup.local_keys
    return block * (2 if config.parallel.cp_exchange == "ring" else mesh.cp + 1) * (setup.width + setup.exact)


def link_bytes(setup: Setup) -> Quantity:
    """What is under way between stages: p + 1 messages that left a rank and those that arrive (`ftrain.parallel.pipeline`)."""
    arriving = AHEAD if setup.profile.device == "cpu" else 1
    return (setup.mesh.pp + 1 + arriving) * _whole(setup) / setup.sp if setup.mesh.pp > 1 else 0


def _whole(setup: Setup) -> Quantity:
    """w sbh: the activations of a micro-batch between two layers."""
    return setup.width * setup.tokens * setup.config.model.hidden


def _gathered(setup: Setup, own: Shard) -> Quantity:
    """FSDP: two gathered bf16 layers and one layer's whole gradient, on top of the shards."""
    if setup.options.sharding == "zero1":
        return 0
    return setup.ratio(own.total, max(1, own.layers)) * (2 * state.WEIGHT + state.GRADIENT)


def refusals(setup: Setup, ranks: tuple[RankMemory, ...]) -> tuple[str, ...]:
    """Why the plan does not fit, in words; empty if it does."""
    worst = max(ranks, key=lambda rank: rank.total)
    room = setup.profile.memory_bytes
    if worst.total <= room:
        return ()
    mesh, name, shares_out = setup.mesh, setup.profile.name, setup.mesh.ep < setup.config.model.experts
    need = f"pipeline rank {worst.pp} needs {size(worst.total, digits=1)} of {size(room)} on {name}"
    if mesh.tp == mesh.pp == 1 and setup.options.sharding == "zero1" and worst.state > room and not shares_out:
        floor = (state.WEIGHT + state.GRADIENT) * worst.params
        return (
            "data parallelism alone cannot hold this model: every card keeps all weights and gradients, "
            f"{size(floor, digits=1)}, however many replicas there are; {need}. Cut the model: raise parallel.tp "
            "(within a server), then parallel.pp",
        )
    return (f"does not fit: {need}. {_advice(setup, worst)}",)


def _advice(setup: Setup, worst: RankMemory) -> str:
    """What to change: recompute if that is enough, else a cut of the larger part."""
    policies: tuple[Recompute, ...] = ("selective", "full")
    for policy in policies:
        tried = setup.with_recompute(policy)
        peak = max(rank.total for rank in all_ranks(tried))
        if peak <= setup.profile.memory_bytes and policy != setup.options.recompute:
            return f"With --recompute {policy} it needs {size(peak, digits=1)}, which fits"
    if worst.activations > worst.state:
        return "Activations are the largest part: raise parallel.cp or parallel.tp, or lower batch.micro_batch"
    if setup.mesh.ep < setup.config.model.experts:
        return "State is the largest part: raise parallel.ep (no further ranks needed), parallel.pp or parallel.tp"
    also = "" if setup.config.model.experts else ", or use --sharding fsdp"
    return f"State is the largest part: raise parallel.pp or parallel.tp{also}"


def answer(setup: Setup) -> Answer:
    """The whole answer."""
    setup.require_schedule()
    ranks = all_ranks(setup)
    ideal = setup.options.params == 0 or abs(setup.options.params - _config_params(setup)) <= 0.05 * _config_params(setup)
    sections = [state.whole(setup), state.per_card(setup), _real(setup, ranks), _activation_section(setup)]
    warnings: tuple[str, ...] = (
        () if ideal else ("--params is far from the config's own size: the stage table below is the config's",)
    )
    warnings += _inner_groups(setup)
    return Answer(
        command="memory",
        title=f"Memory of {layout(setup.mesh)} on {setup.profile.title}",
        sections=tuple(sections),
        refusals=refusals(setup, ranks),
        warnings=warnings,
    )


def _inner_groups(setup: Setup) -> tuple[str, ...]:
    """Inner groups want fast links; where TP fills the server, there is no room for them."""
    mesh, inner = setup.mesh, setup.options.inner
    if setup.options.sharding not in ("hsdp", "hfsdp"):
        return ()
    distance = mesh.group(0, SHARD_AXES)[1] if mesh.shards > 1 else 1
    span, gpus = distance * inner, setup.profile.server.gpus
    if span <= gpus:
        return ()
    return (
        f"inner groups of {inner} have members {plural(distance, 'rank')} apart and cross servers of "
        f"{plural(gpus, 'card')}, over network cards: TP {mesh.tp} x CP {mesh.cp} x PP {mesh.pp} lies "
        "inside them. Put dp before pp in parallel.order, lower parallel.tp",
    )


def _config_params(setup: Setup) -> int:
    from ftrain.load import num_parameters

    return num_parameters(setup.config)


def _real(setup: Setup, ranks: tuple[RankMemory, ...]) -> Section:
    room, worst = setup.profile.memory_bytes, max(ranks, key=lambda rank: rank.total)
    extra = replicated(setup)
    return Section(
        title="Real ranks, from the config's shape",
        figures=(
            nbytes("peak", f"most loaded rank (pipeline rank {worst.pp})", value=worst.total, digits=2,
                   why=why("state + activations + buffers", "ftrain.plan.memory", state=worst.state,
                           activations=worst.activations, buffers=worst.buffers)),
            percent("peak_share", f"of a card's memory ({setup.profile.name})", value=worst.total / room,
                    why=why("peak / memory", setup.profile.sources["gpu"], memory=room)),
            number("replicated", "parameters held more than once within TP", value=extra,
                   why=why("norms on every TP rank; kv heads where tp exceeds them", "ftrain.plan.params", tp=setup.mesh.tp)),
        ),
        tables=(_stage_table(setup, ranks),),
        notes=("not included: " + "; ".join(NOT_INCLUDED) + ": what is left of a card is not free space",),
    )  # fmt: skip


def _stage_table(setup: Setup, ranks: tuple[RankMemory, ...]) -> Table:
    rows: list[tuple[Value, ...]] = []
    for rank in ranks:
        records = (rank.weights, rank.gradients, rank.master, rank.moments, rank.alignment)
        parts = (*records, rank.activations, rank.buffers, rank.total)
        left = setup.profile.memory_bytes - rank.total
        rows.append((rank.pp, rank.layers, f"{rank.params:,}", *(size(part, digits=2) for part in parts), size(left, digits=2)))
    d, ep, experts = setup.mesh.shards, setup.mesh.ep, setup.config.model.experts > 0
    of_experts = f", of experts / (DP x CP / EP = {d // ep})" if ep > 1 else ""
    return Table(
        key="stages",
        title="Per pipeline rank",
        columns=(
            *("pp", "layers", "params", "weights", "grads", "master", "adam", "alignment"),
            *("activations", "buffers", "total", "left"),
        ),
        rows=tuple(rows),
        formulas={
            "params": "layers x matrices / tp + norms + embedding (first) + head (last)" + experts * ", experts / (tp x ep)",
            "weights": "2 B x params",
            "grads": "4 B x params",
            "master": f"4 B x params / (DP x CP = {d})" + of_experts,
            "adam": f"8 B x params / (DP x CP = {d})" + of_experts,
            "alignment": "padding of the buckets, at the bytes per parameter of the rest",
            "activations": "held micro-batches (from the schedule) x layers x bytes of a layer + end of the model on the last",
            "buffers": "2w sbh for TP, (p + 2) w sbh / r for PP, keys and values under way for CP, 2w sbkh for EP, what "
            "recompute makes again, fp32 logits where w < 4",
        },
        source=MEGATRON_MEMORY,
    )


def _activation_section(setup: Setup) -> Section:
    keep = setup.options.recompute
    saved = Table(
        key="saved",
        title=f"What a layer keeps for its backward (recompute {keep})",
        columns=("tensor", "formula", "bytes", "kept"),
        rows=tuple(
            (i.name, i.formula, size(i.nbytes, digits=1), "yes" if keep in i.kept_when else "no") for i in saved_tensors(setup)
        ),
        formulas={"bytes": "per micro-batch and rank; s: seq_len / cp"},
        source="this engine's layer, added up",
    )
    paper = Table(
        key="paper",
        title="The literature's formulas for a GELU layer of the same width",
        columns=("with", "bytes of a layer"),
        rows=tuple((name, size(value, digits=1)) for name, value in paper_layer_bytes(setup).items()),
        formulas={"bytes of a layer": "sbh (34 + 5as/h) and its divided forms"},
        source=SELECTIVE,
    )
    return Section(
        title="Activations",
        figures=(
            nbytes("layer_activations", "one layer, one micro-batch", value=layer_bytes(setup), digits=2,
                   why=why("sum of the tensors below", "ftrain.plan.activations")),
            number("held", "(stage, micro-batch) pairs held by the first rank", value=in_flight(setup)[0],
                   why=why(f"read off the {setup.options.schedule} schedule", "ftrain.parallel.schedule",
                           m=setup.microbatches, p=setup.mesh.pp, v=setup.chunks)),
        ),
        tables=(saved, paper),
    )  # fmt: skip
