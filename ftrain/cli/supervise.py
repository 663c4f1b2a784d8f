"""`ftrain supervise`: the supervisor around anybody's training script.

ftrain supervise --nproc 4 -- python train.py
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from recovery.codes import ExitCode


@click.command(context_settings={"allow_interspersed_args": False})  # the rest belongs to the command
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--run", "url", default="", metavar="DIR", help="The run's folder (default: runs/ and the script's name).")
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Start so many processes, with the environment that torchrun would give them."
)
@click.option(
    "--progress-pattern",
    "patterns",
    multiple=True,
    metavar="REGEX",
    help="Lines that name a finished step: 'step (?P<step>\\d+).*loss (?P<loss>[\\d.]+)'.",
)
@click.option(
    "--hang-s", type=float, help="Longest time between two reports of progress (default 600; without reports: output)."
)
@click.option("--start-s", type=float, help="Longest time to the first report of progress (default: no limit).")
@click.option("--stop-s", type=float, default=60.0, show_default=True, help="Time to stop when asked to, before SIGKILL.")
@click.option("--max-restarts", type=int, default=3, show_default=True, help="Restarts without a new highest step.")
@click.option("--master-addr", default="127.0.0.1", show_default=True, help="MASTER_ADDR of the processes.")
@click.option("--master-port", type=int, default=0, help="MASTER_PORT (default: another free one at each start).")
@click.option("--webhook", default="", metavar="URL", help="Called with the packet when the run stops for a person.")
@click.option("--take-over", is_flag=True, help="Take the run from an owner on another host that is gone for good.")
def supervise(command: tuple[str, ...], url: str, nproc: int | None, hang_s: float | None, **given: Any) -> None:
    """Run COMMAND, watch it, find out what ended it, and start it again if that can help.

    The command is started as it stands; what it saves and loads is its own affair. If it calls
    `ftrain.progress(step)`, or a --progress-pattern finds its steps, hangs are noticed and the report counts steps.
    `ftrain status|stop|report DIR` work on the run's folder. SIGTERM and Ctrl-C ask the command to stop.

    \b
    Examples:
      ftrain supervise -- python train.py --lr 1e-3
      ftrain supervise --nproc 4 --run runs/mine -- python train.py
    """
    from ftrain.compose.command import CommandLaunch
    from ftrain.compose.supervise import prepare, run_url

    patterns = tuple(given.pop("patterns"))
    run = run_url(url, command)
    launch = CommandLaunch(
        url=run,
        argv=command,
        cwd=os.getcwd(),
        nproc=nproc or 0,
        patterns=patterns,
        hang_s=hang_s or 600.0,
        output_is_progress=hang_s is not None and not patterns,
        openblas_threads=os.environ.get("OPENBLAS_NUM_THREADS"),
        command=shlex.join(["ftrain", "supervise", *sys.argv[sys.argv.index("supervise") + 1 :]])
        if "supervise" in sys.argv
        else "",
        **given,
    )
    with told():
        folder = prepare(launch)
    sys.exit(run_supervised(folder, run))


def run_supervised(folder: Path, url: str) -> int:
    """Keep a coordinator alive until the command is done, and show what rank 0 writes meanwhile."""
    from ftrain.compose.supervise import coordinator_argv
    from recovery.launch import supervise as keep_alive

    view = Echo(folder)
    code = keep_alive(coordinator_argv(folder), log=folder / "logs" / "coordinator.log", on_tick=view.tick)
    view.tick()
    if code not in (ExitCode.DONE, ExitCode.STOPPED):
        render.note(f"ftrain: logs are in {folder / 'logs'}; `ftrain report {shlex.quote(url)}` explains each attempt")
    return code


class Echo:
    """What rank 0 writes on stdout, what the supervisor does on stderr."""

    def __init__(self, folder: Path) -> None:
        from ftrain.compose.ledgers import LedgerTail

        self._folder = folder
        self._ledger = LedgerTail(folder / "ledger")
        self._position = 0
        self._log: Path | None = None

    def tick(self) -> None:
        """Show what is new."""
        from ftrain.cli.live_view import sentence
        from recovery import events, paths

        self._copy()
        for event in self._ledger.new():
            if isinstance(event, events.AttemptStarted):
                self._log, self._position = paths.rank_log(self._folder, event.attempt, 0), 0
            line = sentence(event)
            if line and not isinstance(event, events.Ready):
                render.note(f"ftrain: {line}")
        self._copy()

    def _copy(self) -> None:
        if self._log is None or not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        if data:
            sys.stdout.write(data.decode(errors="replace"))
            sys.stdout.flush()
