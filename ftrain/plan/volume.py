"""Bytes that one rank sends in one update, group by group. Pure arithmetic; `ftrain.plan.traffic` explains it.

All collectives are counted as rings, which send the least possible: a member of an all-reduce over N sends 2 (N-1)/N of the
buffer, of a reduce-scatter or an all-gather (N-1)/N.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

from ftrain.config import Axis
from ftrain.parallel.schedule import Placement, rank_of
from ftrain.parallel.shape import SHARD_AXES
from ftrain.plan import state
from ftrain.plan.params import heaviest, largest, shard
from ftrain.plan.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What one kind of group moves."""

    name: str
    axes: tuple[Axis, ...]
    members: int
    nbytes: Fraction
    """Sent by the busiest rank in one update."""
    formula: str
    run: int = 0
    """Not the whole group talks, but each so many neighbours of it."""
    step: int = 1
    """Not the whole group talks, but every so manieth member."""
    everyone: bool = False
    """Each member sends to every other one instead of to the next."""


def ring(members: int) -> Fraction:
    """Share of the buffer that a member of a ring all-reduce sends: 2 (N-1)/N, the lower bound for any all-reduce."""
    return Fraction(2 * (members - 1), members)


def half_ring(members: int) -> Fraction:
    """The same for a reduce-scatter, or for an all-gather."""
    return Fraction(members - 1, members)


def activation_bytes(setup: Setup) -> Fraction:
    """A whole hidden activation of one micro-batch on one CP rank."""
    tokens = Fraction(setup.config.data.seq_len * setup.config.batch.micro_batch, setup.mesh.cp)
    return setup.width * tokens * setup.config.model.hidden


def volumes(setup: Setup) -> tuple[Volume, ...]:
    """Every group of more than one member, innermost axis first."""
    mesh, m, ep = setup.mesh, setup.microbatches, setup.mesh.ep
    layers = max(shard(setup, rank).layers for rank in heaviest(setup))
    found = (
        Volume(name="TP", axes=("tp",), members=mesh.tp, nbytes=4 * ring(mesh.tp) * activation_bytes(setup) * layers * m,
               formula="4 x 2(t-1)/t x w sbh/c x layers x m (2 forward, 2 backward; with SP as all-gather + reduce-scatter)"),
        Volume(name="CP", axes=("cp",), members=mesh.cp, nbytes=_context(setup) * layers * m,
               formula="3 x (c-1) x 2 x (s/c) b kv/t x w x layers x m (forward once, backward about twice)"),
        Volume(name="PP", axes=("pp",), members=mesh.pp, nbytes=_pipeline(setup) * m,
               formula="2 x w sbh/(c r) x v x m (activations on, gradients back; never weights; ends send one less)"),
        Volume(name="EP", axes=SHARD_AXES, members=ep, run=ep, everyone=True, nbytes=_dispatch(setup) * layers * m,
               formula="4 x (e-1)/e x k w sbh/c x layers x m (to the experts and back, twice; even use of them)"),
        _data(setup),
        *([_expert_data(setup)] if ep > 1 else []),
    )  # fmt: skip
    return tuple(volume for volume in found if volume.members > 1)


def _context(setup: Setup) -> Fraction:
    tokens = Fraction(setup.config.data.seq_len * setup.config.batch.micro_batch, setup.mesh.cp)
    return 3 * (setup.mesh.cp - 1) * 2 * tokens * setup.local_keys * setup.width


def _dispatch(setup: Setup) -> Fraction:
    """All-to-all of one layer and micro-batch: out and back, forward and backward, all but what stays."""
    return 4 * half_ring(setup.mesh.ep) * setup.width * setup.expert_rows * setup.config.model.hidden


def _pipeline(setup: Setup) -> Fraction:
    return activation_bytes(setup) / setup.sp * hand_offs(setup.mesh.pp, setup.chunks, setup.placement)


@cache
def hand_offs(p: int, v: int, placement: Placement) -> int:
    """Sends of the busiest pipeline rank for one micro-batch: 2 v between others; the ends have nobody before or behind."""
    owners = [rank_of(stage, num_ranks=p, placement=placement) for stage in range(p * v)]
    sends = [0] * p
    for one, two in pairwise(owners):
        if one != two:
            sends[one] += 1  # the activation on
            sends[two] += 1  # its gradient back
    return max(sends)


def _data(setup: Setup) -> Volume:
    mesh, m = setup.mesh, setup.microbatches
    own = largest(setup)
    once = half_ring(mesh.shards) * (own.total if setup.mesh.ep == 1 else own.common)
    if setup.options.sharding == "zero1":
        nbytes, formula = once * (state.GRADIENT + state.WEIGHT), "(d-1)/d x params x (4 B reduce-scatter + 2 B all-gather)"
    else:
        nbytes = once * (2 * state.WEIGHT + state.GRADIENT) * m
        formula = "(d-1)/d x params x (2 x 2 B all-gather + 4 B reduce-scatter) x m"
    return Volume(name="DP x CP", axes=SHARD_AXES, members=mesh.shards, nbytes=nbytes, formula=formula)


def _expert_data(setup: Setup) -> Volume:
    """The experts' own: those with the same experts reduce and gather them."""
    members = setup.mesh.shards // setup.mesh.ep
    nbytes = half_ring(members) * largest(setup).experts * (state.GRADIENT + state.WEIGHT)
    formula = "(n-1)/n x params of its experts x (4 B reduce-scatter + 2 B all-gather), n = d/e"
    return Volume(name="DP x CP / EP", axes=SHARD_AXES, members=members, nbytes=nbytes, formula=formula, step=setup.mesh.ep)
