"""`ftrain plan explain`: everything about one rank: where it sits, what it holds, whom it talks to, what it reads.

The same tables the engine uses (`ftrain.parallel`) answer here, so this is not a description of the run but the run's own
arithmetic, asked before it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftrain.config import Axis
from ftrain.parallel.partition import microbatches
from ftrain.parallel.shape import AXES, SHARD_AXES, Coordinate
from ftrain.plan.checkpoint import stored
from ftrain.plan.figure import Answer, Section, Table, Value, number, said, size, why
from ftrain.plan.placement import Path, path, place
from ftrain.plan.setup import DOC_A, DOC_B, Setup, layout
from ftrain.ramp import global_batch_at, position
from ftrain.units import plural

SHOWN = 8
"""Ranks of a long list that are written out."""

GROUPS: tuple[tuple[str, tuple[Axis, ...], str], ...] = (
    ("TP", ("tp",), "activations of every layer: sums forward and backward"),
    ("CP", ("cp",), "keys and values forward, their gradients back"),
    ("PP", ("pp",), "activations to the next stage, gradients to the previous one"),
    ("DP", ("dp",), "gradients of the same parameters, from other data"),
    ("DP x CP", ("cp", "dp"), "optimizer shards: reduce-scatter, update, all-gather"),
)


def find_rank(setup: Setup, *, stage: int, card: int, replica: int) -> int:
    """The rank of a place given as people say it: pipeline stage, TP index, replica."""
    wanted = {"pp": stage, "tp": card, "dp": replica}
    for axis, index in wanted.items():
        if not 0 <= index < getattr(setup.mesh, axis):
            raise ValueError(
                f"{axis} = {index}: this mesh has {getattr(setup.mesh, axis)} ({layout(setup.mesh)}), counted from 0"
            )
    return setup.mesh.rank(Coordinate(**wanted))


def answer(setup: Setup, rank: int, *, step: int = 0) -> Answer:
    """The whole answer about one rank."""
    if not 0 <= rank < setup.mesh.world:
        raise ValueError(f"rank {rank}: this mesh has ranks 0 to {setup.mesh.world - 1} ({layout(setup.mesh)})")
    return Answer(
        command="explain",
        title=f"Rank {rank} of {layout(setup.mesh)}",
        sections=(_where(setup, rank), _groups(setup, rank), _holds(setup, rank), _reads(setup, rank, step)),
    )


def _where(setup: Setup, rank: int) -> Section:
    here, seat = setup.mesh.coordinate(rank), place(rank, setup.profile)
    order = ", ".join(setup.mesh.order)
    return Section(
        title="Where",
        figures=(
            number("rank", "rank", value=rank, why=why("given", "command line")),
            said("coordinate", "place in the mesh", text=", ".join(f"{axis} {here.on(axis)}" for axis in AXES),
                 why=why(f"mixed radix, innermost first: {order}", "ftrain.parallel.shape")),
            said("seat", "seat", text=", ".join(f"{name} {index}" for name, index in seat.items()),
                 why=why("rank // GPUs of the unit, ranks filling servers in order", DOC_B)),
            said("replica_span", "its replica", text=_span(setup, rank),
                 why=why("units that the ranks with the same dp index touch; contiguous in this rank order", DOC_B)),
        ),
    )  # fmt: skip


def _span(setup: Setup, rank: int) -> str:
    """`128 cards = 16 servers = 8 racks; x 128 replicas = 16,384`."""
    mesh = setup.mesh
    members = mesh.group(rank, tuple(axis for axis in AXES if axis != "dp"))
    places = [place(member, setup.profile) for member in members]
    units = [name for name in places[0] if name != "card"]
    touched = [(name, len({seat[name] for seat in places})) for name in units]
    parts = [plural(len(members), "card"), *(plural(count, name) for name, count in touched)]
    return f"{' = '.join(parts)}; x {plural(mesh.dp, 'replica')} = {mesh.world:,}"


def _groups(setup: Setup, rank: int) -> Section:
    mesh, links = setup.mesh, setup.links
    rows: list[tuple[Value, ...]] = []
    for name, axes, what in GROUPS:
        members = mesh.group(rank, axes)
        if len(members) > 1 and not (name == "DP x CP" and mesh.cp == 1):
            rows.append(_group(name, members, rank, path(mesh, axes, links), what))
    rows += _expert_groups(setup, rank)
    before, after = _neighbours(setup, rank)
    return Section(
        title="Whom it talks to",
        figures=(
            number("tp_peers", "TP peers", value=mesh.tp - 1, why=why("tp - 1", DOC_A)),
            number("dp_peers", "DP peers", value=mesh.dp - 1, why=why("dp - 1", DOC_A)),
            said("previous_stage", "previous stage", text=before, why=why("same place, pp - 1", DOC_A)),
            said("next_stage", "next stage", text=after, why=why("same place, pp + 1", DOC_A)),
        ),
        tables=(Table(key="peers", title="Groups", columns=("group", "others", "ranks", "slowest link", "what moves"),
                      rows=tuple(rows), source="ftrain.parallel.shape"),),
    )  # fmt: skip


def _group(name: str, members: Sequence[int], rank: int, way: Path, what: str) -> tuple[Value, ...]:
    others = [member for member in members if member != rank]
    shown = " ".join(str(other) for other in others[:SHOWN]) + (" ..." if len(others) > SHOWN else "")
    return (name, len(others), shown, f"{way.link}, {way.gb_s:.4g} GB/s", what)


def _expert_groups(setup: Setup, rank: int) -> Iterator[tuple[Value, ...]]:
    """With whom it shares out the experts, and who has the same ones: parts of DP x CP."""
    mesh, links = setup.mesh, setup.links
    parts = (
        ("EP", mesh.expert_group(rank), {"run": mesh.ep}, "tokens to their experts and back, forward and backward"),
        ("DP x CP / EP", mesh.expert_replicas(rank), {"step": mesh.ep}, "optimizer shards of its experts"),
    )
    for name, members, part, what in parts if mesh.ep > 1 else ():
        if len(members) > 1:
            yield _group(name, members, rank, path(mesh, SHARD_AXES, links, **part), what)


def _neighbours(setup: Setup, rank: int) -> tuple[str, str]:
    ring = setup.mesh.group(rank, ("pp",))
    index = ring.index(rank)
    before = f"rank {ring[index - 1]}" if index else "none: this is the first"
    after = f"rank {ring[index + 1]}" if index + 1 < len(ring) else "none: this is the last"
    return before, after


def _holds(setup: Setup, rank: int) -> Section:
    from ftrain.parallel.buckets import plan_buckets, state_boxes
    from ftrain.parallel.layout import local_box, parameters

    config, mesh = setup.config, setup.mesh
    here = mesh.coordinate(rank)
    specs = parameters(
        config.model,
        mesh,
        layer_counts=tuple(len(stage) for stage in setup.stages),
        placement=setup.placement,
        sequence_parallel=config.parallel.sp,
    )
    boxes = [box for spec in specs if (box := local_box(spec, mesh, here)) is not None]
    held = sum(box.size for box in boxes)
    owned = state_boxes(plan_buckets(specs, mesh, here, bucket_bytes=config.parallel.bucket_mib * 2**20), mesh, here)
    written = sum(box.size for _, box in owned)
    layers = [
        f"{stage.start} to {stage.stop - 1}" for index, stage in enumerate(setup.stages) if index in setup.stages_of(here.pp)
    ]
    rows = tuple(
        (name, str(list(box.offset)), str(list(box.shape)), size(stored(setup) * box.size, digits=2))
        for name, box in owned[:SHOWN]
    )
    return Section(
        title="What it holds",
        figures=(
            said("layers", "layers", text=", ".join(layers),
                 why=why("layers dealt to stages, ends last", "ftrain.parallel.partition")),
            number("parameters", "parameters, as bf16 weights and fp32 gradients", value=held,
                   why=why("its boxes of the placement table", "ftrain.parallel.layout")),
            number("owned", "parameters whose master and moments it keeps, updates and writes", value=written,
                   why=why("its ZeRO-1 shard: bucket regions over DP x CP", "ftrain.parallel.buckets", shards=mesh.shards)),
            number("boxes", "boxes it writes to a checkpoint", value=len(owned),
                   why=why("a shard is a list of boxes", "architecture 1.2")),
        ),
        tables=(Table(key="boxes", title=f"The first {len(rows)} of its boxes", columns=("array", "offset", "shape", "bytes"),
                      rows=rows, source="ftrain.parallel.buckets"),),
    )  # fmt: skip


def _reads(setup: Setup, rank: int, step: int) -> Section:
    first, replica = position(setup.config, step), setup.mesh.coordinate(rank).dp
    size = global_batch_at(setup.config, first)
    runs = microbatches(size, setup.config.batch.micro_batch, setup.mesh.dp, replica)
    start, stop = first + runs[0].start, first + runs[-1].stop
    return Section(
        title="What it reads",
        figures=(
            number("reads_microbatches", f"micro-batches in step {step}", value=len(runs),
                   why=why("the global list, dealt to replicas in runs", "ftrain.parallel.partition")),
            said("reads_sequences", "sequences of the training stream", text=f"{start:,} to {stop - 1:,}",
                 why=why("step x global_batch + its run", "ftrain.data.sampler", step=step, global_batch=size)),
        ),
        notes=("its TP and PP peers work on the same sequences; its DP peers on others",),
    )  # fmt: skip
