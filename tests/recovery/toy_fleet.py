"""Toy runs on several "nodes": real agents as processes of this machine, each with a folder of its own, and a real coordinator
that they reach over TLS. As a module it is that coordinator: `python -P -m toy_fleet FOLDER`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from toy import Toy, ToyDelegate
from toy_run import ToyRun, descendants, gone, toy_env, wait_until

from recovery import events
from recovery.coordinator import Coordinator
from recovery.launch import python
from recovery.ledger import Ledger, read_all
from recovery.policy import Limits
from recovery.rendezvous import control_folder
from recovery.spec import AgentSpec, CoordinatorSpec, FleetSpec
from recovery.state import fold

LEASE_S = 3.0


class FleetDelegate(ToyDelegate):
    """One rank on each node."""

    def num_nodes(self) -> int:
        return self.toy.ranks


def run_coordinator(folder: Path) -> int:
    """One life of the coordinator."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    toy = msgspec.json.decode((folder / "toy.json").read_bytes(), type=Toy)
    values = {"lease_s": LEASE_S, **toy.spec}
    fleet = FleetSpec(control=control_folder(folder), host="127.0.0.1", **{"rejoin_s": 1.5, **values.pop("fleet", {})})
    spec = CoordinatorSpec(local_dir=folder, node="head", fleet=fleet, **values)

    def open_ledger(epoch: int) -> tuple[Ledger, Any]:
        past = read_all(folder / "ledger")
        return Ledger(folder / "ledger", None, epoch), fold(past)

    ending = Coordinator(FleetDelegate(folder, toy), spec, open_ledger, Limits(**toy.limits)).run()
    logging.info("%s", ending)
    return ending.code


class ToyFleet(ToyRun):
    """A toy run and the agents of its nodes."""

    def __init__(self, folder: Path, toy: Toy) -> None:
        super().__init__(folder, toy)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.lease_s = toy.spec.get("lease_s", LEASE_S)

    def start(self, role: str = "coordinator", *, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a coordinator."""
        with (self.folder / "out").open("ab") as file:
            argv = [sys.executable, "-P", "-m", "toy_fleet", str(self.folder)]
            self.process = subprocess.Popen(argv, stdout=file, stderr=file, env=toy_env())
        return self.process

    def kill_coordinator(self) -> None:
        """As the kernel's out-of-memory killer would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def join(self, *names: str) -> None:
        """Agents of these nodes; under a name that is there already, a fresh one."""
        for name in names:
            folder = self.folder / "nodes" / name
            folder.mkdir(parents=True, exist_ok=True)
            spec = AgentSpec(
                node=name,
                local_dir=str(folder),
                coordinator="",
                control=str(control_folder(self.folder)),
                zygote_preload="toy",
                lease_s=self.lease_s,
                patience_s=60.0,
            )
            path = folder / "spec.json"
            path.write_bytes(msgspec.json.encode(spec))
            with (folder / "agent.out").open("ab") as out:
                self.nodes[name] = subprocess.Popen(python("recovery.agent", str(path)), stdout=out, stderr=out, env=toy_env())

    def kill_node(self, name: str) -> set[int]:
        """As if its power was cut: the agent first, so that it tells nobody of the others; the pids that were there."""
        agent = self.nodes[name].pid
        victims = descendants(agent)
        for pid in (agent, *(victims - {agent})):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes[name].wait()
        return victims

    def signal_node(self, name: str, number: int) -> None:
        """A signal for everything on a node: SIGSTOP freezes it as a hypervisor would."""
        for pid in descendants(self.nodes[name].pid):
            os.kill(pid, number)

    def attempts(self) -> list[tuple[str, ...]]:
        """The nodes of each attempt so far."""
        return [event.nodes for event in self.events(events.AttemptStarted)]

    def agents(self) -> dict[str, Any]:
        """What the coordinator says of its nodes."""
        return dict(self.status()["nodes"])

    def wait_exit(self, name: str) -> int:
        """Exit code of a node's agent."""
        wait_until(lambda: self.nodes[name].poll() is not None, f"the end of {name}'s agent")
        return self.nodes[name].returncode

    def log(self, name: str) -> str:
        """Output of a node's agent."""
        return (self.folder / "nodes" / name / "agent.out").read_text()

    def close(self) -> None:
        """End whatever is left."""
        if self.process is not None and self.process.poll() is None:
            self.kill_coordinator()
        for name, process in self.nodes.items():
            if process.poll() is None:
                self.kill_node(name)
            assert gone(process.pid)


@contextlib.contextmanager
def toy_fleet(folder: Path, *nodes: str, **values: Any) -> Iterator[ToyFleet]:
    """A toy run with these nodes; its coordinator is not yet started."""
    run = ToyFleet(folder, Toy(**values))
    try:
        run.join(*nodes)
        yield run
    finally:
        run.close()


if __name__ == "__main__":
    sys.exit(run_coordinator(Path(sys.argv[1])))
