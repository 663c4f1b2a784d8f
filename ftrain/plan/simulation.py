"""`ftrain plan simulate`: the run over days, with failures that happened to somebody, and what limits the time that counts.

The estimate by formula stands beside the simulation; they agree within a few per cent wherever the formula holds, which is
the check of both. The comparison at the end asks the same failures again under other intervals and without the memory tier.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import ceil, floor, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ftrain.config import KeepEvery, KeepLast
from ftrain.plan import checkpoint, failure_source, failure_table, interval
from ftrain.plan import time as clock
from ftrain.plan.failure_source import Failure
from ftrain.plan.figure import Answer, Section, Table, Value, duration, number, percent, said, seconds, why
from ftrain.plan.setup import Setup, layout
from ftrain.plan.simulate import BUCKETS, Outcome, Rules, Simulation
from ftrain.ramp import position
from ftrain.units import plural

DAY = 86400.0
MOST_FAILURES = 50_000
"""Of a simulation: some seconds of this computer, and a dozen variants of it are asked as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is simulated."""

    days: float = 54.0
    seed: int = 0
    table: str = "llama3"
    rate: float = 0.0
    """Unplanned interruptions per 1,000 node-days; 0: the table's own."""
    stragglers: float = 0.0
    """Slow machines per 1,000 node-days."""
    trace: str = ""
    """A trace or a ledger to replay instead of drawing from the table."""
    assume: tuple[str, ...] = ()
    """`name=value` for fields of `Rules`."""
    policies: bool = False
    """Also ask the same failures under other policies."""
    intervals: bool = True
    """Also ask them under other intervals of saving."""


def rules(setup: Setup, question: Question) -> Rules:
    """What follows from the config and the hardware, then what the question assumes."""
    config, profile = setup.config, setup.profile
    replica = setup.mesh.world // setup.mesh.dp
    given = _assumed(question.assume)
    step_s = given.pop("step_s", 0.0) or clock.step(setup).total
    base = Rules(
        step_s=step_s,
        snapshot_steps=config.checkpoint.snapshot_steps,
        every_steps=config.checkpoint.every_steps,
        stall_s=checkpoint.stall_s(setup, checkpoint.Costs()),
        upload_s=60.0,
        nodes=checkpoint.nodes(setup),
        nodes_per_replica=max(1, replica // profile.server.gpus),
        hang_s=config.recovery.hang_s,
        seed=question.seed,
    )
    kinds = {f.name: f.type for f in fields(Rules)}
    changed: dict[str, Any] = {name: int(value) if kinds[name] == "int" else value for name, value in given.items()}
    found = replace(base, **changed)
    if found.nodes_per_replica > found.nodes:
        raise ValueError(
            f"nodes_per_replica = {found.nodes_per_replica}: wanted at most nodes = {found.nodes}, or no replica is whole"
        )
    return found


def _assumed(pairs: Sequence[str]) -> dict[str, float]:
    names = {f.name for f in fields(Rules)}
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in names:
            raise ValueError(f"--assume {pair}: there is no {name!r}; there are {', '.join(sorted(names))}")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise ValueError(f"--assume {pair}: wanted {name}=NUMBER") from error
        if wanted := _wanted(name, found[name]):
            raise ValueError(f"--assume {pair}: wanted {wanted}")
    return found


def _wanted(name: str, value: float) -> str:
    """What an assumption must be that this value is not; empty if it is."""
    if name in ("nodes", "nodes_per_replica") and not (value >= 1 and isfinite(value)):
        return "1 or more"
    if name == "straggler_speed" and not 0 < value <= 1:
        return "a share of the full speed, above 0 and at most 1"
    if name == "step_s" and not (value > 0 and isfinite(value)):
        return "a time above 0"
    whole = {f.name for f in fields(Rules) if f.type == "int"} - {"seed"}
    if (name in whole and value != floor(value)) or not isfinite(value):
        return "a whole number" if name in whole else "a finite number"
    return "0 or more" if value < 0 and name != "seed" else ""


def failures(setup: Setup, question: Question) -> list[Failure]:
    """The failures of the question, in time order."""
    if question.trace:
        return failure_source.read(question.trace)
    table = failure_table.load(question.table)
    rate = question.rate or table.per_1000_node_days
    nodes = checkpoint.nodes(setup)
    span, seed = question.days * DAY, question.seed
    expected = nodes * (rate + question.stragglers) / 1000 * question.days
    if expected > MOST_FAILURES:
        raise ValueError(
            f"{expected:,.0f} failures are expected in {question.days:g} days of {nodes:,} nodes: wanted at most "
            f"{MOST_FAILURES:,}. Lower --days, --rate or --stragglers"
        )
    found = list(failure_source.drawn(table, rate=rate, nodes=nodes, seconds=span, seed=seed))
    slow = failure_source.stragglers(rate=question.stragglers, nodes=nodes, seconds=span, seed=seed)
    return sorted([*found, *slow], key=lambda failure: failure.t)


@cache
def default_actions() -> Mapping[str, str]:
    """What the classifier's own table does about each class at a first occurrence."""
    import recovery

    path = Path(recovery.__file__).parent / "signatures.toml"
    classes = tomllib.loads(path.read_text(encoding="utf-8"))["classes"]
    return MappingProxyType({name: str(entry["action"]) for name, entry in classes.items()})


def play(
    setup: Setup, how: Rules, happened: Sequence[Failure], *, days: float, actions: Mapping[str, str] | None = None
) -> Outcome:
    """Run the simulation with the config's own limits and retention; `actions` instead of the classifier's."""
    from recovery.policy import Limits
    from storage import retention

    asked = setup.config.recovery
    limits = Limits(max_restarts=asked.max_restarts, backoff_s=asked.backoff_s, backoff_max_s=asked.backoff_max_s)
    policies: list[retention.RetentionPolicy] = []
    for policy in setup.config.checkpoint.retention:  # keeping the best is left out: a simulated run has no losses
        if isinstance(policy, KeepLast):
            policies.append(retention.KeepLast(policy.n))
        elif isinstance(policy, KeepEvery):
            policies.append(retention.KeepEvery(policy.steps))
    known = default_actions() if actions is None else actions
    return Simulation(how, limits=limits, actions=known, retention=tuple(policies)).run(happened, seconds=days * DAY)


def answer(setup: Setup, question: Question) -> Answer:
    """The whole answer."""
    how, happened = rules(setup, question), failures(setup, question)
    outcome = play(setup, how, happened, days=question.days)
    if question.trace:
        source = question.trace
    else:
        table = failure_table.load(question.table)
        source = f"{table.title}, at {question.rate or table.per_1000_node_days:.3g} per 1,000 node-days"
    sections = [
        _result(setup, how, outcome, source),
        _limits(setup, how, happened, question.days, outcome),
        _causes(outcome),
        _comparison(setup, how, happened, outcome) if question.intervals else _NO_COMPARISON,
        *([_policies(setup, how, happened, outcome)] if question.policies else []),
        _assumptions(how),
    ]
    return Answer(
        command="simulate",
        title=f"{plural(question.days, 'day')} of {layout(setup.mesh)} on {setup.profile.title}",
        sections=tuple(sections),
        warnings=_short_memory(setup, how),
    )


def _short_memory(setup: Setup, how: Rules) -> tuple[str, ...]:
    """Corruption that is noticed late needs checkpoints from before it."""
    last = max((policy.n for policy in setup.config.checkpoint.retention if isinstance(policy, KeepLast)), default=0)
    reach = last * how.every_steps * how.step_s
    if not last or reach >= how.corruption_s:
        return ()
    return (
        f"keeping the last {plural(last, 'checkpoint')} reaches back {seconds(reach)}; corruption noticed after "
        f"{seconds(how.corruption_s)} rolls back further, to what else retention keeps: keep more, or save less often",
    )


def _result(setup: Setup, how: Rules, outcome: Outcome, source: str) -> Section:
    buckets, wall = outcome.buckets, outcome.wall_s
    count = sum(outcome.count.values())
    down = sum(buckets[name] for name in ("detection", "waiting", "restarting", "loading"))
    estimate = _estimate(how, outcome, down)
    rows = tuple((name, seconds(buckets[name]), f"{100 * buckets[name] / wall:.2f} %") for name in BUCKETS)
    costs = {name: buckets[name] for name in BUCKETS if name != "productive"}
    worst = max(costs, key=lambda name: costs[name])
    return Section(
        title="The run",
        figures=(
            percent("effective", "effective time", value=outcome.effective, digits=2,
                    why=why("steps of the final history x step, at full speed / wall time", "ftrain.plan.simulate")),
            percent("estimate", "the same by formula", value=estimate, digits=2,
                    why=why(interval.ESTIMATOR, "arXiv 2410.21680; its restart time is the simulated mean")),
            number("failures", "failures", value=count, why=why("drawn or replayed", source)),
            duration("down_per_failure", "down per failure", value=down / count if count else 0.0,
                     why=why("(detection + waiting + restarting + loading) / failures", "ftrain.plan.simulate")),
            number("steps", "steps of the final history", value=outcome.step, why=why("counted", "ftrain.plan.simulate")),
            number("tokens", "tokens of the final history", value=_tokens(setup, outcome.step),
                   why=why("steps x tokens per update", "ftrain.plan.simulate")),
            said("limit", "what limits it", text=f"{worst}: {100 * costs[worst] / wall:.2f} % of the time",
                 why=why("largest bucket that is not productive", "ftrain.plan.simulate")),
        ),
        tables=(Table(key="buckets", title="Every second, once", columns=("bucket", "time", "share"),
                      rows=(*rows, ("total", seconds(sum(buckets.values())), "100.00 %")), source="ftrain.plan.simulate"),),
    )  # fmt: skip


LIMITING = {
    "repeated": ("snapshot_steps", "upload_s", "corruption_s"),
    "saving": ("stall_s",),
    "detection": ("detect_s", "hang_s"),
    "waiting": ("human_s",),
    "restarting": ("restart_s",),
    "loading": ("load_memory_s", "load_storage_s"),
    "slowed": ("repair_s", "straggler_s"),
}
"""Bucket -> the assumptions that would make it smaller if they were."""
WORST = 2
"""Buckets, the largest ones, whose assumptions are asked about: each answer is a simulation."""


def _tokens(setup: Setup, steps: int) -> int:
    """Of the first `steps` updates."""
    return position(setup.config, steps) * setup.config.data.seq_len


def _limits(setup: Setup, how: Rules, happened: Sequence[Failure], days: float, outcome: Outcome) -> Section:
    """Which assumption limits the effective time: each one halved, the same failures again."""
    gains: list[tuple[float, str]] = []
    worst_buckets = sorted(LIMITING, key=lambda bucket: -outcome.buckets[bucket])[:WORST]
    for name in [name for bucket in worst_buckets for name in LIMITING[bucket]]:
        value = getattr(how, name)
        half = value // 2 if isinstance(value, int) else value / 2
        if half:
            better = play(setup, replace(how, **{name: half}), happened, days=days)
            gains.append((better.effective - outcome.effective, name))
    gains.sort(reverse=True)
    rows = tuple(
        (name, f"{getattr(how, name):g}", f"{100 * (outcome.effective + gain):.2f} %", f"{100 * gain:+.3f} %")
        for gain, name in gains
    )
    gain, worst = gains[0] if gains else (0.0, "")
    text = (
        f"{worst} = {getattr(how, worst):g}: half of it would give {100 * (outcome.effective + gain):.2f} %"
        if gain > 0
        else "none"
    )
    return Section(
        title="Limits",
        figures=(
            said("limiting_assumption", "the assumption that limits it", text=text,
                 why=why("each assumption halved, the same failures again: the largest gain", "ftrain.plan.simulate")),
        ),
        tables=(Table(key="limits", title="Each assumption halved", columns=("assumption", "is", "effective then", "gain"),
                      rows=rows, source="ftrain.plan.simulate"),),
    )  # fmt: skip


def _estimate(how: Rules, outcome: Outcome, down: float) -> float:
    count, every = sum(outcome.count.values()), how.snapshot_steps or how.every_steps
    if not count or not every:
        return 1.0 / (1.0 + how.stall_s / (every * how.step_s)) if every else 1.0
    mtbf = outcome.wall_s / count
    return interval.effective(every * how.step_s, stall_s=how.stall_s, restart_s=down / count, mtbf_s=mtbf)


def _causes(outcome: Outcome) -> Section:
    total = sum(outcome.lost.values()) or 1.0
    order = sorted(outcome.count, key=lambda name: -outcome.lost[name])
    rows = tuple(
        (
            name,
            outcome.count[name],
            seconds(outcome.lost[name]),
            f"{100 * outcome.lost[name] / total:.1f} %",
            outcome.reasons[name],
        )
        for name in order
    )
    restores = ", ".join(f"{count} from {source}" for source, count in sorted(outcome.restores.items()))
    table = Table(
        key="by_cause",
        title="What each cause cost, and what the policy did at its first occurrence",
        columns=("cause", "count", "lost", "share", "decision"),
        rows=rows,
        formulas={"lost": "repeated steps + detection + waiting + restart + load"},
        source="recovery.policy.decide",
    )
    notes = (
        (f"restored: {restores}",) if restores else (f"no failure in {seconds(outcome.wall_s)}: try more --days, or a --rate",)
    )
    return Section(title="Causes", tables=(table,), notes=notes)


def _comparison(setup: Setup, how: Rules, happened: Sequence[Failure], done: Outcome) -> Section:
    """The same failures under other intervals, and without the memory tier."""
    k, every = how.snapshot_steps or how.every_steps or 1, how.every_steps or 1
    variants = [
        (f"memory every {plural(n, 'step')}", replace(how, snapshot_steps=n))
        for n in sorted({max(1, k // 4), k, 4 * k, 16 * k})
    ]
    variants += [
        (f"storage only, every {plural(n, 'step')}", replace(how, snapshot_steps=0, every_steps=n))
        for n in sorted({max(1, every // 4), every, 4 * every})
    ]
    rows: list[tuple[Value, ...]] = []
    for name, rule in variants:
        outcome = done if rule == how else play(setup, rule, happened, days=done.wall_s / DAY)
        shares = (f"{100 * outcome.buckets[bucket] / outcome.wall_s:.2f} %" for bucket in ("saving", "repeated"))
        rows.append((name, f"{100 * outcome.effective:.2f} %", *shares))
    table = Table(
        key="variants",
        title="The same failures again",
        columns=("saving", "effective", "saving costs", "repeating costs"),
        rows=tuple(rows),
        source="ftrain.plan.simulate",
    )
    return Section(title="Comparison", tables=(table,))


_NO_COMPARISON = Section(title="Comparison", notes=("the same failures under other intervals: ask for one phase (--phase N)",))


def other_policies(how: Rules) -> dict[str, tuple[Rules, Mapping[str, str]]]:
    """Name -> how the run works and what is done about each class at a first occurrence."""
    actions, some = default_actions(), max(1, ceil(how.nodes / 100))

    def instead(new: str, *old: str) -> dict[str, str]:
        return {name: new if action in old else action for name, action in actions.items()}

    return {
        "as the config says": (how, actions),
        "no spare machine": (replace(how, spares=0), actions),
        f"one spare machine in a hundred ({some})": (replace(how, spares=some), actions),
        "never another machine": (how, instead("restart", "restart_exclude_node")),
        "another machine at every restart": (how, instead("restart_exclude_node", "restart")),
        "a person decides every time": (how, dict.fromkeys(actions, "stop_for_human")),
    }


def _policies(setup: Setup, how: Rules, happened: Sequence[Failure], done: Outcome) -> Section:
    """The same failures under other policies."""
    rows: list[tuple[Value, ...]] = []
    for name, (rule, actions) in other_policies(how).items():
        outcome = play(setup, rule, happened, days=done.wall_s / DAY, actions=actions)
        shares = (f"{100 * outcome.buckets[bucket] / outcome.wall_s:.2f} %" for bucket in ("waiting", "slowed", "repeated"))
        rows.append((name, f"{100 * outcome.effective:.2f} %", *shares))
    table = Table(
        key="policies",
        title="The same failures again, answered in another way",
        columns=("policy", "effective", "waiting", "slowed", "repeated"),
        rows=tuple(rows),
        source="recovery.policy.decide",
    )
    note = (
        "a machine that failed fails no more often than others here, so that never taking another one looks better than it is"
    )
    return Section(title="Policies", tables=(table,), notes=(note,))


def _assumptions(how: Rules) -> Section:
    rows = tuple((f.name, f"{getattr(how, f.name):g}") for f in fields(how))
    table = Table(key="assumptions", title="Change them with --assume NAME=VALUE", columns=("name", "value"), rows=rows)
    return Section(title="Assumptions", tables=(table,))
