"""`ftrain join`: this machine takes part in a run on several machines."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ftrain.cli import render
from ftrain.cli.types import POSITIVE, NamedPath
from recovery.codes import ExitCode
from recovery.durations import format_duration


@click.command()
@click.argument("folder", metavar="FOLDER", type=NamedPath(file_okay=False, path_type=Path))
@click.option("--node", default="", help="Name of this node; default: Slurm's name for it, else the host's.")
@click.option(
    "--wait", "wait_s", type=POSITIVE, default=600.0, metavar="SECONDS", help="How long to wait for the run to be started."
)
def join(folder: Path, node: str, wait_s: float) -> None:
    """Offer this machine to the run whose FOLDER (machine.shared_dir, else its local folder) all nodes see.

    Under Slurm `ftrain run` starts this on every node. Elsewhere start it on each, in any order, and once more when a machine
    comes back: it waits to be admitted. Ends when the run does.

    \b
    Example:
      ftrain join /shared/runs/dense/local
    """
    import logging

    from ftrain.compose.node import LeftError, NoRunError, serve
    from ftrain.compose.nodes import this_node
    from recovery.network import NoInterfaceError

    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what the node does, as it does it
    name = node or this_node()
    absent = "" if folder.exists() else " (no such folder yet)"
    render.note(f"node {name}: waiting for the run of {folder}{absent}, {format_duration(wait_s)} at most; Ctrl-C leaves")
    if why := doubt(folder):
        render.note(f"node {name}: {why}")
    try:
        code = serve(folder.absolute(), name, patience_s=wait_s)
    except NoRunError:
        render.fail(f"node {name}: {no_run(folder, wait_s)}", ExitCode.USAGE)
    except NoInterfaceError as error:
        render.fail(str(error), ExitCode.RETRY_ELSEWHERE)
    except LeftError:
        render.fail(f"node {name}: left before there was a run", ExitCode.STOPPED)
    render.note(f"node {name}: {ending(code)}")
    sys.exit(code)


def doubt(folder: Path) -> str:
    """Why a folder is hardly the one that a run of several machines shares; empty if nothing is against it."""
    from recovery.rendezvous import control_folder

    if control_folder(folder).is_dir():
        return ""
    if (folder / "local").is_dir():
        return f"{folder} is a run's own folder; its machines share {folder / 'local'}, unless machine.shared_dir is set"
    return "the run of this folder was started for one machine, and asks for no other" if _of_one(folder) else ""


def _of_one(folder: Path) -> bool:
    """Whether what was last started in a run's local folder is for this machine alone."""
    import msgspec

    from ftrain.compose.paths import CONFIGURED, SUPERVISED

    try:
        if (folder / SUPERVISED).is_file():
            return not msgspec.json.decode((folder / SUPERVISED).read_bytes())["nnodes"]
        return not msgspec.json.decode((folder / CONFIGURED).read_bytes())["config"]["machine"]["ranks_per_node"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return False


def no_run(folder: Path, wait_s: float) -> str:
    """That nobody has asked for nodes there, what FOLDER is, and which runs ask."""
    return (
        f"within {format_duration(wait_s)} no run has asked for machines in {folder}. FOLDER is the run's machine.shared_dir, "
        "or RUN/local if that is not set; a run asks for machines if it has machine.ranks_per_node (`ftrain run`) or --nnodes "
        "(`ftrain supervise`), once it is started"
    )


def ending(code: int) -> str:
    """How a node's part in a run ended, in words."""
    if code == ExitCode.DONE:
        return "done: the run has ended, or has let this node go"
    if code == ExitCode.HELD:
        return "another `ftrain join` of this node is at work already"
    return f"ended with code {code}; the same command offers this machine again"
