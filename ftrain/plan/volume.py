"""Bytes that one rank sends in one update, group by group. Pure arithmetic; `ftrain.plan.traffic` explains it.

Each group's first line is the founding rows' ideal, the others are what this engine sends beyond it (`ftrain.plan.ring`).
Counted on running engines by `tests/plan/test_volumes_counted.py`. Left out as too small to matter: the vote on an update and
the count of its tokens, a few numbers each.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from ftrain.parallel.schedule import Placement, rank_of
from ftrain.parallel.shape import SHARD_AXES
from ftrain.plan.params import heaviest, shard
from ftrain.plan.replica_volume import between_replicas, region
from ftrain.plan.ring import Line, Volume, lines
from ftrain.plan.setup import Quantity, Setup
from ftrain.plan.state import GRADIENT, WEIGHT
from ftrain.plan.tensor_volume import tensor


def volumes(setup: Setup, *, aligned: bool = False) -> tuple[Volume, ...]:
    """Every group of more than one member, innermost axis first. `aligned`: with the padding of the optimizer's buffers, for
    which they are planned as the engine does."""
    mesh = setup.mesh
    found = (
        *([tensor(setup)] if mesh.tp > 1 else []),
        *([_context(setup)] if mesh.cp > 1 else []),
        *([_pipeline(setup)] if mesh.pp > 1 else []),
        *([_experts(setup)] if mesh.ep > 1 else []),
        *between_replicas(setup, aligned=aligned),
    )
    return tuple(volume for volume in found if volume.members > 1)


def activation_bytes(setup: Setup) -> Quantity:
    """A whole hidden activation of one micro-batch on one CP rank."""
    return setup.width * setup.tokens * setup.config.model.hidden


def _passes(setup: Setup) -> int:
    """Layers times micro-batches of the rank that has most layers."""
    return max(shard(setup, rank).layers for rank in heaviest(setup)) * setup.microbatches


def _context(setup: Setup) -> Volume:
    mesh, config, w, wide = setup.mesh, setup.config, setup.width, setup.exact
    block = 2 * setup.tokens * setup.local_keys * _passes(setup)  # keys and values of a rank
    others = (mesh.cp - 1) * block
    home = block if config.parallel.cp_exchange == "ring" else 0
    choices = (mesh.cp - 1) * setup.tokens * config.model.experts_per_token * _passes(setup) if config.model.experts else 0
    again = setup.options.recompute
    return Volume(
        name="CP",
        axes=("cp",),
        members=mesh.cp,
        lines=lines(
            Line("keys, values and their gradients",
                 "3 x (c-1) x 2 x (s/c) b kv/t x w x layers x m (forward once, backward about twice)", 3 * others * w),
            Line("gradients are in fp32", "(c-1) x 2 x (s/c) b kv/t x (4 - w) x layers x m", others * (wide - w)),
            Line("gradients' last hop of the ring, home", "2 x (s/c) b kv/t x 4 x layers x m", home * wide),
            Line(f"keys and values once more (recompute {again})", "(c-1) x 2 x (s/c) b kv/t x w x layers x m",
                 others * w if again != "none" else 0),
            Line("which experts were chosen", "(c-1) x (s/c) b k x 8 B x layers x m" + " x 2" * (again == "full"),
                 8 * choices * (2 if again == "full" else 1)),
        ),
    )  # fmt: skip


def _experts(setup: Setup) -> Volume:
    """All-to-all out and back, forward and backward, all but what stays."""
    mesh, model, passes = setup.mesh, setup.config.model, _passes(setup)
    rows = setup.half_ring(mesh.ep) * setup.width * setup.expert_rows * model.hidden * passes
    again = setup.options.recompute == "full"
    return Volume(
        name="EP",
        axes=SHARD_AXES,
        members=mesh.ep,
        run=mesh.ep,
        everyone=True,
        lines=lines(
            Line("tokens to their experts and back",
                 "4 x (e-1)/e x k w sbh/c x layers x m (to the experts and back, twice; even use of them)", 4 * rows),
            Line("forward once more (recompute full)", "2 x (e-1)/e x k w sbh/c x layers x m", 2 * rows if again else 0),
            Line("how many rows each expert gets", "(e-1)/e x E x 8 B x layers x m" + " x 2" * again,
                 setup.half_ring(mesh.ep) * model.experts * 8 * passes * (2 if again else 1)),
        ),
    )  # fmt: skip


def _pipeline(setup: Setup) -> Volume:
    """Of the rank that sends most: one in the middle, or an end of a tied embedding."""
    hop = activation_bytes(setup) / setup.sp * setup.microbatches
    sends = hand_offs(setup.mesh.pp, setup.chunks, setup.placement)
    twins = _twins(setup)
    busiest = max(range(setup.mesh.pp), key=lambda rank: sends[rank] * hop + twins.get(rank, 0))
    return Volume(
        name="PP",
        axes=("pp",),
        members=setup.mesh.pp,
        lines=lines(
            Line("activations on, gradients back",
                 "2 x w sbh/(c r) x v x m (activations on, gradients back; never weights; ends send one less)",
                 hop * sends[busiest]),
            Line("tied embedding, between its two ends", "hV/(t d) x 4 B from the last stage, x 2 B from the first",
                 twins.get(busiest, 0)),
        ),
    )  # fmt: skip


def _twins(setup: Setup) -> dict[int, Quantity]:
    """Pipeline rank -> what it sends of its region of a tied embedding: the last stage gradients, the first new weights."""
    first, last = shard(setup, 0), setup.mesh.pp - 1
    if not setup.config.model.tied or setup.placement == "vee":
        return {}
    return {0: region(setup, first.embedding) * WEIGHT, last: region(setup, first.embedding) * GRADIENT}


@cache
def hand_offs(p: int, v: int, placement: Placement) -> tuple[int, ...]:
    """Sends of each pipeline rank for one micro-batch: 2 v in the middle; the ends have nobody before or behind."""
    owners = [rank_of(stage, num_ranks=p, placement=placement) for stage in range(p * v)]
    sends = [0] * p
    for one, two in pairwise(owners):
        if one != two:
            sends[one] += 1  # the activation on
            sends[two] += 1  # its gradient back
    return tuple(sends)
