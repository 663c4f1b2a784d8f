"""A node's part in a run on several machines: `python -P -m ftrain.compose.node SHARED_DIR [NODE]`, and `ftrain join`.

Keeps an agent alive here for as long as the run may need this node. An agent ends when the run does, when it was sent away, or
when its lease is over; only after the first there is nothing more to do. A fresh agent has empty hands, and waits to be
admitted: nothing is ever started here that the coordinator did not ask for.

Where the node of the coordinator itself is lost, nobody is left who decides. Under Slurm the nodes that have missed it for a
lease ask the controller about that node, and once it is given up there, have the job requeued: its next life resumes the run.
"""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ftrain.compose.nodes import NODE_FILE, NodeArgs, node_dir, this_node, write
from recovery import paths
from recovery.client import NotRunningError, ask
from recovery.codes import ExitCode
from recovery.launch import Spawn, python, spawn
from recovery.network import interface_address, usual_names
from recovery.rendezvous import control_folder, read_address
from recovery.slurm import SlurmError, is_down, job_id, requeue
from recovery.spec import LEAVE, AgentSpec

log = logging.getLogger("ftrain.node")

POLL_S = 0.2
PAUSE_S = 1.0
ASK_S = 3.0
CHECK_S = 10.0  # between two questions about a coordinator that is missed
LONG_ENOUGH_S = 30.0  # an agent that lived so long was of use: the time that this node is tried for begins anew


class NoRunError(Exception):
    """There is no run in the folder, after all patience."""


class LeftError(Exception):
    """This node was taken away before there was a run."""


def read_args(shared: Path, *, patience_s: float, stop: _Stop | None = None) -> NodeArgs:
    """What the coordinator has written down, waiting for it; NoRunError if it is not there in time, LeftError if the wait is
    ended by `stop`.
    """
    path = control_folder(shared) / NODE_FILE
    deadline = time.monotonic() + patience_s
    pause = stop.wait if stop else time.sleep
    while not (stop and stop.asked):
        try:
            return msgspec.json.decode(path.read_bytes(), type=NodeArgs)
        except (FileNotFoundError, msgspec.DecodeError) as error:
            if time.monotonic() > deadline:
                raise NoRunError(f"no run has said within {patience_s:g} s what nodes must know ({path}): {error}") from error
        pause(POLL_S)
    raise LeftError


def agent_spec(args: NodeArgs, shared: Path, node: str) -> AgentSpec:
    """What this node's agent is started with; its folder and the keeper's arguments are written here."""
    folder = node_dir(Path(args.local_dir), node)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name, address = interface_address(args.interfaces or usual_names())
    return AgentSpec(
        node=node,
        local_dir=str(folder),
        coordinator="",
        control=str(control_folder(shared)),
        zygote_preload=args.zygote_preload,
        keeper_argv=keeper_argv(args, folder),
        lease_s=args.lease_s,
        patience_s=args.patience_s,
        env=args.env,
        host=address,
        node_env=network_env(args, name),
    )


def keeper_argv(args: NodeArgs, folder: Path) -> tuple[str, ...]:
    """The command of this node's keeper, whose arguments are written down in the node's folder; empty if there is none."""
    if args.keeper is None:
        return ()
    keeper = folder / "keeper.json"
    write(keeper, args.keeper)
    return tuple(python("ftrain.compose.keeper", str(keeper)))


def network_env(args: NodeArgs, name: str) -> dict[str, str]:
    """Variables that lead collectives over the interface `name`. One that was merely found is a help for Gloo, which would
    look its address up by the host's name; it overrules nobody who knows better, and NCCL finds its own way."""
    if args.interfaces:
        return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": name}


def serve(shared: Path, node: str, *, patience_s: float = 60.0) -> int:
    """Keep an agent here until the run is over; returns the exit code. Main thread only.

    Raises NoRunError, LeftError, or NoInterfaceError if this machine is not on the run's network.
    """
    stop = _Stop()
    tried_since, orphaned = time.monotonic(), False
    while True:
        args = read_args(shared, patience_s=patience_s, stop=stop)
        spec = agent_spec(args, shared, node)
        folder = Path(spec.local_dir)
        path = paths.agent_spec(folder)
        write(path, spec)
        began = time.monotonic()
        agent_log = paths.process_log(folder, "agent")
        log.info("node %s: the run is there; this node's agent is started, and says more in %s", node, agent_log)
        how = Spawn(
            argv=python("recovery.agent", str(path)),
            log=agent_log,
            env=spec.env,
            dies_with_us=True,
        )
        status = _wait(spawn(how), stop, shared, node, orphaned=orphaned)
        orphaned = status == ExitCode.RETRY_SAME
        if status in (ExitCode.DONE, ExitCode.HELD) or stop.asked:
            return status if status >= 0 else ExitCode.RETRY_SAME
        if time.monotonic() - began > LONG_ENOUGH_S + args.lease_s:
            tried_since = time.monotonic()
        if time.monotonic() - tried_since > args.patience_s:
            log.error("no coordinator has wanted this node for %.0f s", args.patience_s)
            return ExitCode.RETRY_SAME
        log.warning("the agent of node %s ended with status %d; another one follows", node, status)
        stop.wait(PAUSE_S)


class _Stop:
    """SIGTERM and SIGINT: this node is being taken away. Noted, and handed on to whoever wants to know."""

    def __init__(self) -> None:
        self.asked = False
        self._agent: Callable[[], None] = lambda: None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.asked = True
        os.eventfd_write(self._wake, 1)
        self._agent()

    def hand_on(self, call: Callable[[], None]) -> None:
        """Whom to tell."""
        self._agent = call
        if self.asked:
            call()

    def wait(self, seconds: float) -> None:
        """A pause that a signal ends."""
        select.select([self._wake], [], [], seconds)


def _wait(process: subprocess.Popen[bytes], stop: _Stop, shared: Path, node: str, *, orphaned: bool) -> int:
    """The agent's end. If this node is taken away the run is asked to save and leave, which ends the agent. Where nobody
    answers, and when it is asked for again, the agent is ended at once.
    """
    asked: list[bool] = []

    def taken_away() -> None:
        if not asked and _tell(shared, node):
            asked.append(True)
        else:
            process.send_signal(LEAVE)

    stop.hand_on(taken_away)
    try:
        while True:
            try:
                return process.wait(random.uniform(0.5, 1.5) * CHECK_S if orphaned else None)
            except subprocess.TimeoutExpired:
                _requeue_if_headless(shared)
    finally:
        stop.hand_on(lambda: None)


def _requeue_if_headless(shared: Path) -> None:
    """The coordinator's node is lost, as far as Slurm knows: the job must begin anew. Whichever node asks first is heard."""
    try:
        head = read_address(control_folder(shared)).node
    except OSError:
        return
    if not job_id() or not is_down(head):
        return
    log.warning("node %s, where the coordinator was, is down: the job goes back into the queue", head)
    try:
        requeue(job_id())
    except SlurmError as error:
        log.warning("%s", error)


def _tell(shared: Path, node: str) -> bool:
    """Whether the coordinator has heard that the scheduler takes this node away."""
    try:
        ask(shared, "stop", {"by": "SIGTERM", "node": node}, timeout_s=ASK_S)
    except (NotRunningError, ValueError) as error:
        log.warning("nobody to tell that node %s is taken away: %s", node, error)
        return False
    return True


def main(argv: Sequence[str]) -> int:
    """Serve the run of a shared folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        return serve(Path(argv[0]), argv[1] if len(argv) > 1 else this_node())
    except LeftError:
        return ExitCode.STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
