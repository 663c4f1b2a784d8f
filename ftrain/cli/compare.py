"""`ftrain compare`: two runs side by side.

ftrain compare runs/plain runs/overlapped
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftrain.cli import render
from ftrain.cli.hints import no_run
from ftrain.cli.problems import told
from ftrain.cli.types import PLACE
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.view.record import Recorded


@click.command()
@click.argument("run_a", metavar="RUN_A", type=PLACE)
@click.argument("run_b", metavar="RUN_B", type=PLACE)
@click.option(
    "--again",
    nargs=2,
    multiple=True,
    type=PLACE,
    metavar="RUN_A2 RUN_B2",
    help="One more run with A's settings and one with B's: what differs between these is no gain.",
)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def compare(run_a: str, run_b: str, again: tuple[tuple[str, str], ...], as_json: bool) -> None:
    """Compare RUN_A with RUN_B: results, step, waiting, memory, traffic, config, and what to do next.

    Results come first: a switch that is faster and learns something else is no gain. Each suggestion names its evidence.
    More speed is a gain only if a second run of each shows it: a machine is not equally fast every minute.

    \b
    Examples:
      ftrain compare runs/plain runs/overlapped
      ftrain compare runs/plain runs/overlapped --again runs/plain2 runs/overlapped2
    """
    from ftrain.view.compare import compare as make
    from ftrain.view.compare import lines
    from ftrain.view.past import twice

    with told():
        a, b, more = _read(run_a), _read(run_b), [(_read(one), _read(two)) for one, two in again]
        try:
            found = make(a, b, identities=(_identity(run_a), _identity(run_b)), again=more)
        except ValueError as error:
            render.fail(str(error), ExitCode.USAGE)
        if more and (same := twice(found.runs())):
            render.fail(f"{same}: that is no second measurement. --again takes runs that were begun anew", ExitCode.USAGE)
    if as_json:
        render.json(found.as_dict())
    else:
        render.data("\n".join(lines(found)))


def _read(url: str) -> Recorded:
    """One of the two; leaves with a sentence that says which of them cannot be compared."""
    from ftrain.compose.ledgers import read_ledger
    from ftrain.view.record import read
    from recovery.report import ReportError

    if not read_ledger(url, ""):
        render.fail(no_run(url), ExitCode.USAGE)
    try:
        return read(url)
    except ReportError as error:
        render.fail(f"{url}: {error}", ExitCode.DAMAGED)


def _identity(url: str) -> str:
    """Of the corpora of a run, as its newest checkpoint recorded it; empty where there is none to ask."""
    from ftrain.compose.stores import opened_run
    from storage.errors import StorageError

    try:
        with opened_run(url) as run:
            return str(run.open().progress.get("data", ""))
    except StorageError:
        return ""
