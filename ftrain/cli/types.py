"""Types of options beyond click's own."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A float in a range; `nan`, which is in every range to click, and `inf` are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or click's own usage error."""
        number = super().convert(value, param, ctx)
        if isinstance(number, float) and not math.isfinite(number):
            self.fail(f"{value} is no number to count with", param, ctx)
        return number


POSITIVE = Finite(0)
"""Zero or more; zero often means that nothing was given."""

COUNT = click.IntRange(0)
