"""The step of a pipeline as the planner draws it and as the ranks measured it."""

from __future__ import annotations

from ftrain.config import Config
from ftrain.parallel.timeline import Timeline
from ftrain.plan import schedule
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
