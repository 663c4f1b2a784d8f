"""Numbers as they are shown, and the one statistic of step times: the median, with how sure it is.

Times of steps are skewed (a checkpoint's copy, a neighbour's noise), so nothing here assumes a normal distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, sqrt

from ftrain.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True)
class Median:
    """A median and its 95 % interval by order statistics (Conover 1999, 3.2): no shape of the distribution is assumed."""

    value: float
    low: float
    high: float
    count: int

    def differs_from(self, other: Median) -> bool:
        """Whether the intervals are apart: a difference within them is noise."""
        return self.high < other.low or other.high < self.low


def median(values: Sequence[float]) -> Median | None:
    """The median of at least one value; below six values the interval is their whole range."""
    if not values:
        return None
    ordered, count = sorted(values), len(values)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    cut = max(0, floor((count - 1.96 * sqrt(count)) / 2)) if count >= 6 else 0
    return Median(middle, ordered[cut], ordered[count - 1 - cut], count)


def show(value: float | int | str | None, unit: str) -> str:
    """A value as a person reads it; `-` where there is none."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    match unit:
        case "B":
            return format_bytes(round(value))
        case "s":
            return format_seconds(value)
        case "%":
            return f"{100 * value:.1f} %"
        case "tokens":
            return format_count(value)
        case "tokens/s":
            return f"{format_count(value)}/s"
        case "count":
            return f"{value:,.0f}"
    return f"{value:.5g}"


def change(a: float | int | str | None, b: float | int | str | None) -> float | None:
    """b over a, minus 1; None where that says nothing."""
    if a is None or b is None or isinstance(a, str) or isinstance(b, str) or not a:
        return None
    return b / a - 1
