"""`ftrain compare`: two runs side by side, what differs in their configs, and what to do next, each with its evidence.

A switch is accepted in this order: first the results (off and on must learn the same), then what it costs and gains, one
switch at a time. So the losses come first; a difference of times counts only where it is larger than their noise, and is a gain
only if further runs of both show it (`ftrain.view.gain`); and where several things differ at once, no gain is credited to any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ftrain.config import Config
from ftrain.load import Change
from ftrain.units import plural
from ftrain.view.gain import Pair, Suggestion
from ftrain.view.learning import Learning, learning
from ftrain.view.measured import Measured, measured
from ftrain.view.numbers import change, show
from ftrain.view.past import Turn, telling, turns
from ftrain.view.predict import Predicted, predict
from ftrain.view.record import Recorded
from ftrain.view.suggest import UNTIMED, suggestions
from recovery.report_text import missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of both runs; `how`: its formula, and whether it was measured or predicted."""

    key: str
    label: str
    unit: str
    a: float | int | str | None
    b: float | int | str | None
    how: str

    @property
    def change(self) -> float | None:
        """b over a, minus 1."""
        return change(self.a, self.b)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {"label": self.label, "unit": self.unit, "a": self.a, "b": self.b, "change": self.change, "how": self.how}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run and what follows from its record."""

    run: Recorded
    config: Config | None
    """Of the attempt whose steps were measured: a later start may have failed with another."""
    turns: tuple[Turn, ...]
    measured: Measured
    predicted: Predicted | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole answer."""

    a: Side
    b: Side
    rows: tuple[Row, ...]
    learning: Learning
    config: tuple[Change, ...]
    suggestions: tuple[Suggestion, ...]
    again: tuple[tuple[Side, Side], ...] = ()
    """More runs with A's settings and with B's."""

    def runs(self) -> Iterator[tuple[str, Recorded]]:
        """All that were given, as they are called: A, B, A2, B2, ..."""
        for number, pair in enumerate([(self.a, self.b), *self.again], 1):
            yield from ((f"{name}{number if number > 1 else ''}", of.run) for name, of in zip("AB", pair, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "a": self.a.run.url,
            "b": self.b.run.url,
            "again": [[of.run.url for of in pair] for pair in self.again],
            "missing": {name: msgspec.to_builtins(run.report.missing) for name, run in self.runs() if run.report.missing},
            "command": {"a": self.a.run.command, "b": self.b.run.command},
            "rows": {row.key: row.as_dict() for row in self.rows},
            "learning": msgspec.to_builtins(self.learning),
            "config": [msgspec.to_builtins(item) for item in self.config],
            "turns": {"a": msgspec.to_builtins(self.a.turns), "b": msgspec.to_builtins(self.b.turns)},
            "suggestions": [msgspec.to_builtins(item) for item in self.suggestions],
        }


def side(run: Recorded) -> Side:
    """A run with its measurements and the planner's predictions."""
    found, config = measured(run), run.trained
    try:
        predicted = predict(config, sequences=found.sequences) if config else None
    except ValueError:  # the planner refuses what ran: `ftrain plan` says why, and what was measured is compared all the same
        predicted = None
    return Side(run=run, config=config, turns=turns(run), measured=found, predicted=predicted)


def compare(
    a: Recorded,
    b: Recorded,
    *,
    identities: tuple[str, str] = ("", ""),
    again: Sequence[tuple[Recorded, Recorded]] = (),
) -> Comparison:
    """Lay two runs side by side. `identities`: of their corpora, as the checkpoints have them; empty where there is none.
    `again`: more runs of each, for the speed alone. Raises ValueError if one of them has other settings than A or B.
    """
    one, two = side(a), side(b)
    more = tuple((_repeated(one, "A", first), _repeated(two, "B", second)) for first, second in again)
    known = one.config is not None and two.config is not None
    differ = telling(one.config, two.config) if one.config and two.config else ()
    learnt = learning(a, b, corpora=_corpora(differ, identities))
    pairs = [_pair(*sides) for sides in ((one, two), *more)]
    return Comparison(
        a=one,
        b=two,
        again=more,
        rows=tuple(_rows(one, two)),
        learning=learnt,
        config=differ,
        suggestions=_untimed(one, two)
        or tuple(
            suggestions(pairs, (one.predicted, two.predicted), learnt, differ, beside=_beside(one, two) if known else None)
        ),
    )


def _untimed(a: Side, b: Side) -> tuple[Suggestion, ...]:
    """What is to do before anything follows: a script that tells no step cannot be timed."""
    silent = " and ".join(name for name, of in (("A", a), ("B", b)) if _silent(of))
    text = f"no step of {silent} is told: `ftrain.progress(step)` in the script tells it"
    return (Suggestion(about="speed", text=text),) if silent else ()


def _repeated(first: Side, name: str, run: Recorded) -> Side:
    """A further run of the same settings; ValueError if it is not."""
    found = side(run)
    differ = telling(first.config, found.config) if first.config and found.config else ()
    paths = [item.path for item in differ if not item.path.startswith(UNTIMED)]
    paths += ["command"] * (first.run.command != run.command) + ["layout"] * (_newest(first) != _newest(found))
    if paths:
        raise ValueError(f"{run.url} is no second run of {name} ({first.run.url}): {', '.join(paths)} differs")
    return found


def _pair(a: Side, b: Side) -> Pair:
    begun = [of.run.steps[0].record.t_begin for of in (a, b) if of.run.steps]
    return Pair(a.measured, b.measured, begun[0] < begun[1] if len(begun) == 2 else None)


def _beside(a: Side, b: Side) -> str:
    """What may have made one of them slower although their settings are the same; empty: there is nothing of that on record."""
    ran = [_newest(of) for of in (a, b)]
    if ran[0] != ran[1]:
        return f"they ran in other layouts ({ran[0] or 'none'} and {ran[1] or 'none'})"
    name, slower = ("A", a) if (a.measured.tokens_per_s or 0.0) < (b.measured.tokens_per_s or 0.0) else ("B", b)
    stops = len(slower.run.report.interruptions)  # those of the faster one have not made it faster
    return f"{name} was interrupted ({plural(stops, 'interruption')}), or because the machine was unequal" if stops else ""


CORPORA = ("data.sources", "data.tokenizer", "data.heldout_fraction")
"""Fields that say which tokens there are to learn from."""


def _corpora(differ: Iterable[Change], identities: tuple[str, str]) -> str:
    """What says that the runs learn from different tokens. One path may hold two texts; an identity is of the content."""
    fields = [item.path for item in differ if item.path.startswith(CORPORA)]
    a, b = identities
    if a and b and a != b:
        return f"identities {a} and {b}" + (f"; {', '.join(fields)}" if fields else "; the paths are the same")
    if a and a == b:  # other paths, the same tokens
        fields = [path for path in fields if not path.startswith("data.sources")]
    return ", ".join(fields)


def _rows(a: Side, b: Side) -> list[Row]:
    return [*_layout(a, b), *_speed(a, b), *_waiting(a, b), *_memory(a, b), *_traffic(a, b), *_history(a, b)]


def _newest(of: Side) -> str:
    """The layout of the newest attempt that did a step."""
    return of.run.newest.layout if of.run.newest else ""


def _layout(a: Side, b: Side) -> list[Row]:
    return [
        Row(key="layout", label="layout", unit="", a=_newest(a), b=_newest(b), how="of the newest attempt that did a step"),
        Row(key="steps", label="steps in the final history", unit="count", a=_steps(a), b=_steps(b), how="ledger"),
        Row(key="tokens_per_update", label="tokens of an update", unit="tokens", a=a.measured.tokens_per_update,
            b=b.measured.tokens_per_update, how="median over the final history: more per update is not sooner"),
    ]  # fmt: skip


def _steps(of: Side) -> int | None:
    """None of a script that tells no step: how many it did is not known."""
    return None if _silent(of) else len(of.run.steps)


def _silent(of: Side) -> bool:
    return bool(of.run.command) and not of.run.steps


def _speed(a: Side, b: Side) -> list[Row]:
    def value(of: Side) -> float | None:
        return of.measured.step.value if of.measured.step else None

    def each(of: Side) -> float | None:
        return of.measured.tokens_per_s / of.measured.ranks if of.measured.tokens_per_s else None

    steps = "measured: median of t_end - t_begin - blocked - evaluation, the first step of an attempt left out"
    predicted = [of.predicted.step.total if of.predicted and of.predicted.step else None for of in (a, b)]
    return [
        Row(key="step_s", label="step", unit="s", a=value(a), b=value(b), how=steps),
        Row(key="tokens_per_s", label="tokens per second: the same material sooner", unit="tokens/s",
            a=a.measured.tokens_per_s, b=b.measured.tokens_per_s, how="measured: tokens of an update / step"),
        Row(key="tokens_per_s_rank", label="of that, one rank", unit="tokens/s", a=each(a), b=each(b), how="tokens/s / ranks"),
        Row(key="step_predicted_s", label="step, predicted", unit="s", a=predicted[0], b=predicted[1],
            how="ftrain plan time; - where the hardware's peak is unknown"),
    ]  # fmt: skip


def _waiting(a: Side, b: Side) -> list[Row]:
    def blocked(of: Side) -> float | None:
        total, count = sum(done.record.blocked_s for done in of.run.steps), len(of.run.steps)
        return total / count if total or (count and not of.run.command) else None  # of a script 0 is: not told

    bubbles = [of.predicted.bubble if of.predicted else None for of in (a, b)]
    return [
        Row(key="wait", label="waiting for other ranks, of a step", unit="%", a=a.measured.wait, b=b.measured.wait,
            how="measured: bubble + imbalance buckets / step, mean over the ranks"),
        Row(key="bubble_predicted", label="waiting for other stages, predicted", unit="%", a=bubbles[0], b=bubbles[1],
            how="ftrain plan schedule: idle of the total, with the work of the config's own stages"),
        Row(key="exposed", label="communication that nothing hides, of a step", unit="%", a=a.measured.exposed,
            b=b.measured.exposed, how="measured: tp + cp + pp + dp buckets / step, mean over the ranks"),
        Row(key="blocked_s", label="waiting for checkpoints, each step", unit="s", a=blocked(a), b=blocked(b),
            how="measured: mean of blocked_s over the final history"),
    ]  # fmt: skip


def _memory(a: Side, b: Side) -> list[Row]:
    peaks = [of.predicted.peak_memory if of.predicted else None for of in (a, b)]
    return [
        Row(key="memory", label="memory of the fullest rank", unit="B", a=a.measured.peak_memory, b=b.measured.peak_memory,
            how="measured: peak of a rank over the run; on a CPU what its process took for itself since its engine was built"),
        Row(key="memory_predicted", label="memory of the fullest rank, predicted", unit="B", a=peaks[0], b=peaks[1],
            how="ftrain plan memory, tensors alone: state + activations + buffers"),
    ]  # fmt: skip


def _traffic(a: Side, b: Side) -> list[Row]:
    sent = [{volume.name: float(volume.nbytes) for volume in of.predicted.volumes} if of.predicted else {} for of in (a, b)]
    names = dict.fromkeys([*sent[0], *sent[1]])
    axes = dict.fromkeys([*a.measured.sent, *b.measured.sent])
    counted = [
        Row(key=f"sent_{axis}", label=f"sent by a rank in a step along {axis}", unit="B", a=_sent(a.measured.sent, axis),
            b=_sent(b.measured.sent, axis), how="counted as rings: the busiest rank, median of the steps")
        for axis in axes
    ]  # fmt: skip
    predicted = [
        Row(key=f"traffic_{name.lower().replace(' ', '')}", label=f"sent by a rank in an update, {name}, predicted", unit="B",
            a=_sent(sent[0], name), b=_sent(sent[1], name), how="ftrain plan traffic: the busiest rank, counted as rings")
        for name in names
    ]  # fmt: skip
    return [*counted, *predicted]


def _sent(sent: Mapping[str, float], along: str) -> float | None:
    """Nothing along an axis that the run does not have; None if nothing is known of it."""
    return sent.get(along, 0.0) if sent else None


def _history(a: Side, b: Side) -> list[Row]:
    def of(name: str) -> list[float | None]:  # of a script that tells no step neither is known
        return [getattr(each.run.report, name) if not _silent(each) else None for each in (a, b)]

    stops = [len(each.run.report.interruptions) for each in (a, b)]
    effective, lost = of("effective_time"), of("steps_lost")
    return [
        Row(key="effective_time", label="effective time", unit="%", a=effective[0], b=effective[1], how=a.run.report.formula),
        Row(key="interruptions", label="interruptions", unit="count", a=stops[0], b=stops[1], how="ledger"),
        Row(key="steps_lost", label="steps lost and done again", unit="count", a=lost[0], b=lost[1], how="ledger"),
    ]


def lines(found: Comparison) -> list[str]:
    """The comparison as text; rows that neither run has a value for are left out."""
    gaps = [f"{name}: {line.strip()}" for name, run in found.runs() for line in missing(run.report)]
    told = [*(f"{name:2} {run.url}" for name, run in found.runs()), *gaps, "", *_table(found), "", *_learnt(found.learning), ""]
    told += [*_config(found)]
    told += [line for name, of in (("A", found.a), ("B", found.b)) for line in _turned(name, of.turns)]
    told += ["", "what to do next"]
    for item in found.suggestions:
        told += [f"  {item.text}", *(f"      {line}" for line in item.evidence)]
    return told


def _config(found: Comparison) -> Iterator[str]:
    """What differs, or whose config is not known. Of a script its command is."""
    sides = {"A": found.a, "B": found.b}
    unknown = [name for name, of in sides.items() if of.config is None]
    scripts = [name for name in unknown if sides[name].run.command]
    if unknown:
        what = {0: "", 1: ", a supervised script", 2: ", supervised scripts"}[len(scripts)] if scripts == unknown else ""
        yield f"config: not known of {' and '.join(unknown)}{what}"
        yield from (f"  {name} is {sides[name].run.command}" for name in scripts)
        return
    yield "config" if found.config else "config: no difference"
    yield from (f"  {_changed(item)}" for item in found.config)


def _changed(item: Change) -> str:
    return f"{item.path}: {item.old!r} -> {item.new!r}"


def _turned(name: str, made: Iterable[Turn]) -> list[str]:
    """That a run's steps were not all done under the config that is compared."""
    rows = [f"    from step {turn.step} on  {', '.join(map(_changed, turn.changes))}" for turn in made]
    return [f"  {name}'s steps were done under several configs; compared is the newest of them", *rows] if rows else []


def _table(found: Comparison) -> list[str]:
    rows = [row for row in found.rows if row.a is not None or row.b is not None]
    cells = [
        ("", "A", "B", "change"),
        *((row.label, show(row.a, row.unit), show(row.b, row.unit), _change(row)) for row in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _change(row: Row) -> str:
    return "" if row.change is None else f"{100 * row.change:+.1f} %"


def _learnt(learnt: Learning) -> list[str]:
    kind = "" if learnt.first_difference is None else ": rounding" if learnt.is_rounding else ": more than rounding"
    told = [f"loss: {learnt.verdict}{kind}"]
    told += [f"  {learnt.origins.text}"] if learnt.origins.same and learnt.origins.text else []
    if learnt.untold:
        return told
    if learnt.last_common_step:
        told.append(f"  at step {learnt.last_common_step}: {show(learnt.a_at_step, '')} and {show(learnt.b_at_step, '')}")
    if learnt.common_tokens:
        material = "of different texts" if learnt.corpora else "the same material, whatever an update holds"
        if not learnt.origins.same:
            material = "of each run's own steps: not the same material, for the states before them differ"
        told.append(
            f"  after {show(learnt.common_tokens, 'tokens')} tokens: {show(learnt.a_at_tokens, '')} and "
            f"{show(learnt.b_at_tokens, '')} ({material})"
        )
    return told
