"""From a command to its running coordinator, and that coordinator's process:
`python -P -m ftrain.compose.supervise LOCAL_DIR`. Imports no torch.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import msgspec

from ftrain.compose.command import CommandDelegate
from ftrain.compose.command_launch import CommandLaunch
from ftrain.compose.endwatch import EndWatch, planned_end
from ftrain.compose.errors import RefusedError
from ftrain.compose.exporter import Exporter
from ftrain.compose.nodes import NodeArgs, check_port, tell_nodes, this_node
from ftrain.compose.packets import Packets
from ftrain.compose.paths import CONFIGURED, SUPERVISED, absolute_url, local_dir_of
from ftrain.compose.slurm import REQUEUE, JobNodes, ask_for_requeue, join_command
from ftrain.compose.webhook import tell
from ftrain.config import Slurm
from ftrain.schemes import is_local
from recovery.codes import ExitCode
from recovery.coordinator import Coordinator
from recovery.events import Event
from recovery.files import replace_file
from recovery.launch import python
from recovery.ledger import Ledger, read_past
from recovery.network import NoInterfaceError, interface_address, names_of, usual_names
from recovery.notice import Lookout, sources
from recovery.owner import Claim, claim
from recovery.policy import Limits
from recovery.rendezvous import control_folder
from recovery.slurm import job_id
from recovery.spec import CoordinatorSpec, FleetSpec
from recovery.state import RunState, fold

WEBHOOK_S = 10.0
MARGIN_S = 30.0  # kept free between the last save and the end that a scheduler has announced
POLL_S = 2.0


def prepare(launch: CommandLaunch) -> tuple[Path, Claim]:
    """Check what can be checked, write what the coordinator reads, and return the run's local folder, and the run, which is to
    be handed to the coordinator.

    Raises RefusedError or HeldError, in words, before anything has been started.
    """
    check(launch)
    folder = local_dir_of(launch.url)
    if (folder / CONFIGURED).exists():
        raise RefusedError([f"{launch.url} is the run of a config (`ftrain run`): give --run another folder"])
    held = claim(folder, take_over=launch.take_over)
    try:
        check_port(fleet_spec(launch, folder), "--port")
        (folder / REQUEUE).unlink(missing_ok=True)
        replace_file(folder / SUPERVISED, msgspec.json.format(msgspec.json.encode(launch)))
    except BaseException:
        held.release()
        raise
    return folder, held


def made_by_another(launch: CommandLaunch) -> str:
    """That the run's folder has a run of another command, with whose state this one may go on; empty if it has not."""
    folder = local_dir_of(launch.url)
    if not is_local(launch.url) or not (folder / "ledger").is_dir():
        return ""
    try:
        before = msgspec.json.decode((folder / SUPERVISED).read_bytes(), type=CommandLaunch)
    except (OSError, msgspec.DecodeError):  # of another version, or none
        return ""
    if (before.argv, before.cwd) == (launch.argv, launch.cwd):
        return ""
    moved = before.cwd != launch.cwd
    was, now = (shlex.join(one.argv) + (f" (in {one.cwd})" if moved else "") for one in (before, launch))
    return f"{launch.url} was made by another command: {was}; now {now} goes on in it. --run gives it a folder of its own"


def check(launch: CommandLaunch) -> None:
    """RefusedError for what cannot work, without a look at the run's folder."""
    if not launch.argv:
        raise RefusedError(["there is no command: ftrain supervise [options] -- python train.py ..."])
    if why := no_program(launch.argv[0]):
        raise RefusedError([f"{launch.argv[0]!r} is no program: {why}"])
    if not is_local(launch.url):
        raise RefusedError(
            [f"--run {launch.url}: the folder of a supervised run is in a file system; a script may save anywhere"]
        )
    if launch.webhook and not launch.webhook.startswith(("http://", "https://")):
        raise RefusedError([f"--webhook {launch.webhook}: wanted a URL that begins with http:// or https://"])
    check_nodes(launch)


def no_program(name: str) -> str:
    """Why the system could not start what is called so, and what to write instead; empty if it could."""
    if shutil.which(name) is not None:
        return ""
    if not name.strip() or not os.path.exists(name):
        return "neither a file nor on the PATH"
    if os.path.isdir(name):
        return "it is a folder"
    if os.access(name, os.X_OK):
        return f"it is not on the PATH; the file of this folder is ./{name}"
    return f"the file may not be executed; a script follows its interpreter: python {name}"


def check_nodes(launch: CommandLaunch) -> None:
    """RefusedError if what was said of nodes does not fit together."""
    if not launch.nnodes:
        return
    if int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        raise RefusedError(["srun has started this once per task: start it once, in the batch script, and it starts the rest"])
    if not launch.nproc:
        raise RefusedError(["--nnodes says how many machines, --nproc how many processes on each: give both"])
    if launch.min_nodes > launch.nnodes:
        raise RefusedError([f"--min-nodes {launch.min_nodes}: at most --nnodes, which is {launch.nnodes}"])
    if launch.master_addr:
        raise RefusedError(["--master-addr is for one machine: on several the first rank's node says its own, whichever it is"])
    try:
        interface_address(interfaces(launch))
    except NoInterfaceError as error:
        raise RefusedError([str(error)]) from error


def interfaces(launch: CommandLaunch) -> list[str]:
    """Network interfaces of this machine, of which the first that exists is used."""
    return names_of(launch.interface) or usual_names()


def coordinator_argv(folder: Path) -> list[str]:
    """The command that runs (or takes up again) the coordinator of the supervised run in `folder`."""
    return python("ftrain.compose.supervise", str(folder))


def compose(folder: Path, launch: CommandLaunch) -> Coordinator:
    """Everything a supervised run is made of."""
    lookout = Lookout(sources(os.environ, ""), poll_s=POLL_S, clock=time.time)
    scheduler = f"Slurm job {job_id()}" if job_id() else ""
    delegate = CommandDelegate(launch, folder, EndWatch(lookout, margin_s=MARGIN_S, scheduler=scheduler))
    silent_s = launch.hang_s if launch.output_is_progress else math.inf
    fleet = fleet_spec(launch, folder)
    if fleet is not None:
        tell_nodes(folder, node_args(launch, folder))
    spec = CoordinatorSpec(
        local_dir=folder,
        node=this_node() if fleet is not None else "localhost",
        host=launch.master_addr or "127.0.0.1",
        fleet=fleet,
        places=launch.per_node,
        lease_s=launch.lease_s,
        hang_s=launch.hang_s,
        hang_floor_s=launch.hang_s,  # what a script does between two reports is not known: no limit is learned from it
        start_s=launch.start_s if launch.start_s is not None else silent_s,
        stop_s=launch.stop_s,
        take_over=launch.take_over,
    )

    def open_ledger(epoch: int) -> tuple[Ledger, RunState]:
        past, newest = read_past(folder / "ledger")
        return Ledger(folder / "ledger", None, epoch, after=newest), fold(past)

    def on_event(event: Event) -> None:
        packets.on_event(event)
        delegate.on_event(event)

    packets = Packets(folder, launch.command, lambda: coordinator.desk.journal.state)
    limits = Limits(max_restarts=launch.max_restarts, layout_hold_s=0.0)  # no option says how long: a node is taken up at once
    coordinator = Coordinator(delegate, spec, open_ledger, limits, on_event=on_event)
    return coordinator


def fleet_spec(launch: CommandLaunch, folder: Path) -> FleetSpec | None:
    """How the coordinator meets its nodes; None on one machine."""
    if not launch.nnodes:
        return None
    return FleetSpec(
        control=control_folder(folder),
        host=interface_address(interfaces(launch))[1],
        port=launch.port,
        ranks_per_node=launch.nproc,
        patience_s=launch.nodes_s,
    )


def node_args(launch: CommandLaunch, folder: Path) -> NodeArgs:
    """What the nodes must know."""
    return NodeArgs(
        local_dir=str(folder),
        zygote_preload="",
        lease_s=launch.lease_s,
        interfaces=names_of(launch.interface),
        keeper=None,
        patience_s=launch.nodes_s,
    )


def nodes_of_job(folder: Path, launch: CommandLaunch) -> JobNodes | None:
    """The nodes of this Slurm job, to be started from here; None if there is no job, or no other machine."""
    if not job_id() or not launch.nnodes:
        return None
    slurm = Slurm(srun=launch.srun)
    return JobNodes(folder, lambda nodes: join_command(folder, slurm, nodes=nodes, wait_s=launch.nodes_s))


def main(argv: list[str]) -> int:
    """Run the coordinator of the supervised run in `argv[0]`; returns the exit code of the whole run."""
    folder = Path(argv[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    launch = msgspec.json.decode((folder / SUPERVISED).read_bytes(), type=CommandLaunch)
    exporter = Exporter(folder, port=0)
    try:
        coordinator = compose(folder, launch)
        ending = coordinator.run()
    finally:
        exporter.close()
    tell(launch.webhook, folder, coordinator.state, run_url=launch.url, limit_s=WEBHOOK_S)
    logging.info("%s: %s", ending.outcome, ending.reason)
    if ending.code == ExitCode.STOPPED and launch.requeue and (why := planned_end(coordinator.state)):
        ask_for_requeue(folder, why)
    return ending.code


def run_url(given: str, argv: tuple[str, ...]) -> str:
    """The run's folder: as given, or runs/NAME after the script."""
    if given:
        path = Path(given)
        return absolute_url(str(path.resolve()) if ".." in path.parts else given)  # what it goes back through may be deleted
    script = next((word for word in argv if word.endswith(".py")), argv[0] if argv else "command")
    return absolute_url(f"runs/{Path(script).stem}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
