"""Types of options beyond click's own."""

from __future__ import annotations

import math
from typing import Any

import click

from ftrain.schemes import SUPPORTED, why_not


class Finite(click.FloatRange):
    """A float in a range; `nan`, which is in every range to click, and `inf` are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or click's own usage error."""
        number = super().convert(value, param, ctx)
        if isinstance(number, float) and not math.isfinite(number):
            self.fail(f"{value} is no number to count with", param, ctx)
        return number


class Place(click.types.StringParamType):
    """A folder, file or URL; an empty one is what is left of a shell variable that is not set, and never "here".

    A URL of a scheme that no run can be at is refused before anything is asked: its client would be, for minutes.
    """

    def __init__(self, *, any_scheme: bool = False) -> None:
        """`any_scheme`: whatever can be read will do."""
        self._any_scheme = any_scheme

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text itself, or click's own usage error."""
        text = str(super().convert(value, param, ctx))
        if not text.strip():
            self.fail(f"it is empty: give a folder, file or URL ({text!r} was given)", param, ctx)
        if (why := why_not(text)) and not self._any_scheme:
            self.fail(f"{text}: {why}; give {SUPPORTED}", param, ctx)
        return text


class NamedPath(click.Path):
    """A path on this machine; an empty one is refused as `Place` does it, where click would take it for the present folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or click's own usage error."""
        return super().convert(PLACE.convert(value, param, ctx), param, ctx)


PLACE = Place()

SOURCE = Place(any_scheme=True)
"""What is only read, once: fsspec knows many places."""

POSITIVE = Finite(0)
"""Zero or more; zero often means that nothing was given."""

COUNT = click.IntRange(0)
