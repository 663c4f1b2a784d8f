"""`ftrain submit`: hand a run to a scheduler."""

from __future__ import annotations

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode


@click.command()
@click.argument("config_path", metavar="CONFIG", type=click.Path(dir_okay=False))
@click.option("--slurm", is_flag=True, required=True, help="As a Slurm job; what to ask for is in [slurm] of the config.")
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the config (TOML syntax).")
@click.option("--dry-run", is_flag=True, help="Print the batch file; submit nothing.")
def submit(config_path: str, slurm: bool, overrides: tuple[str, ...], dry_run: bool) -> None:
    """Write the batch file of the run that CONFIG describes, and submit it.

    The job holds all nodes. A lost node does not end it; when its time is up it saves, goes back into the queue, and goes on.

    \b
    Examples:
      ftrain submit configs/dense-500b.toml --slurm --dry-run
      ftrain submit run.toml --slurm --set slurm.partition=train --set slurm.time=2-00:00:00
    """
    from ftrain.compose.launch import with_absolute_url
    from ftrain.compose.nodes import shared_dir
    from ftrain.compose.paths import local_dir
    from ftrain.compose.slurm import batch_text
    from ftrain.load import load
    from recovery.slurm import SlurmError
    from recovery.slurm import submit as hand_in

    with told():
        config = with_absolute_url(load(config_path, overrides))
        text = batch_text(config, config_path, overrides)
        if dry_run:
            render.data(text.rstrip("\n"))
            return
        folder = shared_dir(config, local_dir(config))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "job.sbatch"
        path.write_text(text)
        try:
            job = hand_in(path)
        except SlurmError as error:
            render.fail(str(error), ExitCode.USAGE)
    render.data(f"job {job} ({path})")
