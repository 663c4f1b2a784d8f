"""A tiny run on several "nodes" of this machine: `ftrain run`, and `ftrain join` for each, in network namespaces if wanted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from recovery.client import NotRunningError, ask
from tests.runs import FTRAIN, TinyRun


class Joinable(Protocol):
    """A run that nodes can join: a tiny one of a config, or a supervised command."""

    folder: Path
    env: dict[str, str]

    @property
    def local(self) -> Path:
        """Its local folder."""


@dataclass(kw_only=True)
class NodesRun:
    """A run and its nodes. `inside`: the command that enters a node's namespace."""

    run: Joinable
    inside: Callable[[str], Sequence[str]] = lambda node: ()
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def join(self, *names: str) -> None:
        """Offer these nodes to the run, again if they were there before."""
        for name in names:
            log = self.run.folder / f"{name}.out"
            with log.open("ab") as out:
                argv = [*self.inside(name), *FTRAIN, "join", str(self.run.local), "--node", name]
                self.nodes[name] = subprocess.Popen(argv, stdout=out, stderr=out, env={**os.environ, **self.run.env})

    def tree(self, name: str) -> list[psutil.Process]:
        """Everything that runs on a node."""
        try:
            process = psutil.Process(self.nodes[name].pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self, name: str) -> None:
        """The node's power is cut."""
        for process in self.tree(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.nodes[name].wait()

    def known(self) -> dict[str, dict[str, object]]:
        """What the coordinator says of its nodes."""
        try:
            return dict(ask(self.run.local, "status")["nodes"])
        except NotRunningError:
            return {}

    def wait_for_nodes(self, *names: str, patience_s: float = 60.0) -> None:
        """Until these have joined."""
        deadline = time.monotonic() + patience_s
        while not set(names) <= set(self.known()):
            assert time.monotonic() < deadline, f"{names} have not joined: {self.known()}"
            time.sleep(0.1)

    def close(self) -> None:
        """End all nodes."""
        for name, process in self.nodes.items():
            if process.poll() is None:
                self.kill(name)


@contextlib.contextmanager
def nodes_run(run: Joinable, *names: str, inside: Callable[[str], Sequence[str]] = lambda node: ()) -> Iterator[NodesRun]:
    """A run whose nodes have been offered; it is not yet started."""
    nodes = NodesRun(run=run, inside=inside)
    try:
        nodes.join(*names)
        yield nodes
    finally:
        nodes.close()


def logs_of(run: TinyRun, node: str) -> Path:
    """Where a node keeps its logs."""
    return run.local / "nodes" / node / "logs"
