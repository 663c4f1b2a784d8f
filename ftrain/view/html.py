"""`ftrain report --html`: a run as one self-contained page.

One file, because it is mailed, archived and opened in a train: no script, font, style or picture from elsewhere (the page's own
policy forbids it), charts drawn on this side, so that they are there on paper and without scripts, too. Where something was not
recorded the page says so instead of leaving a hole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TypeVar

from ftrain.units import format_bytes, format_count, format_seconds, plural
from ftrain.view import clock, gantt, plot
from ftrain.view import grade as grading
from ftrain.view.measured import measured
from ftrain.view.numbers import show
from ftrain.view.pace import left_text, pace
from ftrain.view.parts import Part, parts
from ftrain.view.pipelines import measured_line, predicted_line
from ftrain.view.record import Recorded
from ftrain.view.went import went
from recovery.durations import format_duration
from recovery.report_text import attempt_source, evidence_texts, missing
from recovery.verdict import EvidenceLine

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
HERE = Path(__file__).parent
T = TypeVar("T")


def page(run: Recorded) -> str:
    """The whole file."""
    cut, found = parts(run), grading.grades(run)
    plots = _plots(run)
    sections = [
        _head(run),
        _section(
            "Timeline", _wide(clock.timeline(run)) + _how("Attempts, finished steps, interruptions and checkpoints in storage.")
        ),
        _section("Learning", "".join(_chart(each) for each in plots)),
        _section("Where the time went", clock.buckets(run) + _how(run.report.formula)),
        _section("Where a step goes", _each(_step, cut) or _none("there was no attempt")),
        _section("Predicted beside measured", _each(_grade, found) or _none("there was no attempt")),
        _section("Pipeline", _pipeline(cut[-1].run if cut else run)),
        _section("Memory of the ranks", _each(_memory, found) or _none("there was no attempt")),
        _section("Interruptions", _interruptions(run)),
        _section("Checkpoints", _checkpoints(run)),
        _section("Pace", _pace(run)),
        _section("Attempts", _attempts(run)),
        _section("Config changes", _changes(run)),
    ]
    title = f"ftrain report: {run.report.run_id}"
    data = json.dumps({each.key: plot.data(each) for each in plots}).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_asset('page.css')}</style></head>\n<body>{''.join(sections)}"
        f"<footer>Made by ftrain from the run's ledger; times are UTC.</footer>"
        f'<script type="application/json" id="plots">{data}</script><script>{_asset("page.js")}</script></body></html>\n'
    )


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f'<section id="{title.lower().replace(" ", "-")}"><h2>{escape(title)}</h2>{body}</section>\n'


def _how(text: str) -> str:
    return f'<p class="how">{escape(text)}</p>'


def _wide(picture: str) -> str:
    """Something that scrolls by itself on a narrow screen."""
    return f'<div class="wide">{picture}</div>'


def _none(text: str) -> str:
    return f'<p class="none">{escape(text)}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, key: str) -> str:
    """A table of escaped text that scrolls by itself on a narrow screen."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table id="{key}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _head(run: Recorded) -> str:
    report = run.report
    state = report.outcome or report.phase
    reason = f": {report.outcome_reason}" if report.outcome_reason else ""
    unplanned = sum(not row.planned for row in report.interruptions)
    losses = {"loss": report.loss, "held-out loss": report.eval_loss}
    cards = {
        "step": f"{report.step:,}",
        "effective time": f"{100 * report.effective_time:.1f} %",
        "since the first launch": format_duration(report.wall_s),
        **{name: show(value, "") for name, value in losses.items() if value is not None},
        **({"tokens": format_count(report.tokens)} if report.tokens else {}),
        "interruptions": f"{len(report.interruptions)} ({unplanned} unplanned)",
        "steps done again": f"{report.steps_lost:,}",
        "checkpoints": f"{report.checkpoints.committed:,}",
    }
    boxes = "".join(f'<div class="card"><b>{escape(value)}</b><span>{name}</span></div>' for name, value in cards.items())
    lead = f"{state}{reason}; started {_moment(report.started_t)}"
    gaps = "".join(map(_none, missing(report)))
    return (
        f'<header><h1>{escape(report.run_id)}</h1><p class="lead">{escape(lead)}</p>{gaps}'
        f'<div class="cards">{boxes}</div></header>'
    )


def _moment(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _plots(run: Recorded) -> list[plot.Plot]:
    """Loss, speed and gradient norm over the tokens learnt from, interruptions marked where they struck."""
    tokens = run.tokens_by_step()
    at = [(float(tokens[done.record.step]), done) for done in run.steps]
    lost = [(float(tokens.get(done.record.step, 0)), done) for done in run.undone]
    marks = [plot.Mark(_tokens_at(run, row.t, tokens), f"{row.class_}: {row.reason}") for row in run.report.interruptions]
    heldout = [(float(tokens[step]), loss) for step, loss in run.evaluations if step in tokens]

    def curve(name: str, of: Iterable[tuple[float, object]], css: str = "line") -> plot.Curve:
        return plot.Curve(name=name, points=[(x, y) for x, y in of if isinstance(y, float)], css=css)

    loss = [
        curve("loss", ((x, done.record.loss) for x, done in at)),
        curve("loss of undone steps", sorted((x, done.record.loss) for x, done in lost if done.record.loss), "undone"),
        plot.Curve(name="held-out loss", points=heldout, css="heldout", dots=True),
    ]
    speed = [curve("tokens/s", ((x, done.record.tokens / done.seconds if done.seconds else None) for x, done in at))]
    norm = [curve("gradient norm", ((x, done.record.grad_norm) for x, done in at))]
    return [
        plot.Plot(key=key, title=title, x_label="tokens", curves=curves, marks=marks)
        for key, title, curves in (
            ("loss", "Loss", loss),
            ("speed", "Tokens per second", speed),
            ("norm", "Gradient norm", norm),
        )
    ]


def _tokens_at(run: Recorded, t: float, tokens: dict[int, int]) -> float:
    """Tokens in the final history when something struck."""
    before = [done.record.step for done in run.steps if done.record.t_end <= t]
    return float(tokens[before[-1]]) if before else 0.0


def _chart(each: plot.Plot) -> str:
    return f'<h3>{escape(each.title)}</h3>{_wide(plot.svg(each))}<output data-plot="{escape(each.key)}"></output>'


def _grade(found: grading.Grade, mark: str) -> str:
    if found.note:
        return _heading(found.heading) + _none(found.note)
    rows = [("run" if stage is None else f"stage {stage}", *rest) for stage, *rest in grading.cells(found)]
    mfu = "" if found.mfu is None else _how(f"MFU {100 * found.mfu:.1f} % {found.mfu_of}")
    return (
        _heading(found.heading)
        + table(("", "what", *grading.HEAD[1:]), rows, key=f"grade{mark}")
        + "".join(map(_how, grading.notes(found)))
        + mfu
        + _how(f"Hardware profile {grading.profile_text(found)}. The error is measured over predicted, minus 1.")
    )


def _each(show: Callable[[T, str], str], of_layouts: Sequence[T]) -> str:
    """Layout by layout; what belongs to the newest has plain ids, what belongs to others ids with their number."""
    last = len(of_layouts) - 1
    return "".join(show(found, "" if number == last else f"-{number}") for number, found in enumerate(of_layouts))


def _heading(layout: str) -> str:
    """Which of the run's layouts follows."""
    return f"<h3>{escape(layout)}</h3>"


def _step(part: Part, mark: str) -> str:
    """The buckets of a step of one layout: they add up to it on every rank."""
    found = went(part.run)
    if found is None:
        return _heading(part.heading) + _none("not recorded, or metrics.jsonl is on another machine")
    rows = [
        (row.bucket, format_seconds(row.mean_s), f"{100 * row.share:.1f} %", format_seconds(row.worst_s), str(row.worst_rank))
        for row in found.buckets
    ]
    mfu = f"MFU {100 * found.speed.mfu:.1f} % of" if found.speed.mfu is not None else "MFU unknown:"
    rate = f"{show(found.speed.tokens_per_s, 'tokens/s')}; {found.speed.tflops:.3g} TFLOP/s a rank on {found.speed.device}"
    speed = f"{rate}, {found.speed.dtype}, attention halved. {mfu} {found.speed.peak}."
    head = ("", "mean over the ranks", "share", "the rank with most", "rank")
    how = f"{found.layout}: means over {plural(found.steps, 'step')} of {format_seconds(found.step_s)}."
    return _heading(part.heading) + table(head, rows, key=f"step-table{mark}") + _how(f"{how} {speed}")


def _pipeline(run: Recorded) -> str:
    if run.config is None or run.config.parallel.pp == 1:
        return _none("one stage: no pipeline")
    line, real = predicted_line(run.config), measured_line(run.config, measured(run))
    drawn = _none("too many actions to draw") if line is None else _wide(gantt.gantt(line, title="predicted", key="predicted"))
    if real is None:
        return drawn + _none("measured: not recorded, or metrics.jsonl is on another machine")
    title = "with the time that each kind of action took on each stage"
    return drawn + _wide(gantt.gantt(real, title=title, key="measured", unit_s=1.0))


def _memory(found: grading.Grade, mark: str) -> str:
    rows = [row for row in found.rows if row.key == "memory"]
    most = max((value for row in rows for value in (row.predicted, row.measured) if value), default=0.0)
    if not most:
        return _heading(found.heading) + _none("nothing recorded")
    bars, top = list[str](), 0
    for row in rows:
        for css, value in (("predicted", row.predicted), ("measured", row.measured)):
            if value:
                width = value / most * 460
                name = f"stage {row.stage}, {css}: {format_bytes(value)}"
                bars.append(
                    f'<rect class="{css}" x="150" y="{top}" width="{width:.1f}" height="14"><title>{name}</title></rect>'
                )
                bars.append(f'<text x="144" y="{top + 11}" text-anchor="end">stage {row.stage}, {css}</text>')
                bars.append(f'<text x="{156 + width:.1f}" y="{top + 11}">{format_bytes(value)}</text>')
                top += 18
        top += 6
    label = f'<svg id="memory{mark}" role="img" aria-label="memory of the ranks" viewBox="0 0 720 {top}">'
    kinds = "".join(_how(text) for text in dict.fromkeys(row.apart or f"{row.label}: {row.how}" for row in rows))
    return _heading(found.heading) + _wide(f"{label}{''.join(bars)}</svg>") + kinds


def _interruptions(run: Recorded) -> str:
    if not run.report.interruptions:
        return _none("no interruption")
    rows = [
        (
            _moment(row.t), str(row.attempt), row.class_ + (" (planned)" if row.planned else ""), row.component,
            "-" if row.first_failing_rank is None else str(row.first_failing_rank), row.reason, row.action or "-",
            str(row.steps_lost), "-" if row.down_s is None else format_duration(row.down_s),
        )
        for row in run.report.interruptions
    ]  # fmt: skip
    head = ("when", "attempt", "class", "component", "rank", "reason", "action", "steps lost", "down")
    causes = [
        (row.component, row.class_ + (" (planned)" if row.planned else ""), str(row.count), f"{100 * row.share:.1f} %")
        for row in run.report.causes
    ]
    shown = table(head, rows, key="interruption-table") + table(("component", "class", "count", "share"), causes, key="causes")
    return shown + "".join(_evidence(row.t, row.evidence, row.decision) for row in run.report.interruptions)


def _evidence(t: float, evidence: Iterable[EvidenceLine], decision: str) -> str:
    told = "\n".join(map(escape, evidence_texts(evidence)))
    return f"<details><summary>{_moment(t)}: evidence and decision</summary><pre>{told}\n{escape(decision)}</pre></details>"


def _checkpoints(run: Recorded) -> str:
    rows = run.report.checkpoints
    if not run.checkpoints:
        return _none("none in storage")
    newest = [
        (str(saved.step), _moment(saved.t), format_bytes(saved.nbytes), format_duration(saved.seconds))
        for saved in run.checkpoints[-20:]
    ]
    failed = "".join(_how(f"step {row['step']} failed: {row['reason']}") for row in rows.failed)
    passed = "".join(_how(f"step {row['step']} passed over: {row['reason']}") for row in rows.passed_over)
    summary = f"{rows.committed} committed, {format_bytes(rows.nbytes)} in all; the newest {len(newest)}:"
    return _how(summary) + table(("step", "when", "bytes", "took"), newest, key="checkpoint-table") + failed + passed


def _pace(run: Recorded) -> str:
    found = pace(run)
    rows = [
        (row.layout, str(row.ranks), str(row.steps), show(row.tokens_per_update, "tokens"), show(row.step_s, "s"),
         show(row.tokens_per_s, "tokens/s"), f"{100 * row.per_rank:.0f} %")
        for row in found.rows
    ]  # fmt: skip
    head = ("layout", "ranks", "steps", "tokens of an update", "step", "speed", "of a rank, to the first")
    left = "" if not found.steps_left else _how(left_text(found))
    hours = [(f"{hour:02d}:00 UTC", show(rate, "tokens/s")) for hour, rate in run.report.tokens_per_s_by_hour.items()]
    by_hour = table(("hour of the day", "speed"), hours, key="hours") if len(hours) > 1 else ""
    return (table(head, rows, key="pace-table") if rows else _none("no step to go by")) + left + by_hour


def _attempts(run: Recorded) -> str:
    rows = [
        (str(row.attempt), row.layout or "-", str(row.ranks), attempt_source(row),
         "never ready" if row.start_s is None else format_duration(row.start_s), str(row.steps), str(row.steps_lost),
         row.ended_by or "-")
        for row in run.report.attempts
    ]  # fmt: skip
    return table(("attempt", "layout", "ranks", "from", "start", "steps", "lost", "ended by"), rows, key="attempt-table")


def _changes(run: Recorded) -> str:
    rows = [
        (_moment(event.t), str(item.get("path")), str(item.get("old")), str(item.get("new")), str(item.get("kind")))
        for event in run.changes
        for item in event.changes
    ]
    return table(("when", "field", "before", "after", "kind"), rows, key="changes") if rows else _none("none")
