"""A run on the clock: one picture of all its attempts, what interrupted them, and what was saved; and where the time went.

Everything lies on four lanes over one axis, so that a run of three hundred attempts takes no more room than one of three.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from ftrain.units import format_bytes, format_share
from ftrain.view.plot import LEFT, RIGHT, WIDTH, ticks
from ftrain.view.record import Recorded
from recovery.durations import format_duration

LANE, GAP = 26.0, 8.0
LANES = ("attempts", "steps", "interruptions", "checkpoints")
AXIS = len(LANES) * (LANE + GAP) + 6
HOLE = 3.0
"""Finished steps less than so many pixels apart are drawn as one block."""


def timeline(run: Recorded) -> str:
    """The picture of a run's whole life."""
    wall = max(run.report.wall_s, 1e-9)
    draw = _Lanes(run.report.started_t, wall)
    parts = [*_names(), *_attempts(run, draw), *_steps(run, draw), *_marks(run, draw), *_axis(draw, wall)]
    box = f'viewBox="0 0 {WIDTH:g} {AXIS + 24:g}"'
    return f'<svg class="clock" id="timeline" role="img" aria-label="timeline of attempts" {box}>{"".join(parts)}</svg>'


class _Lanes:
    """Boxes and lines at unix times."""

    def __init__(self, start: float, wall: float) -> None:
        self._start, self._scale = start, (WIDTH - LEFT - RIGHT) / wall

    def x(self, t: float) -> float:
        """The pixel of a moment."""
        return LEFT + max(0.0, t - self._start) * self._scale

    def box(self, lane: int, begin: float, end: float, *, css: str, name: str) -> str:
        """A span of time on a lane."""
        left, right = self.x(begin), self.x(end)
        place = f'x="{left:.1f}" y="{lane * (LANE + GAP):g}" width="{max(0.5, right - left):.1f}" height="{LANE:g}"'
        return f'<rect class="{css}" {place}><title>{escape(name)}</title></rect>'

    def tick(self, lane: int, t: float, *, css: str, name: str) -> str:
        """A moment on a lane."""
        top = lane * (LANE + GAP)
        ends = f'x1="{self.x(t):.1f}" x2="{self.x(t):.1f}" y1="{top:g}" y2="{top + LANE:g}"'
        return f'<line class="{css}" {ends}><title>{escape(name)}</title></line>'


def _names() -> Iterator[str]:
    for lane, name in enumerate(LANES):
        top = lane * (LANE + GAP)
        yield f'<text x="{LEFT - 6:g}" y="{top + 17:g}" text-anchor="end">{name}</text>'
        yield f'<rect class="ground" x="{LEFT:g}" y="{top:g}" width="{WIDTH - LEFT - RIGHT:g}" height="{LANE:g}"/>'


def _attempts(run: Recorded, draw: _Lanes) -> Iterator[str]:
    for span in run.attempts:
        ready = span.end if span.ready is None else span.ready
        name = f"attempt {span.attempt}"
        yield draw.box(0, span.start, ready, css="restart", name=f"{name}: starting, {format_duration(ready - span.start)}")
        yield draw.box(0, ready, span.end, css="attempt", name=f"{name}: {format_duration(span.end - ready)}")
        if draw.x(span.end) - draw.x(span.start) > 24:
            yield f'<text x="{draw.x(span.start) + 5:.1f}" y="17">{span.attempt}</text>'


def _steps(run: Recorded, draw: _Lanes) -> Iterator[str]:
    for done, css, what in ((run.steps, "productive", "in the final history"), (run.undone, "discarded", "undone")):
        spans = [(each.record.t_begin, each.record.t_end, each.record.step) for each in done]
        for begin, end, first, last in _blocks(spans, draw):
            yield draw.box(1, begin, end, css=css, name=f"steps {first} to {last}, {what}")


def _blocks(spans: Iterable[tuple[float, float, int]], draw: _Lanes) -> Iterator[tuple[float, float, int, int]]:
    """Runs of steps without a visible hole between them."""
    block: tuple[float, float, int, int] | None = None
    for begin, end, step in sorted(spans):
        if block and draw.x(begin) - draw.x(block[1]) < HOLE:
            block = (block[0], max(end, block[1]), block[2], step)
            continue
        if block:
            yield block
        block = (begin, end, step, step)
    if block:
        yield block


def _marks(run: Recorded, draw: _Lanes) -> Iterator[str]:
    for row in run.report.interruptions:
        css = "planned" if row.planned else "mark"
        yield draw.tick(2, row.t, css=css, name=f"{row.class_} in attempt {row.attempt}: {row.reason}")
    for saved in run.checkpoints:
        yield draw.tick(3, saved.t, css="saved", name=f"step {saved.step} in storage ({format_bytes(saved.nbytes)})")


def _axis(draw: _Lanes, wall: float) -> Iterator[str]:
    unit, name = next(
        (unit, name) for unit, name in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")) if wall >= 2 * unit or unit == 1
    )
    for value in ticks(0.0, wall / unit, 6):
        x = LEFT + value * unit * (WIDTH - LEFT - RIGHT) / wall
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{AXIS:g}"/>'
        yield f'<text x="{x:.1f}" y="{AXIS + 14:g}" text-anchor="middle">{value:g} {name}</text>'


def buckets(run: Recorded) -> str:
    """One bar of all seconds, and the same as a table: each second in exactly one bucket."""
    wall, x, bars, rows = run.report.wall_s or 1.0, 0.0, list[str](), list[str]()
    for name, seconds in run.report.buckets.items():
        width = seconds / wall * WIDTH
        share = format_share(seconds, wall)
        if seconds:
            title = f"<title>{escape(name)}: {format_duration(seconds)}, {share}</title>"
            bars.append(f'<rect class="{name}" x="{x:.2f}" y="0" width="{width:.2f}" height="30">{title}</rect>')
            swatch = f'<svg class="swatch" viewBox="0 0 10 10"><rect class="{name}" width="10" height="10"/></svg>'
            rows.append(f"<tr><td>{swatch} {escape(name)}</td><td>{format_duration(seconds)}</td><td>{share}</td></tr>")
        x += width
    total = f'<tr class="total"><td>total</td><td>{format_duration(run.report.wall_s)}</td><td>100.0 %</td></tr>'
    bar = f'<svg class="bar" role="img" aria-label="where the time went" viewBox="0 0 {WIDTH:g} 30" preserveAspectRatio="none">'
    return f'{bar}{"".join(bars)}</svg><div class="wide"><table id="buckets">{"".join(rows)}{total}</table></div>'
