"""A pipeline's step as bars, predicted or measured, in the colours of the page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from ftrain.parallel.timeline import Timeline
from ftrain.plan.chart import label
from ftrain.units import format_seconds
from ftrain.view.plot import LEFT, RIGHT, WIDTH

ROW = 24.0


def gantt(line: Timeline, *, title: str, key: str, unit_s: float = 0.0) -> str:
    """The step of all pipeline ranks; what stays grey is idle. `unit_s`: seconds of a unit of time; 0: relative ones."""
    ranks, scale = line.schedule.num_ranks, (WIDTH - LEFT - RIGHT) / float(line.length)
    idle = f"idle {100 * float(line.bubble_of_total()):.1f} % of the total"
    length = f", {format_seconds(float(line.length) * unit_s)}" if unit_s else ""
    height = 22 + ranks * ROW + 6
    parts = [f'<text x="{LEFT:g}" y="14">{escape(title)}: {idle}{length}</text>', *_ground(ranks), *_spans(line, scale)]
    box = f'viewBox="0 0 {WIDTH:g} {height:g}"'
    return f'<svg class="gantt" id="{escape(key)}" role="img" aria-label="{escape(title)}" {box}>{"".join(parts)}</svg>'


def _ground(ranks: int) -> Iterator[str]:
    for rank in range(ranks):
        top = 22 + rank * ROW
        yield f'<text x="{LEFT - 6:g}" y="{top + 15:g}" text-anchor="end">stage {rank}</text>'
        yield f'<rect class="ground" x="{LEFT:g}" y="{top:g}" width="{WIDTH - LEFT - RIGHT:g}" height="{ROW - 4:g}"/>'


def _spans(line: Timeline, scale: float) -> Iterator[str]:
    chunks, ranks = line.schedule.num_chunks, line.schedule.num_ranks
    for span in line.spans:
        name = label(span.action, num_ranks=ranks, num_chunks=chunks)
        left, width = LEFT + float(span.begin) * scale, float(span.end - span.begin) * scale
        place = f'x="{left:.1f}" y="{22 + span.rank * ROW:g}" width="{width:.1f}" height="{ROW - 4:g}"'
        yield f'<rect class="k{span.action.kind.value}" {place}><title>{name} on stage {span.rank}</title></rect>'
        if width > 9 * len(name):
            at = f'x="{left + width / 2:.1f}" y="{22 + span.rank * ROW + 14:g}"'
            yield f'<text {at} text-anchor="middle">{name}</text>'
