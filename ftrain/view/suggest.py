"""What to do next, from what was measured: each suggestion names the evidence it rests on, and changes one thing.

The order is the order of acceptance: results first, then one change at a time, then the largest cost. A loop of tuning in which
each change answers one problem that was found; nothing is suggested because it is usually good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from msgspec import Struct

from ftrain.load import Change
from ftrain.parallel.partition import balanced_counts
from ftrain.plan import cost, schedule
from ftrain.plan.setup import Setup
from ftrain.units import plural
from ftrain.view.learning import Learning
from ftrain.view.measured import Measured
from ftrain.view.numbers import show
from ftrain.view.predict import Predicted

SAME_BITS = (
    "parallel.recompute",
    "parallel.overlap_reduce",
    "parallel.overlap_gather",
    "parallel.tp_overlap",
    "parallel.sp_regather",
    "parallel.schedule",
    "parallel.virtual_stages",
    "parallel.layer_counts",
    "parallel.pp",
)
"""Fields that change when and where things are computed, never what: whoever changes only these gets the same bits."""

UNTIMED = ("run.", "checkpoint.", "recovery.", "evaluate.", "storage.", "faults", "schedule.")
"""Sections that do not change what a step computes (checkpoints and evaluation are taken out of its time)."""

OTHER_WORK = ("model.", "data.", "optimizer.")
"""Sections that say what is trained: runs that differ here are compared by what they learn, not by their speed."""

HEAVY = 0.10
"""A cost above this share of a step is worth a change; below it, others come first."""

UNEVEN = Fraction(105, 100)
"""The slowest pipeline rank's work over the mean, above which moving a cut pays."""


class Suggestion(Struct, frozen=True, kw_only=True):
    """One thing to do, the figures that speak for it, and the overrides that would do it."""

    about: str
    text: str
    evidence: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def suggestions(
    a: Measured,
    b: Measured,
    predicted: tuple[Predicted | None, Predicted | None],
    learnt: Learning,
    config: Sequence[Change],
    *,
    beside: str | None = None,
) -> Iterator[Suggestion]:
    """Everything that follows from a comparison; never empty. `beside`: what else, if not the settings, may have made one of
    them slower; None where their settings are not known."""
    timed = [item for item in config if not item.path.startswith(UNTIMED)]
    trouble = _results(learnt, timed)
    if trouble:
        yield trouble
    several = _several(timed)
    if several:
        yield several
    found = list(_costs(b, predicted[1]))
    if timed or beside is None or a.ranks != b.ranks:
        yield _verdict(a, b, timed, trusted=not trouble and learnt.origins.same)
    else:
        yield _alike(a, b, beside, config)
    yield from found


def _results(learnt: Learning, timed: Sequence[Change]) -> Suggestion | None:
    """Off and on must learn the same; a switch that promises the same bits is held to it."""
    paths = [item.path for item in timed]
    if not learnt.same_updates or learnt.first_difference is None or not paths:
        return None
    if any(path.startswith(OTHER_WORK) for path in paths):  # they are to learn something else
        return None
    evidence = (f"{learnt.verdict}", f"changed: {', '.join(paths)}")
    if all(path in SAME_BITS for path in paths):
        text = f"do not accept the change: it promises the same bits, and the losses differ from step {learnt.first_difference}"
        return Suggestion(about="results", text=text, evidence=evidence)
    if not learnt.is_rounding:
        text = "do not compare the times yet: the runs do not learn the same. `ftrain certify` finds the layer that differs"
        return Suggestion(about="results", text=text, evidence=evidence)
    return None


def _several(timed: Sequence[Change]) -> Suggestion | None:
    if len(timed) < 2:
        return None
    first = timed[0]
    return Suggestion(
        about="one at a time",
        text=f"change one thing at a time: run A's config with only --set {first.path}={_toml(first.new)}, then the others",
        evidence=(f"{len(timed)} fields differ that change a step, so no gain belongs to one of them: "
                  + ", ".join(item.path for item in timed),),
        overrides=(f"{first.path}={_toml(first.new)}",),
    )  # fmt: skip


def _toml(value: object) -> str:
    from ftrain.schema import toml_text

    return toml_text(value)


def _verdict(a: Measured, b: Measured, timed: Sequence[Change], *, trusted: bool) -> Suggestion:
    """Which of the two is the faster way through the same material, if that can be told."""
    if a.step is None or b.step is None or not a.tokens_per_s or not b.tokens_per_s:
        return _NO_STEP
    one, two = a.tokens_per_s / a.ranks, b.tokens_per_s / b.ranks
    per_rank, spans = a.ranks != b.ranks, _spans(a, b)
    memory = (f"memory of the fullest rank: {show(a.peak_memory, 'B')} and {show(b.peak_memory, 'B')}",)
    larger = "an update holds another number of tokens: compared is the time of the same material, not of an update"
    notes = () if a.tokens_per_update == b.tokens_per_update else (larger,)
    evidence = (*notes, *spans, *(memory if a.peak_memory and b.peak_memory else ()))
    if a.tokens_per_update == b.tokens_per_update and not a.step.differs_from(b.step):
        return Suggestion(about="speed", text="neither is faster: the difference of the steps lies within their noise. "
                          "Choose by memory, or measure longer", evidence=evidence)  # fmt: skip
    other = [item.path for item in timed if item.path.startswith(OTHER_WORK)]
    if other:
        text = "no speed is credited to either: they do not train the same thing"
        return Suggestion(about="speed", text=text, evidence=(f"changed: {', '.join(other)}", *evidence))
    if per_rank:
        share = b.tokens_per_s / b.ranks / (a.tokens_per_s / a.ranks)
        text = f"scaling from {a.ranks} to {plural(b.ranks, 'rank')} keeps {100 * share:.0f} % of a rank's speed"
        return Suggestion(about="scaling", text=text, evidence=evidence)
    name, gain = ("B", two / one - 1) if two > one else ("A", one / two - 1)
    what = (
        ", ".join(f"{item.path} = {_toml(item.new if name == 'B' else item.old)}" for item in timed)
        or "its settings are not recorded"
    )
    verb = "keep" if trusted else "once the results agree, prefer"
    return Suggestion(
        about="speed", text=f"{verb} {name} ({what}): {100 * gain:.1f} % more tokens per second", evidence=evidence
    )


_NO_STEP = Suggestion(about="speed", text="run both for more steps: there is no step to compare yet")


def _spans(a: Measured, b: Measured) -> tuple[str, ...]:
    """What each of them measured, as evidence."""
    return tuple(
        f"{name}: step {show(of.step.value, 's')}, 95 % interval {show(of.step.low, 's')} to {show(of.step.high, 's')}, "
        f"{plural(of.step.count, 'step')}, {show(of.tokens_per_s, 'tokens')} tokens/s on {plural(of.ranks, 'rank')}"
        for name, of in (("A", a), ("B", b))
        if of.step
    )  # fmt: skip


def _alike(a: Measured, b: Measured, beside: str, differ: Sequence[Change]) -> Suggestion:
    """Of two runs whose steps are configured alike: whatever their times are, no setting of a step is to thank for it.
    `differ`: fields that do not change what a step computes; faults can only have made slower whoever had them."""
    if a.step is None or b.step is None or not a.tokens_per_s or not b.tokens_per_s:
        return _NO_STEP
    name, gain = ("B", b.tokens_per_s / a.tokens_per_s - 1) if b.tokens_per_s > a.tokens_per_s else (
        "A", a.tokens_per_s / b.tokens_per_s - 1)  # fmt: skip
    same = "the settings of a step are the same in both"
    if not a.step.differs_from(b.step):
        text = f"nothing follows: {same}, and the difference of the steps lies within their noise"
    else:
        cause = beside or "the machine was unequal (other load, other hardware)"
        paths = [item.path for item in differ if item.path != "faults" or (item.old if name == "B" else item.new)]
        cause += f", or because of what differs beside the steps ({', '.join(paths)})" * bool(paths)
        text = f"nothing follows: {same}. {name} had {100 * gain:.1f} % more tokens per second because {cause}"
    return Suggestion(about="speed", text=text, evidence=_spans(a, b))


def _costs(b: Measured, predicted: Predicted | None) -> Iterator[Suggestion]:
    """The largest costs of run B that a change of its config answers."""
    if predicted is None:
        return
    setup = predicted.setup
    wait, how = (b.idle, "measured") if b.idle is not None else (predicted.bubble, "predicted")
    if setup.mesh.pp > 1:
        heavy = _heavy_end(setup)
        if heavy:
            yield heavy
        elif wait > HEAVY:
            yield _less_waiting(setup, wait, how)
    if b.exposed is not None and b.exposed > HEAVY and setup.mesh.shards > 1:
        yield from _overlap(setup, b.exposed)


def _heavy_end(setup: Setup) -> Suggestion | None:
    """Cuts should equalise time: where they do not, the cuts that would."""
    ratio = cost.imbalance(setup)
    if ratio <= UNEVEN:
        return None
    layer = float(cost.layer_flops(setup) + cost.attention_flops(setup))
    stages = setup.mesh.pp * setup.chunks
    counts = balanced_counts([layer] * setup.config.model.layers, stages, last=float(cost.head_flops(setup)))
    flops = cost.stage_flops(setup)
    heaviest = max(range(len(flops)), key=lambda stage: flops[stage])
    better = list(counts)
    if better == [len(layers) for layers in setup.stages]:
        return None
    return Suggestion(
        about="cuts",
        text=f"move layers away from stage {heaviest}: --set 'parallel.layer_counts={better}', same model and batch",
        evidence=(f"its work is {100 * float(ratio):.0f} % of the mean of the stages, which wait for it in every micro-batch",),
        overrides=(f"parallel.layer_counts={better}",),
    )


def _less_waiting(setup: Setup, wait: float, how: str) -> Suggestion:
    """Virtual stages on the same model and batch, or more micro-batches: whatever the planner says waits less."""
    p, m, name = setup.mesh.pp, setup.microbatches, setup.options.schedule
    now = schedule.of_total(schedule.idle_of_compute(name, p=p, m=m, v=setup.chunks))
    evidence = (
        f"{100 * wait:.1f} % of a step is waiting ({how}), with {name}, {plural(p, 'stage')} and {plural(m, 'micro-batch')}"
    )
    chunks = 2 * setup.chunks
    if name in ("1f1b", "gpipe", "interleaved") and m % p == 0 and p * chunks <= setup.config.model.layers:
        then = schedule.of_total(schedule.idle_of_compute("interleaved", p=p, m=m, v=chunks))
        return Suggestion(
            about="waiting",
            text=f"compare interleaved with {chunks} virtual stages on the same model and batch",
            evidence=(evidence, f"the planner's idle share falls from {_percent(now)} to {_percent(then)}"),
            overrides=("parallel.schedule=interleaved", f"parallel.virtual_stages={chunks}"),
        )
    then = schedule.of_total(schedule.bubble_of_compute(name, p=p, m=2 * m, v=setup.chunks))
    micro = setup.config.batch.micro_batch
    if micro > 1 and micro % 2 == 0:
        return Suggestion(
            about="waiting",
            text="halve batch.micro_batch: twice as many micro-batches of the same update",
            evidence=(evidence, f"the planner's idle share falls from {_percent(now)} to {_percent(then)}"),
            overrides=(f"batch.micro_batch={micro // 2}",),
        )
    return Suggestion(
        about="waiting",
        text="fewer stages (parallel.pp), if they fit, or a larger batch.global_batch, which changes what is learnt",
        evidence=(evidence,),
    )


def _overlap(setup: Setup, exposed: float) -> Iterator[Suggestion]:
    """One switch at a time, the one with the larger transfer first."""
    parallel = setup.config.parallel
    for field, is_on in (("overlap_reduce", parallel.overlap_reduce), ("overlap_gather", parallel.overlap_gather)):
        if not is_on:
            yield Suggestion(
                about="overlap",
                text=f"run once more with only --set parallel.{field}=true, and compare with this run",
                evidence=(f"{100 * exposed:.1f} % of a step is communication that nothing hides; the switch keeps the bits",),
                overrides=(f"parallel.{field}=true",),
            )
            return


def _percent(share: Fraction) -> str:
    return f"{100 * float(share):.1f} %"
