"""`ftrain plan schedule`: how long the stages of a pipeline wait, for the schedule object that the engine will execute.

"The bubble" has two definitions, and papers mix them: idle time of the *total* (48 %) and idle time relative to *compute*
(93.75 %) are one and the same schedule with p = 16 and m = 16. Both are always printed, under their names.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

from ftrain.parallel.schedule import IllegalScheduleError, Kind, build, peak_in_flight
from ftrain.parallel.timeline import Timeline, even, simulate
from ftrain.plan import chart, cost
from ftrain.plan.figure import Answer, Figure, Section, Table, Value, decimal, number, percent, said, why
from ftrain.plan.setup import DOC_A, DOC_B, PIPELINES, Quantity, Setup
from ftrain.units import plural

MAX_ACTIONS = 12_000
"""Larger schedules are answered by their formula alone, to stay within half a second."""


@cache
def bubble_of_compute(name: str, *, p: int, m: int, v: int) -> Fraction:
    """Idle time over compute, by the closed formula, with equal times for the two halves of the backward and the forward."""
    if name == "zb-h1" and m < p:  # too few weight gradients to fill the ends: the step takes 2p + 2m - 1
        return Fraction(2 * p - m - 1, 3 * m)
    idle = {"interleaved": Fraction(p - 1, v), "zb-h1": Fraction(p - 1, 3), "zb-v": Fraction(p - 1, 6)}.get(
        name, Fraction(p - 1)
    )
    return idle / m


FORMULAS = {
    "gpipe": "(p-1)/m of compute",
    "1f1b": "(p-1)/m of compute",
    "interleaved": "(p-1)/(v m) of compute",
    "zb-h1": "(p-1)(F+B-W)/(m(F+B+W)) of compute, F = B = W",
    "zb-v": "(p-1)/(6m) of compute, F = B = W: only the fill of the pipeline",
}


def of_total(compute: Fraction) -> Fraction:
    """From idle / compute to idle / (idle + compute)."""
    return compute / (1 + compute)


@cache
def timeline(name: str, *, p: int, m: int, v: int) -> Timeline | None:
    """The simulated step with F = B = W, or None if it is too long to build."""
    if p * m * max(v, 2) * 3 > MAX_ACTIONS:
        return None
    return simulate(build(name, num_ranks=p, num_microbatches=m, num_chunks=v), even(num_chunks=v))


def idle_of_compute(name: str, *, p: int, m: int, v: int) -> Fraction:
    """Idle time over compute: simulated where the schedule is short enough, else the formula (exact for m >= 2p)."""
    line = timeline(name, p=p, m=m, v=v)
    return Fraction(line.bubble_of_compute()) if line else bubble_of_compute(name, p=p, m=m, v=v)


def answer(setup: Setup, *, stages: int = 0, microbatches: int = 0) -> Answer:
    """The whole answer; `stages` and `microbatches` replace the config's for a what-if."""
    name, v = setup.options.schedule, setup.chunks
    p, m = stages or setup.mesh.pp, microbatches or setup.microbatches
    same = p == setup.mesh.pp
    try:
        main = _main(name, p=p, m=m, v=v)
    except IllegalScheduleError as error:
        return Answer(command="schedule", title=f"{name}, p={p}, m={m}", sections=(_comparison(p, m),), refusals=(str(error),))
    sections = [main, _curve(setup, name, p), _comparison(p, m)]
    if same and p > 1:
        sections.append(_stages(setup))
    return Answer(
        command="schedule",
        title=f"Schedule {name}: {plural(p, 'stage')}, {plural(m, 'micro-batch')}"
        + (f", {plural(v, 'virtual stage')} a rank" if v > 1 else ""),
        sections=tuple(sections),
        warnings=_warnings(name, p=p, m=m, v=v),
    )


def _main(name: str, *, p: int, m: int, v: int) -> Section:
    line = timeline(name, p=p, m=m, v=v)
    compute = Fraction(line.bubble_of_compute()) if line else bubble_of_compute(name, p=p, m=m, v=v)
    held = peak_in_flight(line.schedule) if line else ()
    how = "simulated from the schedule object" if line else "too long to simulate here: closed formula"
    source = f"{PIPELINES}; {how}"
    figures: list[Figure] = [
        percent("bubble_of_total", "idle share of the total", value=of_total(compute),
                why=why("idle / (idle + compute)", source, p=p, m=m, v=v)),
        percent("bubble_of_compute", "idle relative to compute", value=compute, digits=2,
                why=why("idle / compute", source, p=p, m=m, v=v)),
        percent("formula_of_total", "closed formula, of the total", value=of_total(bubble_of_compute(name, p=p, m=m, v=v)),
                digits=2, why=why(FORMULAS[name], PIPELINES, p=p, m=m, v=v)),
    ]  # fmt: skip
    if held:
        figures.append(said("held", "activations held per rank", text=" ".join(str(n) for n in held),
                            why=why("(virtual stage, micro-batch) pairs between forward and backward", DOC_A)))  # fmt: skip
    return Section(title="Waiting", figures=tuple(figures), drawing=chart.text(line) if line else "")


def _curve(setup: Setup, name: str, p: int) -> Section:
    """Few micro-batches idle, many make each update larger."""
    sequence, dp = setup.config.data.seq_len * setup.config.batch.micro_batch, setup.mesh.dp
    rows: list[tuple[Value, ...]] = []
    for m in sorted({max(1, p // 2), p, 2 * p, 4 * p, 8 * p}):
        legal = not (name == "interleaved" and (p == 1 or m % p))
        compute = (
            idle_of_compute(name, p=p, m=m, v=setup.chunks) if legal else bubble_of_compute(name, p=p, m=m, v=setup.chunks)
        )
        rows.append((m, _share(of_total(compute)), _share(compute), f"{m * dp * sequence:,}"))
    table = Table(
        key="curve",
        title="Few micro-batches idle; many make an update large",
        columns=("micro-batches", "idle of total", "idle of compute", "tokens per update"),
        rows=tuple(rows),
        formulas={"idle of total": FORMULAS[name], "tokens per update": "m x micro_batch x seq_len x DP"},
        source=DOC_A,
    )
    return Section(title="Trade-off", tables=(table,))


def _comparison(p: int, m: int) -> Section:
    """Other schedules on the same stages and micro-batches."""
    rows: list[tuple[Value, ...]] = []
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2)):
        legal = not (name == "interleaved" and (p == 1 or m % p))
        compute = idle_of_compute(name, p=p, m=m, v=v) if legal else Fraction(0)
        shown = (
            (_share(of_total(compute)), _share(compute))
            if legal
            else ("-", f"needs m in multiples of {p}" if p > 1 else "needs two stages or more")
        )
        rows.append((name, v, *shown, FORMULAS[name]))
    table = Table(
        key="schedules",
        title=f"Other schedules, p = {p}, m = {m}",
        columns=("schedule", "v", "idle of total", "idle of compute", "formula"),
        rows=tuple(rows),
        source=PIPELINES,
    )
    return Section(title="Comparison", tables=(table,))


def _share(value: Quantity) -> str:
    return f"{decimal(value * 100, digits=2 if value < Fraction(1, 100) else 1)} %"


def uneven(setup: Setup) -> Timeline | None:
    """The config's own step with the work of its own stages, or None if it is too long to build."""
    name, p, m, v = setup.options.schedule, setup.mesh.pp, setup.microbatches, setup.chunks
    if p * m * max(v, 2) * 3 > MAX_ACTIONS:
        return None
    work = [float(flops) / 3 for flops in cost.stage_flops(setup)]  # forward; the two halves of a backward are as long
    schedule = build(name, num_ranks=p, num_microbatches=m, num_chunks=v)
    return simulate(schedule, lambda action: work[action.stage] * (2 if action.kind is Kind.BACKWARD else 1))


def _stages(setup: Setup) -> Section:
    """Cuts should equalise time, not layers."""
    flops = cost.stage_flops(setup)
    mean = sum(flops) / len(flops)
    rows = tuple(
        (stage, setup_rank, len(layers), _ends(stage, len(flops)), _share(flops[stage] / mean))
        for stage, layers in enumerate(setup.stages)
        for setup_rank in range(setup.mesh.pp)
        if stage in setup.stages_of(setup_rank)
    )
    ratio, line = cost.imbalance(setup), uneven(setup)
    heaviest = max(range(len(flops)), key=lambda stage: flops[stage])
    note = (
        f"stage {heaviest} does {_share(flops[heaviest] / mean)} of the mean work, the others wait: move a layer away from it"
        if ratio > Fraction(105, 100)
        else "no stage does 5 % more work than the mean: moving cuts would gain nothing"
    )
    return Section(
        title="Stages",
        figures=(
            number("slowest_stage", "slowest rank's work over the mean", value=ratio, digits=3,
                   why=why("max / mean of layers x FLOPs of a layer (+ head on the last)", "ftrain.plan.cost")),
            *([percent("uneven_bubble", "idle share of the total with these stages", value=line.bubble_of_total(),
                       why=why("simulated with each stage's own work", PIPELINES))] if line else []),
        ),
        tables=(Table(key="stage_work", title="Work of each stage", columns=("stage", "rank", "layers", "ends", "of the mean"),
                      rows=rows, source="model FLOPs, forward and backward"),),
        notes=(note,),
    )  # fmt: skip


def _ends(stage: int, count: int) -> str:
    return "embedding" if stage == 0 else "head" if stage == count - 1 else ""


def _warnings(name: str, *, p: int, m: int, v: int) -> tuple[str, ...]:
    share = of_total(bubble_of_compute(name, p=p, m=m, v=v))
    if p == 1 or share < Fraction(5, 100):
        return ()
    if m >= 4 * p:
        return (
            f"m = {m} >= 4p = {4 * p} is often called negligible ({DOC_B} checks the claim): it is {_share(share)} of the time",
        )
    return (f"{_share(share)} of the time is idle: with m = 4p = {4 * p} it would still be "
            f"{_share(of_total(bubble_of_compute(name, p=p, m=4 * p, v=v)))}",)  # fmt: skip
