"""A simulated schedule as people look at it: text for a terminal, SVG for a page, Perfetto's JSON for a close look.

All three are views of the one `Timeline`; none of them knows how a schedule is built.
"""

from __future__ import annotations

import json
from fractions import Fraction
from math import gcd, lcm

from ftrain.parallel.schedule import Action
from ftrain.parallel.timeline import Span, Timeline
from ftrain.plan.svg import COLOURS, Picture

MAX_CELLS = 48
"""A text chart is drawn if it is at most this many cells wide."""


def label(action: Action, *, num_ranks: int, num_chunks: int) -> str:
    """`F1`: forward of the first micro-batch; with virtual stages a letter names the chunk (`F1b`)."""
    chunk = "abcdefghijklmnopqrstuvwxyz"[action.stage // num_ranks] if num_chunks > 1 else ""
    return f"{action.kind.value}{action.microbatch + 1}{chunk}"


def text(line: Timeline) -> str:
    """One row a rank, one column a unit of time (the largest that divides all times); empty if too wide for a terminal."""
    unit = _unit(line)
    cells = int(Fraction(line.length) / unit)
    if cells > MAX_CELLS:
        return ""
    schedule = line.schedule
    rows = [["."] * cells for _ in range(schedule.num_ranks)]
    for span in line.spans:
        for cell in range(int(Fraction(span.begin) / unit), int(Fraction(span.end) / unit)):
            rows[span.rank][cell] = _label(line, span)
    width = max(len(cell) for row in rows for cell in row)
    return "\n".join(f"s{rank} | " + " ".join(cell.ljust(width) for cell in row).rstrip() for rank, row in enumerate(rows))


def _label(line: Timeline, span: Span) -> str:
    return label(span.action, num_ranks=line.schedule.num_ranks, num_chunks=line.schedule.num_chunks)


def _unit(line: Timeline) -> Fraction:
    times = [Fraction(time) for span in line.spans for time in (span.begin, span.end) if time]
    bottom = lcm(*(time.denominator for time in times))
    return Fraction(gcd(*(int(time * bottom) for time in times)), bottom)


def svg(line: Timeline, *, title: str) -> str:
    """A bar chart of the step: idle time is what stays grey."""
    scale, left, row = 900 / float(line.length), 60, 26
    ranks = line.schedule.num_ranks
    picture = Picture(left + 920, 50 + ranks * row + 20, title=title)
    picture.text((10, 22), title, size=13)
    for rank in range(ranks):
        top = 36 + rank * row
        picture.text((10, top + 16), f"stage {rank}")
        picture.rect((left, top), (900, row - 4), fill=COLOURS["idle"], name=f"stage {rank} idle")
    for span in line.spans:
        at = (left + float(span.begin) * scale, 36 + span.rank * row)
        width = float(span.end - span.begin) * scale
        name = _label(line, span)
        picture.rect(at, (width, row - 4), fill=COLOURS[span.action.kind.value], name=name)
        if width > 8 * len(name):
            picture.text((at[0] + width / 2, at[1] + 15), name, size=10, anchor="middle")
    idle = f"idle {100 * float(line.bubble_of_total()):.1f} % of the time"
    picture.text((left, 50 + ranks * row + 8), idle)
    return picture.render()


def perfetto(line: Timeline, *, unit_us: float) -> str:
    """Trace events for ui.perfetto.dev: one track a pipeline rank; a unit of simulated time lasts `unit_us`."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(line.schedule.num_ranks)
    ]
    events += [
        {
            "ph": "X",
            "name": _label(line, span),
            "cat": span.action.kind.name.lower(),
            "pid": 0,
            "tid": span.rank,
            "ts": float(span.begin) * unit_us,
            "dur": float(span.end - span.begin) * unit_us,
            "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
        }
        for span in line.spans
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
