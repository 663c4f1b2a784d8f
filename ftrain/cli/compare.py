"""`ftrain compare`: two runs side by side.

ftrain compare runs/plain runs/overlapped
"""

from __future__ import annotations

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode


@click.command()
@click.argument("run_a", metavar="RUN_A")
@click.argument("run_b", metavar="RUN_B")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(run_a: str, run_b: str, as_json: bool) -> None:
    """Compare RUN_A with RUN_B: results, step, waiting, memory, traffic, config, and what to do next.

    Results come first: a switch that is faster and learns something else is no gain. Each suggestion names its evidence.

    \b
    Example:
      ftrain compare runs/plain runs/overlapped
    """
    from ftrain.view.compare import compare as make
    from ftrain.view.compare import lines
    from ftrain.view.record import read
    from recovery.report import ReportError

    with told():
        try:
            found = make(read(run_a), read(run_b))
        except (ReportError, ValueError) as error:
            render.fail(f"{run_a}, {run_b}: {error}", ExitCode.USAGE)
    if as_json:
        render.json(found.as_dict())
    else:
        render.data("\n".join(lines(found)))
