"""`ftrain supervise`: the supervisor around anybody's training script.

ftrain supervise --nproc 4 -- python train.py
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftrain.cli import render
from ftrain.cli.problems import told
from ftrain.cli.types import COUNT, POSITIVE, Finite
from recovery.codes import ExitCode

if TYPE_CHECKING:
    from ftrain.compose.command_launch import CommandLaunch
    from recovery.events import Event
    from recovery.owner import Claim

AT_ONCE = 1 << 20


def _patterns(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The regular expressions, if they are some and name a step."""
    from ftrain.compose.patterns import PatternError, compiled

    try:
        compiled(given)
    except PatternError as error:
        raise click.UsageError(str(error), context) from error
    return given


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
    callback=_patterns,
    metavar="REGEX",
    help="Lines that name a finished step: 'step (?P<step>\\d+).*loss (?P<loss>[\\d.]+)'.",
)
@click.option(
    "--hang-s",
    type=Finite(0, min_open=True),
    help="Longest time between two reports of progress (default 600; without reports: output).",
)
@click.option(
    "--start-s", type=Finite(0, min_open=True), help="Longest time to the first report of progress (default: no limit)."
)
@click.option("--stop-s", type=POSITIVE, default=60.0, show_default=True, help="Time to stop when asked to, before SIGKILL.")
@click.option("--max-restarts", type=COUNT, default=3, show_default=True, help="Restarts without a new highest step.")
@click.option(
    "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines, each with --nproc processes."
)
@click.option(
    "--min-nodes", type=click.IntRange(min=1), help="Go on with so many machines if no more are there (default: all)."
)
@click.option("--nodes-s", type=POSITIVE, default=600.0, show_default=True, help="Longest wait for machines.")
@click.option(
    "--lease-s",
    type=Finite(0, min_open=True),
    default=60.0,
    show_default=True,
    help="A machine is lost after so long a silence.",
)
@click.option("--interface", default="", help="Network interface between machines, or several: the first that each has.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the supervisor for the other machines (default: any)."
)
@click.option(
    "--srun", multiple=True, metavar="OPTION", help="In a Slurm job: a further option of the srun that starts the nodes."
)
@click.option("--requeue", is_flag=True, help="In a Slurm job: go back into the queue when the scheduler ends the run.")
@click.option("--master-addr", default="", help="MASTER_ADDR on one machine (default: 127.0.0.1).")
@click.option(
    "--master-port", type=click.IntRange(0, 65535), default=0, help="MASTER_PORT (default: another free one at each start)."
)
@click.option("--webhook", default="", metavar="URL", help="Called with the packet when the run stops for a person.")
@click.option("--take-over", is_flag=True, help="Take the run from an owner on another host that is gone for good.")
def supervise(**given: Any) -> None:
    """Run COMMAND, watch it, find out what ended it, and start it again if that can help.

    The command is started as it stands; what it saves and loads is its own affair. If it calls
    `ftrain.progress(step)`, or a --progress-pattern finds its steps, hangs are noticed and the report counts steps.
    `ftrain status|stop|report DIR` work on the run's folder. SIGTERM and Ctrl-C ask the command to stop.

    With --nnodes the run's folder is one that all machines see. In a Slurm job this is started once, in the batch script,
    and starts the rest; elsewhere `ftrain join DIR/local` offers each machine, this one too.

    \b
    Examples:
      ftrain supervise -- python train.py --lr 1e-3
      ftrain supervise --nproc 4 --run runs/mine -- python train.py
      ftrain supervise --nnodes 2 --nproc 8 --run /shared/runs/mine -- python train.py
    """
    from ftrain.compose.supervise import made_by_another, prepare
    from recovery.logs import misread

    command = ["ftrain", "supervise", *sys.argv[sys.argv.index("supervise") + 1 :]] if "supervise" in sys.argv else []
    launch = launch_of(given, shlex.join(command))
    with told():
        other = made_by_another(launch)
        folder, held = prepare(launch)
    for said in filter(None, (other, misread(os.environ))):
        render.note(f"ftrain: {said}")
    sys.exit(run_supervised(folder, launch, held))


def launch_of(given: dict[str, Any], command: str) -> CommandLaunch:
    """What the options and the words after them mean; `command`: all of it, as it was typed."""
    from ftrain.compose.command_launch import CommandLaunch
    from ftrain.compose.supervise import run_url

    rest = {name: value for name, value in given.items() if name not in ("command", "url", "hang_s", "nnodes")}
    patterns, hang_s, nnodes = tuple(given["patterns"]), given["hang_s"], given["nnodes"]
    return CommandLaunch(
        **{
            **rest,
            "url": run_url(given["url"], given["command"]),
            "argv": given["command"],
            "cwd": os.getcwd(),
            "nproc": given["nproc"] or 0,
            "nnodes": nnodes if nnodes > 1 else 0,
            "min_nodes": given["min_nodes"] or 0,
            "patterns": patterns,
            "hang_s": hang_s or 600.0,
            "output_is_progress": hang_s is not None and not patterns,
            "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
            "command": command,
        }
    )


def run_supervised(folder: Path, launch: CommandLaunch, held: Claim) -> int:
    """Keep a coordinator alive until the command is done, and show what rank 0 writes meanwhile. The run, `held`, becomes the
    coordinator's."""
    from ftrain.compose.slurm import requeue_if_asked
    from ftrain.compose.supervise import coordinator_argv, nodes_of_job
    from recovery.launch import log_size, why_left
    from recovery.launch import supervise as keep_alive

    log = folder / "logs" / "coordinator.log"
    view, nodes, before = Echo(folder, launch), nodes_of_job(folder, launch), log_size(log)

    def tick() -> None:
        view.tick()
        if nodes is not None:
            nodes.tick()

    try:
        fds, env = held.hand_over()
        code = keep_alive(coordinator_argv(folder), log=log, env=env, fds=fds, on_tick=tick)
    finally:
        if nodes is not None:
            nodes.close()
    view.tick()
    if code == ExitCode.STOPPED and (done := requeue_if_asked(folder)):
        render.note(f"ftrain: {done}")
    if code == ExitCode.HELD and (why := why_left(log, before, held=True)):
        render.complain(f"ftrain: {why}")
    elif code not in (ExitCode.DONE, ExitCode.STOPPED):
        render.note(f"ftrain: logs are in {folder / 'logs'}; `ftrain report {shlex.quote(launch.url)}` explains each attempt")
    return code


class Echo:
    """What rank 0 writes on stdout, what the supervisor does on stderr."""

    def __init__(self, folder: Path, launch: CommandLaunch) -> None:
        from ftrain.cli.live_view import Briefly
        from ftrain.compose.ledgers import LedgerTail

        self._briefly = Briefly()
        self._folder, self._several_nodes, self._stop_s = folder, launch.nnodes > 0, launch.stop_s
        self._ledger = LedgerTail(folder / "ledger")
        self._position, self._stopping = 0, False
        self._log: Path | None = None

    def tick(self) -> None:
        """Show what is new."""
        from ftrain.compose.nodes import node_dir
        from ftrain.view.script import after_stop, attempt_line
        from recovery import events, paths

        self._copy()
        for event in self._ledger.new():
            if isinstance(event, events.AttemptStarted):
                folder = node_dir(self._folder, event.nodes[0]) if self._several_nodes else self._folder
                self._log, self._position = paths.rank_log(folder, event.attempt, 0), 0
                line = attempt_line(event)
            else:
                self._stopping = self._stopping or isinstance(event, events.StopRequested)
                self._say_killed(event)
                line = (self._stopping and after_stop(event)) or self._briefly.sentence(event)
            if line and not isinstance(event, events.Ready):
                render.note(f"ftrain: {line}")
        self._copy()

    def _say_killed(self, event: Event) -> None:
        """Before "run stopped", whose exit code promises a saved state, that some did not leave to save any."""
        from ftrain.compose.ledgers import LedgerTail
        from ftrain.view.script import killed_after_stop
        from recovery.events import RunEnded

        if isinstance(event, RunEnded) and self._stopping:
            said = killed_after_stop(LedgerTail(self._folder / "ledger", from_start=True).new(), self._stop_s)
            if said:
                render.note(f"ftrain: {said}")

    def _copy(self) -> None:
        """As it was written. Where nobody reads any more there is nothing to show, and the run goes on."""
        if self._log is None or not self._log.exists():
            return
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                while data := file.read(AT_ONCE):
                    self._position += len(data)
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
