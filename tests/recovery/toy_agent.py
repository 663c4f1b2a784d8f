"""A coordinator's place taken by a test: drives one real agent message by message."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from toy_run import PATIENCE_S, toy_env

from recovery import paths
from recovery.launch import python
from recovery.messages import (
    Ack,
    AgentHello,
    Exited,
    Heartbeats,
    Numbered,
    Ping,
    Prepare,
    Prepared,
    Shutdown,
    Spawned,
    StartAttempt,
    ToCoordinator,
    Welcome,
    WorkerSpec,
)
from recovery.spec import AgentSpec
from recovery.wire import Channel, channel, listen, wait_readable

M = TypeVar("M")


class DrivenAgent:
    """One agent process and the test's end of its connection."""

    def __init__(self, folder: Path, **spec: Any) -> None:
        self.folder = folder
        self.socket = paths.coordinator_socket(folder)
        self.listener = listen(self.socket)
        values = {"node": "n0", "local_dir": str(folder), "coordinator": str(self.socket), "zygote_preload": "toy", **spec}
        path = folder / "spec.json"
        path.write_bytes(msgspec.json.encode(AgentSpec(**values)))
        with (folder / "agent.out").open("ab") as out:
            self.process = subprocess.Popen(python("recovery.agent", str(path)), stdout=out, stderr=out, env=toy_env())
        self.link: Channel[Any] | None = None
        self.seen: list[Any] = []
        self.seq = 0

    def accept(self, *, epoch: int = 1) -> AgentHello:
        """Let it in; its hello."""
        hello = self.meet()
        assert self.link is not None
        self.link.send(Welcome(epoch=epoch))
        return hello

    def meet(self) -> AgentHello:
        """Its hello, not answered yet."""
        assert wait_readable(self.listener.fileno(), PATIENCE_S)
        sock, _ = self.listener.accept()
        self.link = channel(sock, ToCoordinator)
        frame = self.link.receive(PATIENCE_S)
        assert frame is not None
        assert isinstance(frame.message, AgentHello)
        return frame.message

    def listen(self) -> None:
        """Be reachable again."""
        self.listener = listen(self.socket)

    def hang_up(self, *, unreachable: bool = False) -> None:
        """Be a coordinator that died, and that nobody restarts if it is to be unreachable."""
        assert self.link is not None
        if unreachable:
            self.listener.close()
            self.socket.unlink()
        self.link.close()
        self.link = None

    def send(self, message: object) -> None:
        """A command."""
        assert self.link is not None
        self.link.send(message)

    def acknowledge(self) -> None:
        """Everything so far is on record."""
        self.send(Ack(seq=self.seq))

    def wait_for(self, kind: type[M], condition: Callable[[M], bool] = lambda message: True) -> M:
        """The next such message; everything passed over is in `seen`."""
        assert self.link is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not self.link.closed:
            frame = self.link.receive(0.2)
            self.link.send(Ping())  # whoever waits is alive: the lease is not at stake here
            if frame is None:
                continue
            message = frame.message
            if isinstance(message, Numbered):
                self.seq, message = message.seq, message.message
            if not isinstance(message, Heartbeats):
                self.seen.append(message)
            if isinstance(message, kind) and condition(message):
                return message
        raise AssertionError(f"no {kind.__name__}; last seen: {self.seen[-10:]}; {(self.folder / 'agent.out').read_text()}")

    def expect(self, kind: type[M], condition: Callable[[M], bool] = lambda message: True) -> M:
        """Such a message, seen already or still to come."""
        found = (it for it in self.seen if isinstance(it, kind) and condition(it))
        return next(found, None) or self.wait_for(kind, condition)

    def start(self, entry: str = "toy:work", *, ranks: int = 1, attempt: int = 0, **values: Any) -> dict[int, int]:
        """An attempt; pids by rank once all have said hello."""
        args = {"steps": 10**9, "step_s": 0.01, "faults": [], **values.pop("args", {})}
        self.send(Prepare(memfds={f"arena-{rank}": 4096 for rank in range(ranks)}))
        self.wait_for(Prepared)
        workers = tuple(WorkerSpec(rank=rank, entry=entry, args=args, memfds=(f"arena-{rank}",)) for rank in range(ranks))
        self.send(StartAttempt(attempt=attempt, epoch=1, workers=workers, **values))
        pids: dict[int, int] = {}
        while len(pids) < ranks:
            spawned = self.wait_for(Spawned)
            pids[spawned.rank] = spawned.pid
        return pids

    def wait_exit(self, rank: int = 0) -> Exited:
        """How a worker ended."""
        return self.wait_for(Exited, lambda message: message.kind == "worker" and message.rank == rank)

    def wait_gone(self) -> int:
        """The agent's exit code."""
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it."""
        if self.link is not None and self.process.poll() is None:
            self.link.send(Shutdown(reason="the test is over"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.link is not None:
            self.link.close()
        self.listener.close()


@contextlib.contextmanager
def driven_agent(folder: Path, **spec: Any) -> Iterator[DrivenAgent]:
    """An agent that this test drives."""
    agent = DrivenAgent(folder, **spec)
    try:
        yield agent
    finally:
        agent.close()
