"""What lies behind a run's steps: the state that its first one began with, and the configs that they were done under.

A comparison that does not know this takes a corpus of another run for the same material, and a setting that never did a step
for the cause of a difference.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec import Struct

from ftrain.config import Config
from ftrain.load import Change, changes
from ftrain.view.record import Recorded

UNTOLD = ("run.url", "run.local_dir")
"""Fields that differ between any two runs and explain nothing."""


class Turn(Struct, frozen=True, kw_only=True):
    """From `step` on, in the final history, the run had other settings than before."""

    step: int
    changes: tuple[Change, ...]


class Origins(Struct, frozen=True, kw_only=True):
    """Whether two runs began alike, as far as their ledgers tell, and how they began; empty if both with initial values."""

    same: bool = True
    text: str = ""


def telling(before: Config, now: Config) -> tuple[Change, ...]:
    """What differs and may explain something."""
    return tuple(item for item in changes(before, now) if item.path not in UNTOLD)


def turns(run: Recorded) -> tuple[Turn, ...]:
    """Where the settings of its steps changed, ascending: by hand, by a resize, or on what was left of lost GPUs."""
    found = list[Turn]()
    before = run.configs.get(run.steps[0].attempt) if run.steps else None
    for done in run.steps:
        now = run.configs.get(done.attempt, before)
        if before is not None and now is not None and now is not before:
            made = telling(before, now)
            found += [Turn(step=done.record.step, changes=made)] * bool(made)
        before = now
    return tuple(found)


def origins(a: Recorded, b: Recorded) -> Origins:
    """How two runs began. Of an imported checkpoint a ledger tells the step, not whose it was."""
    one, two = _elsewhere(a), _elsewhere(b)
    if one is None and two is None:
        return Origins()
    if one == two and a.origin == b.origin:
        doubt = "" if a.origin else "; whether it is the same one is not recorded"
        return Origins(text=f"both began with {_state(one, a.origin)}{doubt}")
    how = (f"{name} began with {_state(step, run.origin)}" for name, step, run in (("A", one, a), ("B", two, b)))
    return Origins(same=False, text=", ".join(how))


def twice(runs: Iterable[tuple[str, Recorded]]) -> str:
    """Which of these are one and the same run, whatever paths lead to it; empty if none are. Of a copy that somebody went on
    with, the steps before that are the same ones, too.
    """
    known: dict[tuple[str, float], str] = {}
    for name, run in runs:
        report, called = run.report, f"{name} ({run.url})"
        same = known.setdefault((report.run_id, report.started_t), called)
        if same != called:
            begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.started_t))
            return f"{same} and {called} are one and the same run, {report.run_id}, begun {begun}, or copies of it"
    return ""


def _elsewhere(run: Recorded) -> int | None:
    """The step of the state that a run did not make itself and began with; None: there was none, or it is not told."""
    first = run.report.attempts[0] if run.report.attempts else None
    return first.restored_step if first and first.source != "init" else None


def _state(step: int | None, origin: str) -> str:
    if step is None:
        return "initial values"
    return f"the state of step {step} of {origin.rpartition('@')[0] or 'an imported checkpoint'}"
