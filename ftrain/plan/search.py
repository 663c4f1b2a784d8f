"""`ftrain plan search`: all legal layouts of a model on so many GPUs; those that fit, ranked, each with its reason.

The order of the decisions is the founding documents': legality, then fit, then throughput. A layout that does not fit is
dropped before its speed is asked, with the reason kept. The checks of legality are those of the config loader, so the search
offers nothing that a run would refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from msgspec import structs

from ftrain.combinations import combinations
from ftrain.config import Config
from ftrain.plan import memory
from ftrain.plan import time as clock
from ftrain.plan.figure import Answer, Section, Table, Value, number, said, seconds, size, why
from ftrain.plan.schedule import bubble_of_compute, of_total
from ftrain.plan.setup import Recompute, Setup, layout, wrong_inner
from ftrain.plan.traffic import refusals as crossing
from ftrain.plan.volume import volumes
from ftrain.units import plural

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, with what it is predicted to do."""

    setup: Setup
    step: clock.Step
    peak: float

    @property
    def tokens_per_s(self) -> float:
        """What candidates are ranked by."""
        return self.setup.tokens_per_update / self.step.total


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search."""

    fitting: tuple[Candidate, ...]
    """Fastest first."""
    tried: int
    dropped: Counter[str]


def search(setup: Setup) -> Found:
    """Every legal layout of the setup's ranks: tp within a server, any pp, the config's cp, micro-batches of 1, 2, 4 or the
    config's; with experts also any ep. The config's own layout is among them, whatever it is."""
    dropped: Counter[str] = Counter()
    fitting: list[Candidate] = []
    tried = 0
    for option in _layouts(replace(setup, quick=True)):
        tried += 1
        reason = _illegal(option)
        candidate = None if reason else _fit(option)
        if candidate is None:
            dropped[reason or "does not fit in memory, even with full recompute"] += 1
        else:
            fitting.append(candidate)
    fitting.sort(key=lambda found: -float(f"{found.tokens_per_s:.9e}"))  # of equal ones the first that was tried
    return Found(tuple(fitting), tried, dropped)


def _layouts(setup: Setup) -> Iterator[Setup]:
    """Candidates, legal or not, in a fixed order; the config's own comes last, unless it was among the others."""
    own, met = _identity(setup), False
    for option in _enumerated(setup):
        met = met or _identity(option) == own
        yield option
    if not met:
        yield setup


def _identity(setup: Setup) -> tuple[object, ...]:
    """What tells one candidate from another; without a pipeline there is no schedule."""
    parallel, options = setup.config.parallel, setup.options
    pipeline = (options.schedule, setup.chunks, parallel.layer_counts) if setup.mesh.pp > 1 else ()
    return (setup.mesh, setup.config.batch.micro_batch, *pipeline)


def _enumerated(setup: Setup) -> Iterator[Setup]:
    """The candidates that do not ask what the config's own layout is, except for its cp and its micro-batch."""
    world, gpus, cp = setup.config.parallel.ranks, setup.profile.server.gpus, setup.config.parallel.cp
    micros = sorted({1, 2, 4, setup.config.batch.micro_batch})
    for tp in _divisors(gpus):
        for pp in [n for n in _divisors(world // (tp * cp)) if world % (tp * cp) == 0 and n <= setup.config.model.layers]:
            for micro, ep in product(micros, _expert_cuts(setup.config, world // (tp * pp))):
                config = _with(setup.config, tp=tp, pp=pp, micro=micro, ep=ep)
                cut = replace(setup, config=config)
                for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)) if pp > 1 else (("1f1b", 1),):
                    yield cut.with_schedule(schedule, chunks)


def _expert_cuts(config: Config, replicas: int) -> list[int]:
    """Sizes of ep that share out the experts evenly among so many ranks of DP x CP; only 1 for a dense model."""
    return [ep for ep in _divisors(config.model.experts) if replicas % ep == 0] or [1]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0] if n < 1024 else [d for d in range(1, 513) if n % d == 0]


def _with(config: Config, *, tp: int, pp: int, micro: int, ep: int = 1) -> Config:
    parallel = structs.replace(config.parallel, tp=tp, pp=pp, ep=ep, schedule="1f1b", virtual_stages=1, layer_counts=())
    return structs.replace(config, parallel=parallel, batch=structs.replace(config.batch, micro_batch=micro))


def _illegal(setup: Setup) -> str:
    """The first rule the layout breaks, by the field it concerns; empty if it is legal."""
    # a phase has only its own updates, shorter than the learning-rate schedule of the run: nothing that a layout could help
    problems = [problem for problem in combinations(setup.config) if not problem.path.startswith("schedule.")]
    if problems:
        return f"{problems[0].path}: {problems[0].allowed}"
    if wrong_inner(setup):
        return "inner: a divisor of DP x CP"
    if setup.options.schedule == "interleaved" and setup.microbatches % setup.mesh.pp:
        return "interleaved: micro-batches in multiples of the stages"
    if setup.mesh.pp * setup.chunks > setup.config.model.layers:
        return "interleaved: at least one layer for each virtual stage"
    return "tp: groups within a server" if crossing(setup) else ""


def _fit(setup: Setup) -> Candidate | None:
    """The layout with the least recompute that fits, or None."""
    for policy in RECOMPUTES:
        setup = setup.with_recompute(policy)
        ranks = memory.heaviest_ranks(setup)
        peak = max(rank.total for rank in ranks)
        if peak <= setup.profile.memory_bytes:
            return Candidate(setup, clock.step(setup, exact=False), float(peak))
        if max(rank.state for rank in ranks) > setup.profile.memory_bytes:
            return None
    return None


def sentence(candidate: Candidate) -> str:
    """Why it is where it is in the ranking."""
    part = candidate.step
    costs = {
        "waiting in the pipeline": part.bubble,
        "tensor parallel exchange": part.tp,
        "context parallel exchange": part.cp,
        "sending tokens to experts": part.ep,
        "hand-offs between stages": part.pp,
        "gradient and weight exchange": part.dp,
        "recompute": part.recompute,
    }
    name = max(costs, key=lambda cost: costs[cost])
    share = 100 * part.compute / part.total
    if not costs[name]:
        return "nothing is exchanged: all of the step is compute and update"
    return f"{share:.0f} % of the step is compute; most of the rest is {name} ({100 * costs[name] / part.total:.0f} %)"


def answer(setup: Setup, *, top: int = 10) -> Answer:
    """The whole answer."""
    found, experts = search(setup), setup.config.model.experts > 0
    rows = tuple(_row(candidate) for candidate in found.fitting[:top])
    table = Table(
        key="layouts",
        title="Fastest first",
        columns=(
            *("tp", "cp", "pp", "dp"),
            *(("ep",) if experts else ()),
            *("micro", "schedule", "recompute", "peak", "step", "tokens/s", "why"),
        ),
        rows=rows,
        formulas={"step": "ftrain plan time", "peak": "ftrain plan memory", "tokens/s": "tokens per update / step"},
        source="ftrain.plan.search",
    )
    drops = Table(
        key="dropped",
        title="Dropped, by the first reason",
        columns=("layouts", "reason"),
        rows=tuple((count, reason) for reason, count in found.dropped.most_common()),
        source="ftrain.combinations, ftrain.plan.memory",
    )
    ranks = plural(setup.config.parallel.ranks, "rank")
    refused = () if found.fitting else (f"no layout of {ranks} on {setup.profile.name} fits this model",)
    return Answer(
        command="search",
        title=f"Layouts of {ranks} on {setup.profile.title}",
        sections=(
            _counts(found, experts=experts),
            Section(title="Ranking", tables=(table, drops), notes=_asked(setup, found)),
        ),
        refusals=refused,
    )


def _counts(found: Found, *, experts: bool) -> Section:
    legal = found.tried - sum(n for reason, n in found.dropped.items() if not reason.startswith("does not fit"))
    return Section(
        title="Legality, then fit, then throughput",
        figures=(
            number("tried", f"combinations of tp, pp, {'ep, ' * experts}micro-batch and schedule", value=found.tried,
                   why=why("enumerated", "ftrain.plan.search")),
            number("legal", "legal", value=legal,
                   why=why("the loader's checks, and TP within a server", "ftrain.combinations")),
            number("fitting", "fit", value=len(found.fitting),
                   why=why("peak of the worst rank <= memory", "ftrain.plan.memory")),
            said("best", "fastest", text=layout(found.fitting[0].setup.mesh) if found.fitting else "none",
                 why=why("most predicted tokens/s", "ftrain.plan.time")),
        ),
    )  # fmt: skip


def _row(candidate: Candidate) -> tuple[Value, ...]:
    setup, mesh = candidate.setup, candidate.setup.mesh
    options, micro = setup.options, setup.config.batch.micro_batch
    name = options.schedule if mesh.pp > 1 else "-"
    experts = (setup.mesh.ep,) if setup.config.model.experts else ()
    what = (mesh.tp, mesh.cp, mesh.pp, mesh.dp, *experts, micro, name, options.recompute)
    speed = (size(candidate.peak, digits=1), seconds(candidate.step.total), f"{candidate.tokens_per_s:,.0f}")
    return (*what, *speed, sentence(candidate))


def _asked(setup: Setup, found: Found) -> tuple[str, ...]:
    """Where the config's own layout stands, and what would be better; recompute is what it needs to fit, as of all others."""
    own, options = f"the config's own layout, {layout(setup.mesh)}", setup.options
    for place, candidate in enumerate(found.fitting):
        tried = candidate.setup
        if _identity(tried) == _identity(setup):
            behind = found.fitting[0].tokens_per_s / candidate.tokens_per_s - 1
            other = f" with recompute {tried.options.recompute}" * (tried.options.recompute != options.recompute)
            return (f"{own}, is number {place + 1} of {len(found.fitting)}{other}: "
                    f"{100 * behind:.0f} % behind the fastest; {sentence(candidate)}",)  # fmt: skip
    reason = _illegal(setup)
    if reason:
        return (f"{own}, was not tried any further, since it is not legal: {reason}",)
    worst = max(memory.heaviest_ranks(setup.with_recompute("full")), key=lambda rank: rank.total)
    need = f"pipeline rank {worst.pp} needs {size(worst.total, digits=1)} of {size(setup.profile.memory_bytes)}"
    micro = plural(setup.config.batch.micro_batch, "sequence")
    return (f"{own}, does not fit: with micro-batches of {micro} {need} even with recompute full",)


def sweep(setup: Setup) -> Answer:
    """More stages: a smaller shard, more hand-offs and more waiting."""
    rows: list[tuple[Value, ...]] = []
    world = setup.config.parallel.ranks // (setup.mesh.tp * setup.mesh.cp)
    for pp in [n for n in _divisors(world) if n <= setup.config.model.layers]:
        micro, ep = setup.config.batch.micro_batch, setup.mesh.ep
        tried = replace(setup, config=_with(setup.config, tp=setup.mesh.tp, pp=pp, micro=micro, ep=ep))
        reason = _illegal(tried)
        if not reason:
            rows.append(_sweep_row(tried))
    table = Table(
        key="stages_sweep",
        title=f"TP {setup.mesh.tp}, CP {setup.mesh.cp}, {setup.options.schedule}, recompute {setup.options.recompute}",
        columns=("pp", "dp", "micro-batches", "state", "peak", "fits", "waiting", "hand-offs sent", "step"),
        rows=tuple(rows),
        formulas={"waiting": "idle of total, closed formula", "hand-offs sent": "2 x w sbh/(c r) x v x m of the busiest rank"},
        source="ftrain.plan.search",
    )
    note = "state and peak without the padding of buffers, a few per cent: `ftrain plan memory` has it"
    section = Section(title="More stages: a smaller shard, more hand-off and more waiting", tables=(table,), notes=(note,))
    return Answer(command="search", title=f"Stages for {plural(setup.config.parallel.ranks, 'rank')}", sections=(section,))


def _sweep_row(setup: Setup) -> tuple[Value, ...]:
    mesh, options = setup.mesh, setup.options
    worst = max(memory.heaviest_ranks(setup), key=lambda rank: rank.total)
    idle = of_total(bubble_of_compute(options.schedule, p=mesh.pp, m=setup.microbatches, v=setup.chunks))
    sent = next((volume.nbytes for volume in volumes(setup) if volume.name == "PP"), 0)
    step = seconds(clock.step(setup, exact=False).total) if setup.profile.peak_flops else "-"
    fits = "yes" if worst.total <= setup.profile.memory_bytes else "no"
    state, peak = size(worst.state, digits=2), size(worst.total, digits=2)
    return (mesh.pp, mesh.dp, setup.microbatches, state, peak, fits, f"{100 * float(idle):.1f} %", size(sent, digits=2), step)
