"""The step of a pipeline as the planner draws it and as the ranks measured it."""

from __future__ import annotations

from ftrain.config import Config
from ftrain.parallel.schedule import Action, build
from ftrain.parallel.timeline import Timeline, simulate
from ftrain.plan import schedule
from ftrain.view.measured import Measured
from ftrain.view.predict import predict

MAX_DRAWN = 2_000
"""Actions of a step that a page still draws."""


def predicted_line(config: Config) -> Timeline | None:
    """The config's step with the work of its own stages, or None where it is too long to draw, or cannot be planned."""
    try:
        line = schedule.uneven(predict(config).setup)
    except ValueError:
        return None
    return line if line is not None and len(line.spans) <= MAX_DRAWN else None


def measured_line(config: Config, found: Measured) -> Timeline | None:
    """The same schedule with the mean time that each kind of action really took on each stage, in seconds; None if the run
    measured no actions.
    """
    if not found.actions:
        return None
    try:
        setup = predict(config).setup
    except ValueError:
        return None
    name, p, m, v = setup.options.schedule, setup.mesh.pp, setup.microbatches, setup.chunks
    if p * m * v * len(found.actions) > MAX_DRAWN:
        return None

    def took(action: Action) -> float:
        stages = found.actions.get(action.kind.value, ())
        return stages[action.stage] if action.stage < len(stages) else 0.0

    line = simulate(build(name, num_ranks=p, num_microbatches=m, num_chunks=v), took)
    return line if line.length else None
