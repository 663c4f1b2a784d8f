"""Pictures for the report's page, as SVG that takes its colours from the page's style sheet: light, dark and on paper.

A chart is drawn here, not in the browser, so that it is there without scripts, in print and in a mail. Long curves are thinned
by keeping the lowest and the highest point of each column: a spike of one step stays a spike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import floor, isfinite, log10

WIDTH, HEIGHT = 720.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 98.0, 12.0, 12.0, 38.0
POINTS = 700
"""Points of a curve that are drawn: about one a pixel."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line, or with `dots` single points. `css` names its style."""

    name: str
    points: Sequence[Point]
    css: str = "line"
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at x, with what it stands for."""

    x: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves over one x axis."""

    key: str
    title: str
    x_label: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = field(default=())


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels, linearly."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def thin(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most about `limit` points: of each column the lowest and the highest, in the order in which they came."""
    if len(points) <= limit:
        return list(points)
    width, kept = len(points) / (limit // 2), list[Point]()
    for column in range(limit // 2):
        part = range(int(column * width), max(int(column * width) + 1, int((column + 1) * width)))
        low = min(part, key=lambda index: points[index][1])
        high = max(part, key=lambda index: points[index][1])
        kept += [points[index] for index in sorted({low, high})]
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) within [low, high], about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= raw * 0.999)
    first = -floor(-low / step + 1e-9)
    return [round(index * step, 12) for index in range(first, floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A tick's label: `1.2M`, `0.05`."""
    from ftrain.units import format_count

    return format_count(value) if abs(value) >= 1000 else f"{value:.4g}"


def svg(plot: Plot) -> str:
    """The chart; with a note in its place if there is nothing to draw."""
    curves = [Curve(name=c.name, points=_finite(c.points), css=c.css, dots=c.dots) for c in plot.curves]
    everything = [point for curve in curves for point in curve.points]
    if not everything:
        return f'<p class="none">{escape(plot.title)}: nothing recorded</p>'
    across, up = _scales(everything)
    parts = [*_grid(across, up, plot.x_label)]
    parts += [_mark(mark, across) for mark in plot.marks if across.low <= mark.x <= across.high]
    for curve in curves:
        parts += _dots(curve, across, up) if curve.dots else [_line(curve, across, up)]
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>')
    box = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" data-left="{LEFT:g}" data-right="{RIGHT:g}"'
    ends = f'data-low="{across.low!r}" data-high="{across.high!r}" data-plot="{escape(plot.key)}"'
    return f'<svg class="plot" role="img" aria-label="{escape(plot.title)}" {box} {ends}>{"".join(parts)}</svg>'


def _finite(points: Sequence[Point]) -> list[Point]:
    return thin([point for point in points if isfinite(point[0]) and isfinite(point[1])])


def _scales(points: Sequence[Point]) -> tuple[_Scale, _Scale]:
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    low, high = min(ys), max(ys)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    left, right = min(xs), max(xs)
    return (
        _Scale(left, right if right > left else left + 1, LEFT, WIDTH - RIGHT),
        _Scale(low - room, high + room, HEIGHT - BOTTOM, TOP),
    )


def _grid(across: _Scale, up: _Scale, x_label: str) -> Iterator[str]:
    for value in ticks(up.low, up.high):
        y = up(value)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
    for value in ticks(across.low, across.high, 6):
        x = across(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 14:g}" text-anchor="middle">{number(value)}</text>'
    yield f'<text x="{WIDTH - RIGHT:g}" y="{HEIGHT - 4:g}" text-anchor="end">{escape(x_label)}</text>'


def _mark(mark: Mark, across: _Scale) -> str:
    x = across(mark.x)
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"'
    return f'<line class="mark" {ends}><title>{escape(mark.name)}</title></line>'


def _line(curve: Curve, across: _Scale, up: _Scale) -> str:
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in curve.points)
    return f'<polyline class="{curve.css}" points="{path}"><title>{escape(curve.name)}</title></polyline>'


def _dots(curve: Curve, across: _Scale, up: _Scale) -> list[str]:
    return [
        f'<circle class="{curve.css}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3">'
        f"<title>{escape(curve.name)} {y:.5g} at {number(x)}</title></circle>"
        for x, y in curve.points
    ]


def data(plot: Plot) -> dict[str, list[list[float]]]:
    """The drawn points of a plot's lines, for the read-out under the pointer."""
    return {curve.name: [[x, y] for x, y in _finite(curve.points)] for curve in plot.curves if curve.points}
