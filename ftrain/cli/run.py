"""`ftrain run`: start a run, or go on with it.

ftrain run ftrain.toml
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from ftrain.cli.types import PLACE
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.compose.args import Launch
    from ftrain.config import Config
    from recovery.owner import Claim


@click.command()
@click.argument("config_path", metavar="CONFIG", type=click.Path(dir_okay=False))
@click.option("--set", "overrides", multiple=True, metavar="a.b=v", help="Override a value of the config (TOML syntax).")
@click.option("--dry-run", is_flag=True, help="Print the resolved config, its fingerprint and the layout; start nothing.")
@click.option(
    "--from", "origin", type=PLACE, metavar="URL@STEP", help="Begin a new run with the state of another run's checkpoint."
)
@click.option("--accept-change", is_flag=True, help="Go on although the config now trains something else.")
@click.option("--take-over", is_flag=True, help="Take the run from an owner on another host that is gone for good.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print as JSON.")
def run(
    config_path: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    origin: str | None,
    accept_change: bool,
    take_over: bool,
    as_json: bool,
) -> None:
    """Start the run that CONFIG describes, or go on with it if it exists.

    Ctrl-C finishes the step, saves, and leaves with code 75; the same command goes on.

    \b
    Examples:
      ftrain run ftrain.toml
      ftrain run ftrain.toml --set optimizer.lr=1e-3 --dry-run
    """
    from ftrain.load import load

    if as_json and not dry_run:
        raise click.UsageError("--json prints what --dry-run shows: give both, or see `ftrain report RUN --json`")
    with told(split_step(origin or "")[0]):
        config = load(config_path, overrides)
        if dry_run:
            from ftrain.compose.corpora import check_data

            check_data(config)
            show_plan(config, as_json=as_json)
            return
        from ftrain.compose.launch import checked

        launch, held = checked(
            config,
            accept_change=accept_change,
            origin=split_step(origin) if origin else None,
            take_over=take_over,
            command=again(config_path, overrides, accept_change=accept_change, origin=origin),
        )
    with held:
        with told():
            folder = written(launch, config, origin)
        if folder is not None:
            sys.exit(run_supervised(folder, held))


def written(launch: Launch, config: Config, origin: str | None) -> Path | None:
    """The last checks, and what the coordinator reads, in the run's local folder; None if there is nothing to do."""
    from ftrain.compose import checks, standing
    from ftrain.compose.launch import write

    if origin and not launch.origin_url:
        own = "this run has a checkpoint of its own and goes on from it"
        render.note(f"--from has no effect: {own}, not from {origin}")
    if (done := standing.finished_step(config)) is not None:
        render.note(nothing_to_do(done, config.run.steps))
        return None
    warnings = checks.before_start(config)  # first: of a start that is refused the run's folder knows nothing
    folder = write(launch, config)
    for warning in (*warnings, *standing.reminders(config)):
        render.note(warning)
    return folder


def nothing_to_do(done: int, steps: int) -> str:
    """What is said of a run that has done as many steps as are wanted, or more."""
    if done == steps:
        return f"the run is finished: step {done} of {steps} is in storage; more run.steps go on with it"
    return f"there is nothing to do: step {done} of {steps} is in storage already; more run.steps go on with it"


def show_plan(config: Config, *, as_json: bool) -> None:
    """What `--dry-run` prints."""
    from ftrain.load import fingerprint, layout_summary, to_toml

    if as_json:
        import msgspec

        render.json(
            {"fingerprint": fingerprint(config), "config": msgspec.to_builtins(config), "layout": layout_summary(config)}
        )
        return
    render.data(to_toml(config))
    render.data(f"# fingerprint {fingerprint(config)}")
    render.data("\n".join(f"# {line}" for line in layout_summary(config).splitlines()))


def run_supervised(folder: Path, held: Claim) -> int:
    """Keep a coordinator alive until the run ends, and show the run meanwhile. The run, `held`, becomes the coordinator's."""
    from ftrain.cli.live_view import LiveView
    from ftrain.compose.launch import coordinator_argv
    from ftrain.compose.slurm import nodes_of_job, requeue_if_asked
    from recovery.launch import log_size, supervise, why_left

    log = folder / "logs" / "coordinator.log"
    view, nodes, before = LiveView(folder), nodes_of_job(folder), log_size(log)

    def tick() -> None:
        view.tick()
        if nodes is not None:
            nodes.tick()

    try:
        fds, env = held.hand_over()
        tick_s = 0.2 if view.live else 1.0
        code = supervise(coordinator_argv(folder), log=log, env=env, fds=fds, on_tick=tick, tick_s=tick_s)
    finally:
        view.close()
        if nodes is not None:
            nodes.close()
    if code == ExitCode.STOPPED and (done := requeue_if_asked(folder)):
        render.note(done)
    refused = code == ExitCode.HELD
    if code in (ExitCode.HELD, ExitCode.STORAGE, ExitCode.DAMAGED) and (why := why_left(log, before, held=refused)):
        render.complain(why)
    if code not in (ExitCode.DONE, ExitCode.STOPPED, ExitCode.HELD):
        render.note(f"logs are in {folder / 'logs'}; `ftrain report` explains each attempt")
    return code


def again(config_path: str, overrides: Sequence[str], *, accept_change: bool, origin: str | None) -> str:
    """The command that goes on with this run, to be pasted into a shell."""
    words = ["ftrain", "run", config_path, *(word for value in overrides for word in ("--set", value))]
    words += ["--accept-change"] if accept_change else []
    return shlex.join([*words, *(("--from", origin) if origin else ())])


def split_step(text: str) -> tuple[str, int | None]:
    """`URL@STEP` or `URL` into its parts."""
    url, at, step = text.rpartition("@")
    if at and step.isdecimal() and len(step) < 1000:
        return url, int(step)
    return text, None
