"""`ftrain plan time`: how many operations the run is, how long a step takes, how many days that is.

Three clocks, from the most certain to the least: operations over an achieved rate (the founding documents' days), a predicted
step (compute at an assumed share of the peak, the bubble of the schedule, and communication that nothing hides), and that
step corrected by the effective time that failures leave. The model of the step is simple on purpose: it is used to rank
layouts and to predict directions, and the report grades it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

import msgspec

from ftrain.plan import checkpoint, cost, memory, state
from ftrain.plan.activations import working_bytes
from ftrain.plan.figure import (
    Answer,
    Figure,
    Section,
    Table,
    duration,
    in_days,
    in_years,
    number,
    percent,
    said,
    seconds,
    significant,
    why,
)
from ftrain.plan.params import largest
from ftrain.plan.schedule import bubble_of_compute, idle_of_compute
from ftrain.plan.setup import DOC_A, DOC_B, Setup, layout
from ftrain.plan.traffic import group_gb_s
from ftrain.plan.volume import volumes
from ftrain.ramp import position, stretches
from ftrain.units import plural

UNBOUNDED = 10**15
"""More updates than any run has."""

YEAR = 31_557_600
"""Seconds of a Julian year."""

SIX_ND = "6 N D: 2 forward and 4 backward per parameter and token (Kaplan et al. 2020)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A predicted update, in seconds of the slowest rank; the parts add up to `total`."""

    compute: float
    recompute: float
    bubble: float
    tp: float
    cp: float
    pp: float
    dp: float
    update: float
    ep: float = 0.0

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.recompute + self.bubble + self.tp + self.cp + self.ep + self.pp + self.dp + self.update


def step(setup: Setup, *, exact: bool = True) -> Step:
    """The predicted step. Raises ValueError where the hardware's peak is unknown: no guess. `exact`: simulate the schedule
    instead of reading the closed formula."""
    profile, mesh = setup.profile, setup.mesh
    if not profile.peak_flops:
        raise ValueError(profile.no_peak)
    rate = profile.peak_flops * profile.assumed.kernel_share
    compute = float(cost.slowest(setup)) * setup.microbatches / rate
    recompute = compute * _recomputed(setup)
    exposed = _exposed(setup, behind=compute + recompute)
    inside = compute + recompute + exposed["TP"] + exposed["CP"] + exposed["EP"]
    idle = float(_idle(setup, exact=exact))
    own = largest(setup)
    updated = own.common / mesh.shards + own.experts * setup.mesh.ep / mesh.shards
    touched = updated * (2 * (state.MASTER + state.MOMENTS) + state.GRADIENT)
    return Step(
        compute=compute,
        recompute=recompute,
        bubble=inside * idle,
        tp=exposed["TP"],
        cp=exposed["CP"],
        pp=exposed["PP"],
        ep=exposed["EP"],
        dp=exposed["DP"],
        update=touched / (profile.gpu.memory_gb_s * 1e9),
    )


def _idle(setup: Setup, *, exact: bool) -> Fraction:
    """The schedule's idle time over compute; an interleaved count of micro-batches that does not divide reads the formula."""
    p, m, v, name = setup.mesh.pp, setup.microbatches, setup.chunks, setup.options.schedule
    if p == 1:
        return Fraction(0)
    m = -(-m // p) * p if name == "interleaved" else m
    exact = exact or (name == "zb-v" and m < 2 * p)  # where the formula does not hold
    return idle_of_compute(name, p=p, m=m, v=v) if exact else bubble_of_compute(name, p=p, m=m, v=v)


def _recomputed(setup: Setup) -> float:
    """Extra compute, as a share of forward + backward: a whole forward is one third."""
    if setup.options.recompute == "none" or not working_bytes(setup):
        return 0.0
    return 1 / 3 if setup.options.recompute == "full" else 0.02


def _exposed(setup: Setup, *, behind: float) -> dict[str, float]:
    """Seconds of communication that nothing hides: TP, CP, EP and PP in full; DP too, unless it goes on beside the compute of
    `behind` seconds: then what takes longer than that, and a tenth of it in any case."""
    times = dict.fromkeys(("TP", "CP", "PP", "EP", "DP"), 0.0)
    for volume in volumes(setup):
        rate = group_gb_s(setup, volume) * setup.profile.assumed.link_share * 1e9
        times[volume.name.split()[0]] += float(volume.nbytes) / rate  # of replicas there are several kinds
    if setup.options.overlap or setup.options.sharding != "zero1":  # FSDP gathers and scatters beside compute by itself
        times["DP"] = max(times["DP"] / 10, times["DP"] - behind)
    return times


def utilisation(setup: Setup, seconds_: float, *, causal: bool = True) -> float:
    """Model FLOPs over what the peak would do in that time."""
    return cost.step_flops(setup, causal=causal) / (seconds_ * setup.mesh.world * setup.profile.peak_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the run is, and how fast; zeros are worked out from the config and the hardware."""

    tokens: float = 0
    flops: float = 0
    achieved_tflops: float = 0
    effective: float = 1.0
    """Share of the time that ends up in the final history."""
    replicas: int = 0
    """A number of replicas that somebody multiplied by, to be checked."""


def answer(setup: Setup, work: Work, *, other: Setup | None = None) -> Answer:
    """The whole answer; `other`: the same run under another layout, laid beside it."""
    setup.require_schedule()
    tokens = round(work.tokens) or position(setup.config, setup.config.run.steps) * setup.config.data.seq_len
    operations = work.flops or 6.0 * setup.active_params * tokens
    sections = [_batch(setup), _operations(setup, tokens, operations)]
    if work.achieved_tflops:
        sections.append(_days(setup, operations, work.achieved_tflops * 1e12, work.effective))
    if setup.profile.peak_flops:
        sections.append(_predicted(setup, tokens, work))
        if other is not None:
            sections.append(_beside(setup, other))
    return Answer(
        command="time",
        title=f"Time of {layout(setup.mesh)} on {setup.profile.title}",
        sections=tuple(sections),
        refusals=_double_counting(setup, work.replicas),
        warnings=(*(() if setup.profile.peak_flops else (setup.profile.no_peak,)), *_no_speed(setup)),
    )


def _no_speed(setup: Setup) -> tuple[str, ...]:
    """That the layout does not fit, so that its time is nobody's; empty if it does."""
    return tuple(f"no run takes this time: {reason}" for reason in memory.refusals(setup, memory.all_ranks(setup)))


def _double_counting(setup: Setup, claimed: int) -> tuple[str, ...]:
    """Cards that work on the same sequences must not be counted as replicas."""
    mesh = setup.mesh
    if claimed in (0, mesh.dp):
        return ()
    inside = mesh.world // mesh.dp
    what = {inside: f"the {plural(inside, 'card')} of one replica", mesh.world: f"all {plural(mesh.world, 'card')}"}.get(
        claimed, "not this mesh"
    )
    return (
        f"{plural(claimed, 'replica')} is {what}: the cards of a replica work on the same sequences. There are "
        f"{plural(mesh.dp, 'replica')} "
        f"({mesh.world:,} / {inside}), so an update has {setup.tokens_per_update:,} tokens",
    )


PARTS = ("compute", "recompute", "bubble", "tp", "cp", "ep", "pp", "dp", "update")


def _beside(setup: Setup, other: Setup) -> Section:
    """Two layouts side by side: which part of the step explains the difference."""
    one, two = step(setup), step(other)
    rows = [(name, seconds(getattr(one, name)), seconds(getattr(two, name)), _of(one, name), _of(two, name)) for name in PARTS]
    mfu = (utilisation(setup, one.total), utilisation(other, two.total))
    rows.append(("step", seconds(one.total), seconds(two.total), "", ""))
    rows.append(("MFU", f"{100 * mfu[0]:.1f} %", f"{100 * mfu[1]:.1f} %", "", ""))
    mine, theirs = (f"{asked.tokens_per_update // asked.mesh.dp:,}" for asked in (setup, other))
    rows.append(("tokens of a replica", mine, theirs, "", ""))
    grown = max(PARTS, key=lambda name: getattr(two, name) / two.total - getattr(one, name) / one.total)
    direction = "lower" if mfu[1] < mfu[0] else "higher"
    return Section(
        title=f"Beside {layout(other.mesh)}",
        figures=(
            percent("mfu_other", "MFU there", value=mfu[1], why=why("as above, under --against", "ftrain.plan.time")),
            said("mfu_direction", "it is", text=f"{direction}: {grown} takes a larger share of the step",
                 why=why("largest growth of a part's share", "ftrain.plan.time")),
        ),
        tables=(Table(key="beside", title="Parts of the step", columns=("part", "here", "there", "share here", "share there"),
                      rows=tuple(rows), source="ftrain.plan.time"),),
    )  # fmt: skip


def _of(part: Step, name: str) -> str:
    return f"{100 * getattr(part, name) / part.total:.1f} %"


def _batch(setup: Setup) -> Section:
    """Tokens of an update; multiplied by replicas, never by cards."""
    config, mesh = setup.config, setup.mesh
    micro, count = config.batch.micro_batch, config.batch.global_batch
    sequences = Fraction(count, mesh.dp)
    inside = mesh.world // mesh.dp
    notes: tuple[str, ...] = ()
    if inside > 1:
        wrong = plural(mesh.world, "card") if inside == mesh.dp else f"{inside}, and not by {mesh.world:,}"
        text = f"multiply by {plural(mesh.dp, 'replica')}, not by {wrong}"
        notes = (f"the {inside} cards of a replica work on the same sequences: {text}",)
    notes += tuple(
        f"ramp: {plural(phase.global_batch, 'sequence')} in the steps {phase.first_step + 1:,} to {phase.stop_step:,}"
        for phase in (stretches(config) if config.batch.ramp else ())
    )
    return Section(
        title="Batch",
        figures=(
            number("sequences", "sequences in an update", value=count,
                   why=why("micro x count x replicas", DOC_A, micro=micro, count=setup.microbatches, replicas=mesh.dp)),
            number("sequences_per_replica", "sequences of a replica", value=sequences,
                   why=why("global batch / replicas", DOC_B, replicas=mesh.dp)),
            number("microbatches", "micro-batches of the busiest replica", value=setup.microbatches,
                   why=why("ceil(global batch / (micro x replicas))", DOC_A, micro=micro)),
            number("tokens_per_replica", "tokens of a replica in an update", value=sequences * config.data.seq_len,
                   why=why("sequences x seq_len", DOC_B, seq_len=config.data.seq_len)),
            number("tokens_per_update", "tokens in an update", value=setup.tokens_per_update, unit="tokens",
                   why=why("sequences x seq_len", DOC_A, sequences=count, seq_len=config.data.seq_len)),
        ),
        notes=notes,
    )  # fmt: skip


def _operations(setup: Setup, tokens: int, operations: float) -> Section:
    causal, full = cost.token_flops(setup), cost.token_flops(setup, causal=False)
    return Section(
        title="Operations",
        figures=(
            number("tokens", "tokens of the run", value=tokens, why=why("steps x tokens per update, or --tokens", "config")),
            Figure(key="flops", label="operations of the run, 6 N D", value=operations, text=f"{operations:.5g} FLOP",
                   why=why("6 x N x D, or --flops; N: the parameters that compute a token", SIX_ND, N=setup.active_params,
                           D=tokens)),
            number("token_gflops", "model FLOPs of a token, causal attention halved", value=causal / 1e9, unit="GFLOP",
                   digits=3, why=why(_token_formula(setup), "Megatron-LM num_floating_point_operations",
                           s=setup.config.data.seq_len)),
            number("full_attention_factor", "attention counted in full (PaLM, torchtitan) would make it", value=full / causal,
                   unit="x", digits=2,
                   why=why("12 L q s instead of 6 L q s", "PaLM, arXiv 2204.02311", s=setup.config.data.seq_len)),
        ),
    )  # fmt: skip


def _token_formula(setup: Setup) -> str:
    block = "3hf k + hE" if setup.config.model.experts else "3hf"
    return f"6 [L (h(2q + 2kv) + {block}) + hV] + 6 L q s"


def _days(setup: Setup, operations: float, achieved: float, effective: float) -> Section:
    """The documents' arithmetic: operations over a rate, compute only."""
    world, peak = setup.mesh.world, setup.profile.peak_flops
    alone, together = operations / achieved, operations / (achieved * world * effective)
    figures = [
        in_years("years_on_one", "on one GPU", value=alone / YEAR,
               why=why("FLOP / rate / seconds of a year", DOC_B, flop=operations, rate=achieved)),
        in_days("days", f"on {plural(world, 'GPU')}, {'compute only' if effective == 1 else 'effective time included'}",
                 value=together / 86400,
                 why=why("FLOP / (rate x GPUs x effective) / 86400", DOC_B, effective=effective)),
    ]  # fmt: skip
    if peak:
        figures.append(
            percent("mfu_achieved", f"MFU of that rate, of {setup.profile.peak_text}", value=achieved / peak,
                    why=why("rate / dense peak", setup.profile.sources["gpu"], rate=achieved, peak=peak))
        )  # fmt: skip
    return Section(title=f"At {achieved / 1e12:g} TFLOP/s a GPU", figures=tuple(figures), tables=_published(setup))


def _published(setup: Setup) -> tuple[Table, ...]:
    """What was printed for this hardware beside what the printed rate gives: quoted, not corrected."""
    peak = setup.profile.gpu.dense_bf16_tflops
    rows = tuple(
        (run.what, f"{run.gpus:,}", f"{run.tflops:g}", f"{run.mfu_printed:g} %", f"{100 * run.tflops / peak:.1f} %")
        for run in setup.profile.published
    )
    table = Table(
        key="published",
        title="Published runs on this hardware: the printed MFU is the source's own rounding and is not corrected",
        columns=("run", "GPUs", "TFLOP/s printed", "MFU printed", "rate / peak"),
        rows=rows,
        formulas={"rate / peak": f"TFLOP/s / {peak:g}"},
        source=DOC_B,
    )
    return (table,) if rows else ()


def _predicted(setup: Setup, tokens: int, work: Work) -> Section:
    part, profile, effective = step(setup), setup.profile, work.effective
    updates = tuple(_updates(setup, tokens))
    steps = sum(count for _, count in updates)
    total = sum(step(under).total * count for under, count in updates) / effective / 86400
    rows = tuple((name, seconds(getattr(part, name)), _of(part, name)) for name in PARTS)
    rate = setup.tokens_per_update / part.total
    assumed = f"kernels at {profile.assumed.kernel_share:g} of the peak, links at {profile.assumed.link_share:g}"
    peak_name = profile.peak_text
    return Section(
        title=f"Predicted step ({assumed}: assumptions, see the profile)",
        figures=(
            duration("step_s", "step", value=part.total, why=why("sum of the parts below", "ftrain.plan.time")),
            number("tokens_per_s", "tokens per second", value=rate, digits=0,
                   why=why("tokens per update / step", "ftrain.plan.time")),
            percent("mfu", f"MFU, causal attention halved, of {peak_name}", value=utilisation(setup, part.total),
                    why=why("model FLOPs / (step x GPUs x dense peak)", profile.sources["gpu"], peak=profile.peak_flops)),
            percent("mfu_full", "the same with attention counted in full", value=utilisation(setup, part.total, causal=False),
                    why=why("12 L q s convention", "PaLM, arXiv 2204.02311")),
            number("tflops", "achieved by a GPU", value=(each := cost.step_flops(setup) / part.total / setup.mesh.world / 1e12),
                   unit="TFLOP/s", digits=0 if each >= 10 else 4,
                   why=why("model FLOPs / (step x GPUs)", "Megatron-LM's definition")),
            in_days("predicted_days", f"the run at {effective:.1%} effective time" if effective < 1 else "without failures",
                     value=total, why=why("steps x step / effective", "ftrain.plan.time", steps=steps)),
            *_with_failures(setup, total * effective),
        ),
        tables=(Table(key="step_parts", title="Where the step goes", columns=("part", "time", "share"), rows=rows,
                      formulas=_part_formulas(setup), source="ftrain.plan.time"),),
        notes=_apart(setup, part, each, work.achieved_tflops),
    )  # fmt: skip


APART = 0.1
"""From here on, two rates are told apart in words."""


def _apart(setup: Setup, part: Step, predicted: float, given: float) -> tuple[str, ...]:
    """Why the prediction is not the rate that was given (both TFLOP/s of a GPU): it is for the config's own schedule."""
    if not given or abs(predicted / given - 1) <= APART:
        return ()
    p, m, v = plural(setup.mesh.pp, "stage"), plural(setup.microbatches, "micro-batch"), plural(setup.chunks, "virtual stage")
    own = f"the prediction is for the config's own schedule, {setup.options.schedule} with {p}, {m} and {v} a rank"
    rates = f"{significant(predicted)} TFLOP/s a GPU where {given:g} was given"
    largest_loss = max(PARTS[1:], key=lambda name: getattr(part, name))
    name = "its bubble (`ftrain plan schedule` has others)" if largest_loss == "bubble" else largest_loss
    lost = f"; what differs most is {name}: {_of(part, largest_loss)} of the step" * (predicted < given)
    return (f"{own}: {rates}{lost}",)


def _updates(setup: Setup, tokens: float) -> Iterator[tuple[Setup, float]]:
    """How many updates of each size the run takes to these tokens, each size as a setup of its own."""
    left = tokens / setup.config.data.seq_len
    for phase in stretches(setup.config, UNBOUNDED):
        count = min(phase.stop_step - phase.first_step, left / phase.global_batch)
        if count > 0:
            batch = msgspec.structs.replace(setup.config.batch, global_batch=phase.global_batch, ramp=())
            yield replace(setup, config=msgspec.structs.replace(setup.config, batch=batch)), count
            left -= count * phase.global_batch


def _with_failures(setup: Setup, days: float) -> tuple[Figure, ...]:
    """The run, corrected by the effective time that Llama 3's rate of failures would leave it."""
    costs = checkpoint.Costs()
    share = checkpoint.best(setup, costs).effective
    source = f"{costs.table} failures, {seconds(costs.restart_s)} to restart: see plan checkpoint and plan simulate"
    return (
        percent("effective", "effective time with failures, by formula", value=share,
                why=why("estimator at Young's interval", source, restart_s=costs.restart_s)),
        in_days("days_with_failures", "the run with failures", value=days / share,
                 why=why("days / effective", source)),
    )  # fmt: skip


def _part_formulas(setup: Setup) -> dict[str, str]:
    return {
        "compute": "slowest rank's model FLOPs / (peak x kernel share)",
        "recompute": "1/3 of compute (full), 2 % (selective)",
        "bubble": f"idle over compute of the {setup.options.schedule} schedule x (compute + TP + CP)",
        "tp, cp, ep, pp": "bytes / (rate of the slowest link x link share), nothing hidden",
        "dp": "the same; with --overlap and with FSDP beside compute: what exceeds it, at least a tenth",
        "update": "optimizer bytes read and written / memory bandwidth",
    }
