"""The layout for what is left: of all legal ways to cut the model over at most so many ranks, the one of most tokens/s.

Asked in the middle of an interruption by a supervisor that must not wait, so the candidates are few: every tensor parallel size
that a server allows, every number of stages, and as many replicas as the rest makes; far from the present layout only where the
world is small. Batch, micro-batch, context parallelism and precision stay as they are; recompute may only grow, because fewer
ranks hold more state each.

Where the hardware's peak is unknown (CPUs), nobody can say what an exchange costs against a product of matrices: there the
order follows from how much the busiest rank computes and how long it waits in the pipeline; of equals the nearest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import structs

from ftrain.combinations import combinations
from ftrain.config import Config
from ftrain.plan import memory
from ftrain.plan import time as clock
from ftrain.plan.profile import Profile
from ftrain.plan.setup import Recompute, Setup, options_of
from ftrain.plan.traffic import refusals as crossing

NOMINAL_TFLOPS = 1.0  # where the peak is unknown: it scales all layouts alike, and no time is told
MOST = 24
"""Candidates whose time is predicted in a large world; each takes some 50 ms for a large model."""

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layout, and what it is predicted to do against the present one."""

    config: Config
    tokens_per_s: float
    """Over that of the present layout."""
    tried: int


def best(config: Config, most_ranks: int, profile: Profile, *, least_ranks: int = 1, known: bool = True) -> Choice | None:
    """The best layout on at most `most_ranks` ranks; None if none is legal and fits. `config`: as it runs now; not `known`: the
    profile is only a guess, so its memory refuses nothing.
    """
    now = rate(config, profile)
    tried = [(speed, other) for other in _near(config, most_ranks, least_ranks) if (speed := rate(other, profile))]
    tried.sort(key=lambda found: (-round(found[0], 3 - _magnitude(found[0])), _distance(config, found[1])))
    for speed, other in tried:
        fitting = _fit(other, profile) if known else other
        if fitting is not None:
            return Choice(config=fitting, tokens_per_s=speed / now if now else math.nan, tried=len(tried))
    return None


def _magnitude(value: float) -> int:
    return math.floor(math.log10(value)) + 1 if value > 0 else 0


def _near(config: Config, most: int, least: int) -> list[Config]:
    """Legal layouts, the nearest to the present one first, and not more than can be asked about in a second."""
    found = sorted(_legal(config, most, least), key=lambda other: _distance(config, other))
    return found if most <= 64 else found[:MOST]


def _legal(config: Config, most: int, least: int) -> Iterator[Config]:
    layers, cp = config.model.layers, config.parallel.cp
    micro = config.batch.global_batch // config.batch.micro_batch
    for tp in range(1, min(most, config.model.heads) + 1):
        if config.model.heads % tp or config.model.ffn % tp:
            continue
        for pp in range(1, min(layers, most // (tp * cp)) + 1):
            dp = min(most // (tp * cp * pp), micro)
            other = _cut(config, tp=tp, pp=pp, ranks=tp * cp * pp * dp)
            if other.parallel.ranks >= least and not _illegal(other):
                yield other


def _illegal(config: Config) -> bool:
    """Faults that are injected into a rank that is not there are none."""
    return any(not problem.path.startswith("faults.") for problem in combinations(config))


def _cut(config: Config, *, tp: int, pp: int, ranks: int) -> Config:
    """The same training under another cut. What only fits the present number of stages is left to its default; FSDP and experts
    that are shared out, whose replicas must have equal shares, make way where they cannot: the same function, the same arrays.
    """
    parallel = config.parallel
    same = pp == parallel.pp
    other = structs.replace(
        parallel,
        tp=tp,
        pp=pp,
        ranks=ranks,
        schedule=parallel.schedule if pp > 1 else "1f1b",
        virtual_stages=parallel.virtual_stages if pp > 1 else 1,
        layer_counts=parallel.layer_counts if same else (),
        ep=_ep(config, ranks // (tp * pp)),
        tp_overlap=parallel.tp_overlap and tp > 1,
    )
    changed = structs.replace(config, parallel=other)
    if _illegal(changed) and other.schedule != "1f1b":
        plain = structs.replace(other, schedule="1f1b", virtual_stages=1, layer_counts=())
        changed = structs.replace(config, parallel=plain)
    if changed.parallel.sharding != "zero1" and _illegal(changed):
        return _cut(_with_zero1(config), tp=tp, pp=pp, ranks=ranks)
    if changed.parallel.ep > 1 and _illegal(changed):
        return structs.replace(changed, parallel=structs.replace(changed.parallel, ep=1))
    return changed


def _ep(config: Config, replicas: int) -> int:
    """The largest number of ranks, at most as many as now, that share out the experts evenly."""
    return max(n for n in range(1, config.parallel.ep + 1) if config.model.experts % n == 0 and replicas % n == 0)


def _with_zero1(config: Config) -> Config:
    return structs.replace(config, parallel=structs.replace(config.parallel, sharding="zero1", fsdp_inner=1))


def _distance(config: Config, other: Config) -> tuple[float, int]:
    """How far a layout is from the present one: first in the sizes of its axes, then in ranks that would stand idle."""
    a, b = config.parallel, other.parallel
    sizes = abs(math.log2(a.tp / b.tp)) + abs(math.log2(a.pp / b.pp)) + (a.schedule != b.schedule)
    return sizes, -b.ranks


def rate(config: Config, profile: Profile) -> float:
    """Tokens per second, or in units of nobody's where the peak is unknown; 0 for a tensor parallel group across servers."""
    known = profile.peak_flops > 0
    nominal = structs.replace(profile, gpu=structs.replace(profile.gpu, dense_bf16_tflops=NOMINAL_TFLOPS))
    setup = _setup(config, profile if known else nominal)
    if known and crossing(setup):
        return 0.0
    step = clock.step(setup, exact=False)
    seconds = step.total if known else (step.compute + step.recompute) * (1 + step.bubble / (step.total - step.bubble))
    return setup.tokens_per_update / seconds


def _setup(config: Config, profile: Profile) -> Setup:
    return Setup(config=config, profile=profile, options=options_of(config))


def _fit(config: Config, profile: Profile) -> Config | None:
    """The layout with the least recompute, from the present policy on, under which it fits; None if it never does."""
    for policy in RECOMPUTES[RECOMPUTES.index(config.parallel.recompute) :]:
        tried = structs.replace(config, parallel=structs.replace(config.parallel, recompute=policy))
        setup = _setup(tried, profile)
        if max(rank.total for rank in memory.heaviest_ranks(setup)) <= profile.memory_bytes:
            return tried
    return None
