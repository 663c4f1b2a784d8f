"""`ftrain report`: what a run did with its time, what interrupted it, and what that cost.

ftrain report runs/demo
"""

from __future__ import annotations

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode


@click.command()
@click.argument("run_url", metavar="RUN")
@click.option("--attempt", type=int, help="Explain one attempt: what was seen, what it was taken for, what was decided.")
@click.option("--local-dir", default="", help="The run's run.local_dir, if it has one.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def report(run_url: str, attempt: int | None, local_dir: str, as_json: bool) -> None:
    """Report on RUN (its URL or folder), live or finished.

    Every second since the first launch is in exactly one bucket; if the books do not add up, there is no report.

    \b
    Examples:
      ftrain report runs/demo
      ftrain report runs/demo --attempt 0
    """
    from ftrain.compose.ledgers import read_ledger
    from ftrain.compose.packets import waiting
    from ftrain.compose.paths import absolute_url, local_dir_of
    from recovery.report import ReportError
    from recovery.report import report as make
    from recovery.report_text import explain, lines

    with told():
        events = read_ledger(run_url, local_dir)
        if not events:
            render.fail(f"{run_url}: no ledger of a run is there; RUN is the run.url of a config", ExitCode.USAGE)
        try:
            if attempt is not None:
                told_lines = explain(events, attempt)
                render.json({"attempt": attempt, "story": told_lines}) if as_json else render.data("\n".join(told_lines))
                return
            made = make(events)
        except ReportError as error:
            render.fail(str(error), ExitCode.DAMAGED)
    packet = waiting(events, local_dir_of(absolute_url(run_url), local_dir))
    if as_json:
        render.json({**made.to_json(), "packet": packet})
    else:
        render.data("\n".join([*lines(made), *(["", *packet.lines()] if packet else [])]))
