"""`ftrain plan` of a config with phases: each phase is planned as a run of its own, over the updates that it has.

The planner knows nothing of phases: it is asked once for each, with the config of that phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftrain.cli import render
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.cli.plan import Asked
    from ftrain.config import Config
    from ftrain.plan.figure import Answer

ADDED = ("predicted_days", "days_with_failures")
"""Figures of the phases that add up to one of the whole run, in days."""


def each_phase(asked: Asked, command: Callable[[Asked], None]) -> None:
    """Run a command of the planner for the phase that is asked for, or for all that the run comes to."""
    from ftrain.course import course
    from ftrain.load import load

    config = load(asked.config, asked.overrides)
    asked = replace(asked, loaded=config)
    if asked.phase is not None or not config.phases:
        command(asked)
        return
    legs = [leg for leg in course(config) if leg.steps]
    found: list[tuple[str, Answer]] = []
    for leg in legs:
        one = replace(asked, phase=leg.phase, answers=[], loaded=config)
        command(one)
        title = f"phase {leg.phase}: steps {leg.first_step + 1:,} to {leg.stop_step:,}, from {leg.first_token:,} tokens on"
        found += [(title, answer) for answer in one.answers or ()]
    _show(asked, found)


def of_phase(config: Config, phase: int | None) -> Config:
    """The config of a phase, with its updates as those of the run. Raises ValueError if there is no such phase."""
    from msgspec.structs import replace as changed

    from ftrain.course import course

    if phase is None and not config.phases:
        return config
    legs = course(config)
    number = phase or 0
    if number >= len(legs):
        raise ValueError(f"--phase {number}: the config has the phases 0 to {len(legs) - 1}")
    leg = legs[number]
    return changed(leg.config, run=changed(leg.config.run, steps=max(1, leg.steps)))


def _show(asked: Asked, found: list[tuple[str, Answer]]) -> None:
    totals = {name: total for name in ADDED if (total := _total(name, [answer for _, answer in found])) is not None}
    if asked.as_json:
        render.json({"phases": [{"phase": title, **answer.as_dict()} for title, answer in found], "whole": totals})
    else:
        _show_text(asked, found, totals)
    if any(answer.refusals for _, answer in found):
        raise SystemExit(int(ExitCode.CONFIG))


def _show_text(asked: Asked, found: list[tuple[str, Answer]], totals: dict[str, float]) -> None:
    from ftrain.cli.plan_text import show_text
    from ftrain.plan.figure import days

    for title, answer in found:
        render.data(f"== {title}")
        show_text(answer, explain=asked.explain)
        render.data("")
    for name, total in totals.items():
        render.data(f"all phases, {name.replace('_', ' ')}: {days(total)}")


def _total(name: str, answers: list[Answer]) -> float | None:
    """The sum of a figure over the phases; None if some phase has none."""
    values: list[Any] = [
        figure.value for answer in answers for section in answer.sections for figure in section.figures if figure.key == name
    ]
    return float(sum(values)) if values and len(values) == len(answers) else None
