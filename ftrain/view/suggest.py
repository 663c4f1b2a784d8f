"""What to do next, from what was measured: each suggestion names the evidence it rests on, and changes one thing.

The order is the order of acceptance: results first, then one change at a time, then the largest cost. A loop of tuning in which
each change answers one problem that was found; nothing is suggested because it is usually good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from ftrain.load import Change
from ftrain.parallel.partition import balanced_counts
from ftrain.plan import cost, schedule
from ftrain.plan.setup import Setup
from ftrain.units import plural
from ftrain.view.gain import OTHER_WORK, Pair, Suggestion, alike, verdict
from ftrain.view.learning import Learning
from ftrain.view.measured import Measured
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

HEAVY = 0.10
"""A cost above this share of a step is worth a change; below it, others come first."""

UNEVEN = Fraction(105, 100)
"""The slowest pipeline rank's work over the mean, above which moving a cut pays."""


def suggestions(
    pairs: Sequence[Pair],
    predicted: tuple[Predicted | None, Predicted | None],
    learnt: Learning,
    config: Sequence[Change],
    *,
    beside: str | None = None,
) -> Iterator[Suggestion]:
    """Everything that follows from a comparison; never empty. `pairs`: A and B, then more runs of each. `beside`: what else, if
    not the settings, may have made one of them slower; None where their settings are not known."""
    timed = [item for item in config if not item.path.startswith(UNTIMED)]
    trouble = _results(learnt, timed)
    if trouble:
        yield trouble
    several = _several(timed)
    if several:
        yield several
    a, b = pairs[0].a, pairs[0].b
    if timed or beside is None or a.ranks != b.ranks or pairs[0].unlike:
        yield verdict(pairs, timed, trusted=not trouble and learnt.origins.same and not learnt.untold)
    else:
        yield alike(pairs, beside, config)
    yield from _costs(b, predicted[1])


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
