"""From a command to its running coordinator, and that coordinator's process:
`python -P -m ftrain.compose.supervise LOCAL_DIR`. Imports no torch.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import sys
from pathlib import Path

import msgspec

from ftrain.compose.command import CommandDelegate, CommandLaunch
from ftrain.compose.errors import RefusedError
from ftrain.compose.exporter import Exporter
from ftrain.compose.packets import Packets
from ftrain.compose.paths import absolute_url, is_local, local_dir_of
from ftrain.compose.patterns import PatternError, compiled
from ftrain.compose.webhook import tell
from recovery.coordinator import Coordinator
from recovery.events import Event, ProcessDied, StopRequested
from recovery.files import replace_file
from recovery.launch import python
from recovery.ledger import Ledger, read_all
from recovery.owner import claim
from recovery.policy import Limits
from recovery.spec import CoordinatorSpec
from recovery.state import RunState, fold

RECORD = "supervise.json"
WEBHOOK_S = 10.0


def prepare(launch: CommandLaunch) -> Path:
    """Check what can be checked, write what the coordinator reads, and return the run's local folder.

    Raises RefusedError or HeldError, in words, before anything has been started.
    """
    if not launch.argv:
        raise RefusedError(["there is no command: ftrain supervise [options] -- python train.py ..."])
    if shutil.which(launch.argv[0], path=os.environ.get("PATH")) is None and not (Path(launch.cwd) / launch.argv[0]).exists():
        raise RefusedError([f"{launch.argv[0]!r} is no program: neither a file nor on the PATH"])
    try:
        compiled(launch.patterns)
    except PatternError as error:
        raise RefusedError([str(error)]) from error
    if not is_local(launch.url):
        raise RefusedError(
            [f"--run {launch.url}: the folder of a supervised run is on this machine; a script may save anywhere"]
        )
    folder = local_dir_of(launch.url)
    if (folder / "launch.json").exists():
        raise RefusedError([f"{launch.url} is the run of a config (`ftrain run`): give --run another folder"])
    claim(folder, take_over=launch.take_over).release()
    replace_file(folder / RECORD, msgspec.json.format(msgspec.json.encode(launch)))
    return folder


def coordinator_argv(folder: Path) -> list[str]:
    """The command that runs (or takes up again) the coordinator of the supervised run in `folder`."""
    return python("ftrain.compose.supervise", str(folder))


def compose(folder: Path, launch: CommandLaunch) -> Coordinator:
    """Everything a supervised run is made of."""
    delegate = CommandDelegate(launch, folder)
    silent_s = launch.hang_s if launch.output_is_progress else math.inf
    spec = CoordinatorSpec(
        local_dir=folder,
        lease_s=60.0,
        hang_s=launch.hang_s,
        hang_floor_s=launch.hang_s,  # what a script does between two reports is not known: no limit is learned from it
        start_s=launch.start_s if launch.start_s is not None else silent_s,
        stop_s=launch.stop_s,
        take_over=launch.take_over,
    )

    def open_ledger(epoch: int) -> tuple[Ledger, RunState]:
        return Ledger(folder / "ledger", None, epoch), fold(read_all(folder / "ledger"))

    def on_event(event: Event) -> None:
        packets.on_event(event)
        if isinstance(event, StopRequested):
            delegate.stop_requested()
        elif isinstance(event, ProcessDied):
            delegate.look_again()

    packets = Packets(folder, launch.command, lambda: coordinator.desk.journal.state)
    limits = Limits(max_restarts=launch.max_restarts)
    coordinator = Coordinator(delegate, spec, open_ledger, limits, on_event=on_event)
    return coordinator


def main(argv: list[str]) -> int:
    """Run the coordinator of the supervised run in `argv[0]`; returns the exit code of the whole run."""
    folder = Path(argv[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    launch = msgspec.json.decode((folder / RECORD).read_bytes(), type=CommandLaunch)
    exporter = Exporter(folder, port=0)
    try:
        coordinator = compose(folder, launch)
        ending = coordinator.run()
    finally:
        exporter.close()
    tell(launch.webhook, folder, coordinator.state, run_url=launch.url, limit_s=WEBHOOK_S)
    logging.info("%s: %s", ending.outcome, ending.reason)
    return ending.code


def run_url(given: str, argv: tuple[str, ...]) -> str:
    """The run's folder: as given, or runs/NAME after the script."""
    if given:
        return absolute_url(given)
    script = next((word for word in argv if word.endswith(".py")), argv[0] if argv else "command")
    return absolute_url(f"runs/{Path(script).stem}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
