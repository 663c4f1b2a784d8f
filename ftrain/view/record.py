"""A run as it was recorded: the ledger's events, sorted into what comparisons and pages ask for.

Two things are kept apart that a plot of a log mixes up: the final history (every step once, as it counts) and the steps that a
roll-back undid. Measurements of single steps beyond the ledger's (time of ranks, memory) are in metrics.jsonl, which stays on
the machine of the run: where it is not, the rest still is.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.phasing import Phasing
from ftrain.config import Config
from ftrain.course import Cursor
from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    ConfigChanged,
    Evaluated,
    Event,
    LayoutChosen,
    Ready,
    RunStarted,
    SnapshotCompleted,
    StepRecord,
    steps_of,
)
from recovery.report import AttemptRow, Report, report


@dataclass(frozen=True, slots=True)
class Done:
    """A finished step and the attempt that did it."""

    attempt: int
    record: StepRecord

    @property
    def seconds(self) -> float:
        """Of training: without waiting for a checkpoint, and without evaluation."""
        record = self.record
        return max(0.0, record.t_end - record.t_begin - record.blocked_s - record.evaluate_s)


@dataclass(frozen=True, slots=True)
class Span:
    """An attempt on the clock, unix seconds. `ready` is None if its ranks never were; `end` of a live one is the last event."""

    attempt: int
    start: float
    ready: float | None
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One run. Sequences are in the order in which things happened."""

    url: str
    report: Report
    command: str
    """Of a script under `ftrain supervise`, as typed; empty of a run of a config."""
    config: Config | None
    """The newest resolved config, if this version of ftrain can read it."""
    configs: Mapping[int, Config]
    """Attempt -> the config of its layout, as far as the ledger tells it."""
    origin: str
    """"URL@STEP" of the other run's checkpoint that the history began with, as far as the ledger tells it."""
    attempts: tuple[Span, ...]
    cursor: Cursor
    """Where it is in its data; without a config, as far as steps go."""
    steps: tuple[Done, ...]
    """The final history: ascending, each step once."""
    undone: tuple[Done, ...]
    """Steps that a roll-back undid."""
    evaluations: tuple[tuple[int, float], ...]
    """(step, held-out loss) of the final history."""
    checkpoints: tuple[CheckpointCommitted, ...]
    snapshots: int
    """Copies that the memory tier got of all ranks."""
    changes: tuple[ConfigChanged, ...]
    metrics: tuple[dict[str, Any], ...]
    """Lines of metrics.jsonl that belong to the final history; empty if that file is not on this machine."""

    @property
    def newest(self) -> AttemptRow | None:
        """The attempt that did the newest step: a later one may have failed before it did any. Without steps: the last one."""
        rows = self.report.attempts
        last = self.steps[-1].attempt if self.steps else None
        return next((row for row in rows if row.attempt == last), rows[-1] if rows else None)

    @property
    def trained(self) -> Config | None:
        """The config of that attempt, as far as the ledger tells it: the one that measurements are of."""
        return self.configs.get(self.newest.attempt, self.config) if self.newest else self.config

    def tokens_by_step(self) -> dict[int, int]:
        """Step -> tokens learnt from when it was finished. A run that began elsewhere counts from its own first step."""
        total, found = 0, {}
        for done in self.steps:
            total += done.record.tokens
            found[done.record.step] = total
        return found


def read(url: str, local_override: str = "") -> Recorded:
    """The run at `url`. Raises StorageError if nothing is there, ReportError if its books do not add up."""
    from ftrain.compose.ledgers import read_ledger
    from ftrain.compose.paths import absolute_url, local_dir_of

    events = read_ledger(url, local_override)
    folder = local_dir_of(absolute_url(url), local_override)
    return recorded(url, events, metrics_of(folder / "metrics.jsonl"))


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a torn one is the end of a live file. Empty if there is none."""
    found: list[dict[str, Any]] = []
    if not path.is_file():
        return found
    for line in path.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:
            break
    return found


def recorded(url: str, events: Sequence[Event], metrics: Iterable[dict[str, Any]] = ()) -> Recorded:
    """The same from events and lines that are at hand."""
    steps, undone = _histories(events)
    final = {(done.attempt, done.record.step) for done in steps}
    config = _config(events)
    return Recorded(
        url=url,
        report=report(events),
        command=shlex.join(command_of(events)),
        config=config,
        configs=_configs(events),
        origin=_origin(events),
        attempts=tuple(_spans(events)),
        cursor=_cursor(config, events),
        steps=steps,
        undone=undone,
        evaluations=_evaluations(events, last=steps[-1].record.step if steps else 0),
        checkpoints=tuple(event for event in events if isinstance(event, CheckpointCommitted)),
        snapshots=sum(isinstance(event, SnapshotCompleted) for event in events),
        changes=tuple(event for event in events if isinstance(event, ConfigChanged)),
        metrics=tuple(line for line in metrics if (line.get("attempt"), line.get("step")) in final),
    )


def _histories(events: Iterable[Event]) -> tuple[tuple[Done, ...], tuple[Done, ...]]:
    """The final history, and what was undone: a roll-back to step s undoes every step after s."""
    kept: dict[int, Done] = {}
    undone: list[Done] = []
    for event in events:
        if isinstance(event, Ready):
            undone += [kept.pop(step) for step in sorted(kept) if step > event.step]
        for record in steps_of(event):
            known = kept.get(record.step)
            if known is None or known.attempt != event.attempt:
                kept[record.step] = Done(event.attempt, record)
    return tuple(kept[step] for step in sorted(kept)), tuple(undone)


def _cursor(config: Config | None, events: Iterable[Event]) -> Cursor:
    followed = Phasing()
    if config is not None:
        for event in events:
            followed.see(config, event)
    return followed.cursor


def _spans(events: Sequence[Event]) -> Iterator[Span]:
    """When each attempt began, was ready and ended: at its end, at the next one's start, or where the ledger stops."""
    starts = [event for event in events if isinstance(event, AttemptStarted)]
    ready = {event.attempt: event.t for event in events if isinstance(event, Ready)}
    ended = {event.attempt: event.t for event in events if isinstance(event, AttemptEnded)}
    for here, following in zip_longest(starts, starts[1:]):
        last = following.t if following else events[-1].t
        yield Span(here.attempt, here.t, ready.get(here.attempt), min(ended.get(here.attempt, last), last))


def command_of(events: Iterable[Event]) -> list[str]:
    """The words of a supervised command; none of a run of a config."""
    started = next((event for event in events if isinstance(event, RunStarted)), None)
    return list((started.config or {}).get("command", ())) if started else []


def _config(events: Iterable[Event]) -> Config | None:
    newest = next((event.config for event in reversed(list(events)) if isinstance(event, RunStarted) and event.config), None)
    return _resolved(newest)


def _resolved(plain: Mapping[str, Any] | None) -> Config | None:
    """A config as the ledger keeps it; None if this version of ftrain cannot read it."""
    from ftrain.load import ConfigProblems, resolve

    try:
        return resolve({**plain, "certify": {}}) if plain else None
    except ConfigProblems:
        return None


def _configs(events: Iterable[Event]) -> Mapping[int, Config]:
    """Attempt -> its config: that of the launch, with what the choice of a layout changed.

    A layout's text says all of its sizes, so it names the config. A coordinator that takes over a live layout brings the config
    of the launch, not the layout's.
    """
    known: dict[str, Config | None] = {}
    found = {}
    for event in events:
        match event:
            case RunStarted() if not (event.readopted and event.layout in known):
                known[event.layout] = _resolved(event.config)
            case LayoutChosen():
                known[event.layout] = _changed(known.get(event.was), event.changes)
            case AttemptStarted() if (config := known.get(event.layout)) is not None:
                found[event.attempt] = config
    return found


def _origin(events: Iterable[Event]) -> str:
    """What the run had to begin with when it made its first attempt."""
    before = takewhile(lambda event: not isinstance(event, AttemptStarted), events)
    return next((event.origin for event in reversed([*before]) if isinstance(event, RunStarted)), "")


def _changed(config: Config | None, made: Iterable[Mapping[str, Any]]) -> Config | None:
    """The config after these changes of single fields."""
    if config is None:
        return None
    plain = msgspec.to_builtins(config)
    for change in made:
        section, _, name = str(change["path"]).partition(".")
        plain[section][name] = change["new"]
    return _resolved(plain)


def _evaluations(events: Iterable[Event], *, last: int) -> tuple[tuple[int, float], ...]:
    found = {event.step: event.loss for event in events if isinstance(event, Evaluated) and event.loss is not None}
    return tuple((step, found[step]) for step in sorted(found) if step <= last)
