"""`ftrain doctor`: is this machine fit for that run?

ftrain doctor configs/demo.toml
"""

from __future__ import annotations

import sys

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode


@click.command()
@click.argument("config_path", metavar="CONFIG", type=click.Path(dir_okay=False))
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the config (TOML syntax).")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(config_path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check this machine for the run that CONFIG describes: disk, memory, data, network, storage, clocks, devices, time limits.

    Each check runs in a process of its own that is killed if it does not answer. Leaves with 3 if the data do not fit the
    config, with 5 if storage is at fault, with 11 if the machine is.

    \b
    Example:
      ftrain doctor configs/demo.toml
    """
    from ftrain.compose.checks import DATA, results
    from ftrain.compose.launch import with_absolute_url
    from ftrain.load import load

    with told():
        found = results(with_absolute_url(load(config_path, overrides)), everything=True)
    if as_json:
        render.json(found)
    else:
        render.table(
            ("check", "answer", "seconds", "what was found"),
            [
                (it.name, it.status, f"{it.seconds:.2f}", it.text + (f"; {it.remedy}" if it.bad and it.remedy else ""))
                for it in found
            ],
        )
    if any(result.name == DATA and result.status == "failed" for result in found):
        sys.exit(ExitCode.CONFIG)
    bad = {result.name for result in found if result.bad}
    if bad:
        sys.exit(ExitCode.STORAGE if bad <= {"storage", "clock"} else ExitCode.RETRY_ELSEWHERE)
