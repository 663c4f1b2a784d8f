"""`ftrain submit`: hand a run to a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode


@click.command()
@click.argument("what", metavar="CONFIG | -- ftrain supervise ...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--slurm", is_flag=True, required=True, help="As a Slurm job; what to ask for is in [slurm] of the config.")
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the config (TOML syntax).")
@click.option("--dry-run", is_flag=True, help="Print the batch file; submit nothing.")
def submit(what: tuple[str, ...], slurm: bool, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Write the batch file of the run that CONFIG describes, or of a supervised script, and submit it.

    The job holds all nodes. A lost node does not end it; when its time is up it saves, goes back into the queue, and goes on.
    A script has no config: what to ask for is said by --set slurm.NAME=VALUE.

    \b
    Examples:
      ftrain submit ftrain.toml --slurm --set machine.ranks_per_node=1 --dry-run
      ftrain submit ftrain.toml --slurm --set machine.ranks_per_node=8 --set slurm.partition=train
      ftrain submit --slurm --set slurm.time=60 -- ftrain supervise --nnodes 2 --nproc 8 -- python train.py
    """
    words = list(what[1:] if what[0] == "ftrain" else what)
    with told():
        folder, text = of_command(words[1:], overrides) if words[:1] == ["supervise"] else of_config(what, overrides)
        if dry_run:
            render.data(text.rstrip("\n"))
            return
        path, job = hand_in(folder, text)
    render.data(f"job {job} ({path})")


def of_config(what: Sequence[str], overrides: Sequence[str]) -> tuple[Path, str]:
    """The run's shared folder, and the batch file."""
    from ftrain.compose.launch import with_absolute_url
    from ftrain.compose.nodes import shared_dir
    from ftrain.compose.paths import local_dir
    from ftrain.compose.slurm import batch_text
    from ftrain.load import load

    if len(what) != 1:
        raise click.UsageError(f"one CONFIG, or `-- ftrain supervise ...`, not {' '.join(what)!r}")
    config = with_absolute_url(load(what[0], overrides))
    return shared_dir(config, local_dir(config)), batch_text(config, what[0], overrides)


def of_command(words: Sequence[str], overrides: Sequence[str]) -> tuple[Path, str]:
    """The same for the words of `ftrain supervise`."""
    from ftrain.cli.supervise import launch_of, supervise
    from ftrain.compose.paths import local_dir_of
    from ftrain.compose.slurm import command_text, slurm_section
    from ftrain.compose.supervise import check

    given = supervise.make_context("ftrain supervise", list(words)).params
    launch = launch_of(given, "")
    check(launch)
    options = [word for word in words[: len(words) - len(launch.argv)] if word != "--"]
    return local_dir_of(launch.url), command_text(launch, slurm_section(overrides), options)


def hand_in(folder: Path, text: str) -> tuple[Path, str]:
    """Write the batch file into the folder and submit it; leaves with Slurm's words if it is refused."""
    from recovery.slurm import SlurmError
    from recovery.slurm import submit as hand_over

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.sbatch"
    path.write_text(text)
    try:
        return path, hand_over(path)
    except SlurmError as error:
        render.fail(str(error), ExitCode.USAGE)
