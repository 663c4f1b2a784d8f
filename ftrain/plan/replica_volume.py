"""What replicas exchange: gradients to be summed, weights to be given to everybody, by each way of sharing them.

zero1    a reduce-scatter of fp32 gradients and an all-gather of bf16 weights, once an update; experts among those that have
         the same ones
fsdp     each micro-batch gathers the layers' weights twice and scatters their gradients; embedding, last norm and head stay
         gathered through an update (`ftrain.parallel.fsdp`)
hsdp     the same inside an inner group, whose parts of the gradients are then summed over the outer one
hfsdp    as hsdp, and once an update the outer group exchanges its parts of the new weights
"""

from __future__ import annotations

from collections.abc import Iterator

from ftrain.parallel.shape import SHARD_AXES
from ftrain.plan.params import Shard, alignment, heaviest, shard
from ftrain.plan.ring import Line, Volume, lines
from ftrain.plan.setup import Quantity, Setup
from ftrain.plan.state import GRADIENT, WEIGHT

ZERO1 = "(d-1)/d x params x (4 B reduce-scatter + 2 B all-gather)"


def between_replicas(setup: Setup, *, aligned: bool) -> Iterator[Volume]:
    """All of it; groups of one member among them."""
    if setup.options.sharding == "zero1":
        yield _zero1(setup, aligned=aligned)
        if setup.mesh.ep > 1:
            yield _expert_replicas(setup, aligned=aligned)
    else:
        yield from _fully_sharded(setup)


def region(setup: Setup, params: int) -> Quantity:
    """A rank's part of so many parameters that all replicas hold."""
    return setup.ratio(params, setup.mesh.shards)


def _padding(setup: Setup, rank: int, *, of_experts: bool) -> int:
    return sum(count for sharers, count in alignment(setup, rank).items() if (sharers > 1) == of_experts)


def _zero1(setup: Setup, *, aligned: bool) -> Volume:
    d, split = setup.mesh.shards, setup.mesh.ep > 1
    held = {rank: own.common if split else own.total for rank, own in _shards(setup)}
    rank = max(held, key=lambda pp: held[pp])
    each = setup.half_ring(d) * (GRADIENT + WEIGHT)
    padding = _padding(setup, rank, of_experts=False) if aligned and d > 1 else 0
    return Volume(
        name="DP x CP",
        axes=SHARD_AXES,
        members=d,
        lines=lines(
            Line("gradients, then new weights", ZERO1, each * held[rank]),
            Line("padding of the buffers", "(d-1)/d x padding x 6 B", each * padding),
        ),
    )


def _expert_replicas(setup: Setup, *, aligned: bool) -> Volume:
    """The experts' own: those with the same experts reduce and gather them."""
    members = setup.mesh.shards // setup.mesh.ep
    held = {rank: own.experts for rank, own in _shards(setup)}
    rank = max(held, key=lambda pp: held[pp])
    each = setup.half_ring(members) * (GRADIENT + WEIGHT)
    padding = _padding(setup, rank, of_experts=True) if aligned and members > 1 else 0
    formula = "(n-1)/n x params of its experts x (4 B reduce-scatter + 2 B all-gather), n = d/e"
    return Volume(
        name="DP x CP / EP",
        axes=SHARD_AXES,
        members=members,
        step=setup.mesh.ep,
        lines=lines(
            Line("gradients, then new weights, of experts", formula, each * held[rank]),
            Line("padding of the buffers", "(n-1)/n x padding x 6 B", each * padding),
        ),
    )


def _fully_sharded(setup: Setup) -> Iterator[Volume]:
    d, m, sharding = setup.mesh.shards, setup.microbatches, setup.options.sharding
    inner = d if sharding == "fsdp" else setup.options.inner
    own = max((own for _, own in _shards(setup)), key=lambda own: own.total)
    whole = inner == d
    yield Volume(
        name="DP x CP" if whole else "DP x CP, inner group",
        axes=SHARD_AXES,
        members=inner,
        run=0 if whole else inner,
        lines=lines(
            Line("weights gathered twice, gradients scattered",
                 f"({'d-1)/d' if whole else 'i-1)/i'} x params x (2 x 2 B all-gather + 4 B reduce-scatter) x m",
                 setup.half_ring(inner) * own.total * (2 * WEIGHT + GRADIENT) * m),
            Line("ends of the model stay gathered: once an update", "-(i-1)/i x params of the ends x 2 B x (2m - 1)",
                 -setup.half_ring(inner) * own.ends * WEIGHT * (2 * m - 1)),
        ),
    )  # fmt: skip
    if not whole:
        outer = d // inner
        told = setup.half_ring(outer) * setup.ratio(own.total, inner) * WEIGHT if sharding == "hfsdp" else 0
        yield Volume(
            name="DP x CP, outer group",
            axes=SHARD_AXES,
            members=outer,
            step=inner,
            lines=lines(
                Line("gradients of its part, summed", "2(o-1)/o x params / i x 4 B x m",
                     setup.ring(outer) * setup.ratio(own.total, inner) * GRADIENT * m),
                Line("new weights of its part", "(o-1)/o x params / i x 2 B", told),
            ),
        )  # fmt: skip


def _shards(setup: Setup) -> Iterator[tuple[int, Shard]]:
    return ((rank, shard(setup, rank)) for rank in heaviest(setup))
