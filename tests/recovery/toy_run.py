"""Starts toy runs as real processes, finds their members, and makes sure that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
from toy import Toy

from recovery.client import NotRunningError, ask
from recovery.launch import start_time
from recovery.ledger import read_all

PATIENCE_S = 20.0
E = TypeVar("E")


def toy_env() -> dict[str, str]:
    """Environment in which `-P` still finds the toy."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


def wait_until(condition: Callable[[], Any], what: str = "") -> Any:
    """The first true value of the condition; fails after a long time."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"in vain: {what or condition}"
        time.sleep(0.005)
    return value


def gone(pid: int) -> bool:
    """Whether no such process runs (a zombie, whose parent is not us, does not)."""
    return start_time(pid) is None


def descendants(pid: int) -> set[int]:
    """The process and everything below it that runs: the zygote may not have reaped yet what it forked its workers by."""
    try:
        process = psutil.Process(pid)
        return {pid, *(child.pid for child in process.children(recursive=True) if not gone(child.pid))}
    except psutil.NoSuchProcess:
        return set()


def num_fds(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class ToyRun:
    """One run in one folder, over any number of coordinator lives."""

    def __init__(self, folder: Path, toy: Toy) -> None:
        self.folder = folder
        (folder / "toy.json").write_bytes(msgspec.json.encode(toy))
        self.process: subprocess.Popen[bytes] | None = None
        self._members: set[int] = set()

    def start(self, role: str = "coordinator", *, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a coordinator, or a parent that starts one."""
        out = self.folder / "out"
        with out.open("ab") as file:
            argv = [sys.executable, "-P", "-m", "toy", role, str(self.folder)]
            self.process = subprocess.Popen(argv, stdout=file, stderr=file, env=toy_env(), cwd=cwd)
        return self.process

    def wait(self) -> int:
        """Its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError((self.folder / "out").read_text()) from None

    def events(self, kind: type[E]) -> list[E]:
        """The ledger's events of one kind."""
        return [event for event in read_all(self.folder / "ledger") if isinstance(event, kind)]

    def wait_event(self, kind: type[E], condition: Callable[[E], bool] = lambda event: True) -> E:
        """The first such event."""
        return wait_until(lambda: next((event for event in self.events(kind) if condition(event)), None), kind.__name__)

    def diary(self) -> list[str]:
        """What the delegate was told."""
        path = self.folder / "diary"
        return path.read_text().splitlines() if path.exists() else []

    def wait_diary(self, start: str) -> str:
        """The first line of the diary that begins so."""
        return wait_until(lambda: next((line for line in self.diary() if line.startswith(start)), None), start)

    def agent_pid(self) -> int:
        """The living agent."""
        path = self.folder / "agent.json"
        wait_until(path.exists, "agent.json")
        return int(msgspec.json.decode(path.read_bytes())["pid"])

    def status(self) -> dict[str, Any]:
        """As `ftrain status` sees it."""

        def try_ask() -> dict[str, Any] | None:
            with contextlib.suppress(NotRunningError):
                return ask(self.folder, "status")
            return None

        return wait_until(try_ask, "status")

    def worker_pids(self) -> dict[int, int]:
        """The stepping workers, once all are there."""

        def all_pids() -> dict[int, int]:
            workers = self.status()["workers"]
            pids = {int(rank): it["pid"] for rank, it in workers.items() if it["pid"] and not it["ended"]}
            return pids if pids and len(pids) == len(workers) else {}

        return wait_until(all_pids, "worker pids")

    def helper_pid(self, kind: str) -> int:
        """The keeper or the zygote, once it runs."""

        words = {"zygote": "recovery.zygote", "keeper": "keeper"}[kind]

        def find() -> int:
            workers = set(self.worker_pids().values())  # a worker is a fork of the zygote and looks like it
            for child in psutil.Process(self.agent_pid()).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.pid not in workers and words in child.cmdline():
                        return child.pid
            return 0

        return wait_until(find, kind)

    def members(self) -> set[int]:
        """Everything that belongs to the run now."""
        self._members |= descendants(self.agent_pid())
        return set(self._members)

    def close(self) -> None:
        """End whatever is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for record, words in (("owner.json", b"coordinator"), ("agent.json", b"recovery.agent")):  # the one restarts the other
            with contextlib.suppress(AssertionError, OSError, KeyError, msgspec.DecodeError):
                pid = int(msgspec.json.decode((self.folder / record).read_bytes())["pid"])
                if not gone(pid) and words in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    wait_until(lambda pid=pid: gone(pid), "its end")


@contextlib.contextmanager
def toy_run(folder: Path, **values: Any) -> Iterator[ToyRun]:
    """A toy run that is not yet started."""
    run = ToyRun(folder, Toy(**values))
    try:
        yield run
    finally:
        run.close()
