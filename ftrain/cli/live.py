"""`ftrain status|save|stop`: a live run, from another terminal."""

from __future__ import annotations

from typing import Any

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode

local_option = click.option("--local-dir", default="", help="The run's run.local_dir, if it has one.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


def ask(run_url: str, local_dir: str, kind: str, **args: Any) -> dict[str, Any]:
    """Ask the live coordinator of a run; leaves with a sentence if there is none."""
    from ftrain.compose.paths import absolute_url, local_dir_of
    from recovery.client import NotRunningError
    from recovery.client import ask as request

    folder = local_dir_of(absolute_url(run_url), local_dir)
    with told():
        try:
            return request(folder, kind, args)
        except (NotRunningError, ValueError) as error:
            render.fail(f"{run_url}: {error}", ExitCode.USAGE)


@click.command()
@click.argument("run_url", metavar="RUN")
@local_option
@json_option
def status(run_url: str, local_dir: str, as_json: bool) -> None:
    """Where a live RUN is: step, loss, attempt, last checkpoint, what each rank does.

    \b
    Example:
      ftrain status runs/demo
    """
    facts = ask(run_url, local_dir, "status")
    if as_json:
        render.json(facts)
        return
    for key, value in facts.items():
        render.data(f"{key:16} {value}")


@click.command()
@click.argument("run_url", metavar="RUN")
@local_option
@json_option
def save(run_url: str, local_dir: str, as_json: bool) -> None:
    """Write a checkpoint to storage at the next step boundary.

    \b
    Example:
      ftrain save runs/demo
    """
    facts = ask(run_url, local_dir, "save")
    render.json(facts) if as_json else render.note("a checkpoint will be written at the next step boundary")


@click.command()
@click.argument("run_url", metavar="RUN")
@local_option
@json_option
def stop(run_url: str, local_dir: str, as_json: bool) -> None:
    """Finish the step, save, and end the run; `ftrain run` goes on with it later.

    \b
    Example:
      ftrain stop runs/demo
    """
    facts = ask(run_url, local_dir, "stop")
    render.json(facts) if as_json else render.note("the run finishes its step, saves and ends")
