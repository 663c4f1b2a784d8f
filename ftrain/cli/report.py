"""`ftrain report`: what a run did with its time, what interrupted it, and what that cost.

ftrain report runs/demo
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftrain.cli import render
from ftrain.cli.hints import no_run
from ftrain.cli.output import PAGE, OutputFile, write
from ftrain.cli.problems import told
from ftrain.cli.types import PLACE
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.view.record import Recorded
    from recovery.events import Event


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@click.option("--attempt", type=int, help="Explain one attempt: what was seen, what it was taken for, what was decided.")
@click.option(
    "--html",
    type=OutputFile(PAGE),
    metavar="FILE",
    help="Write it as a self-contained page instead: curves, timeline, tables. Replaces only an earlier page.",
)
@click.option("--local-dir", default="", help="The run's run.local_dir, if it has one.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def report(run_url: str, attempt: int | None, html: Path | None, local_dir: str, as_json: bool) -> None:
    """Report on RUN (its URL or folder), live or finished.

    Every second since the first launch is in exactly one bucket; if the books do not add up, there is no report.

    \b
    Examples:
      ftrain report runs/demo
      ftrain report runs/demo --html report.html
      ftrain report runs/demo --attempt 0
    """
    if html and attempt is not None:
        raise click.UsageError("--html writes the page of all attempts, --attempt explains one in words: give one of them")
    from ftrain.compose.ledgers import read_ledger
    from ftrain.compose.paths import absolute_url, local_dir_of
    from recovery.report import ReportError
    from recovery.report_text import explain, fold

    with told():
        events = read_ledger(run_url, local_dir)
        if not events:
            render.fail(no_run(run_url), ExitCode.USAGE)
        folder = local_dir_of(absolute_url(run_url), local_dir)
        try:
            if attempt is not None:
                _require_attempt(run_url, events, attempt)
                told_lines = explain(events, attempt)
                render.json({"attempt": attempt, "story": told_lines}) if as_json else render.data("\n".join(fold(told_lines)))
                return
            _whole(run_url, events, folder, html=html, as_json=as_json)
        except ReportError as error:
            render.fail(f"{run_url}: {error}", ExitCode.DAMAGED)


def _require_attempt(run_url: str, events: Sequence[Event], attempt: int) -> None:
    """Leaves with a sentence if the run had no such attempt."""
    last = max((event.attempt for event in events), default=-1)
    if not 0 <= attempt <= last:
        there = "none" if last < 0 else "0" if last == 0 else f"0 to {last}"
        render.fail(f"{run_url}: there is no attempt {attempt}; attempts: {there}", ExitCode.USAGE)


def _whole(run_url: str, events: Sequence[Event], folder: Path, *, html: Path | None, as_json: bool) -> None:
    """The report of all attempts, with what the planner had said of them."""
    from ftrain.compose.packets import waiting
    from ftrain.view import grade, pace, script, went
    from ftrain.view.parts import parts
    from ftrain.view.record import metrics_of, recorded
    from recovery.report_text import fold, lines

    run = recorded(run_url, events, metrics_of(folder / "metrics.jsonl"))
    command, packet = script.script(run), waiting(events, folder)
    graded, paced, times = grade.grades(run), pace.pace(run), [went.went(part.run) for part in parts(run)]
    newest = graded[-1] if graded else grade.Grade(note="there was no attempt")
    grade.keep(newest, folder)
    if html:
        _write(html, run)
        if not as_json:
            return
    if as_json:
        layouts = [{"heading": of.heading, "grade": of, "step_time": time} for of, time in zip(graded, times, strict=True)]
        time, extra = times[-1] if times else None, {"script": command} if command else {}
        told = {"packet": packet, "grade": newest, "pace": paced, "step_time": time, "layouts": layouts, **extra}
        render.json({**run.report.to_json(), **told})
        return
    told_lines = (
        script.lines(command, run) if command else [*lines(run.report), *(["", *sizes] if (sizes := pace.lines(paced)) else [])]
    )
    said = list[str]()  # why a row has no error, once for all layouts
    for of, time in zip(graded, times, strict=True) if not command else ():
        told_lines += ["", *went.lines(time), "", *grade.lines(of, said)]
        said += grade.reasons_after(said, of)
    render.data("\n".join(fold([*told_lines, *(["", *packet.lines()] if packet else [])])))


def _write(path: Path, run: Recorded) -> None:
    from ftrain.view.html import page

    write(path, PAGE, page(run))
    render.note(f"wrote {path}: open it in a browser")
