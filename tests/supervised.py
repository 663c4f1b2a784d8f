"""`ftrain supervise` as a user starts it, watched from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recovery.client import NotRunningError, ask
from recovery.events import Event
from recovery.ledger import read_all
from tests.runs import FTRAIN

PATIENCE_S = 120.0
E = TypeVar("E", bound=Event)


def until(found: Callable[[], Any], what: str) -> Any:
    """The first true value; fails after a long time."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.01)
    return value


@dataclass
class Supervised:
    """One `ftrain supervise` in one folder."""

    folder: Path
    process: subprocess.Popen[str]
    env: dict[str, str]

    @property
    def url(self) -> str:
        return str(self.folder / "run")

    @property
    def local(self) -> Path:
        return self.folder / "run" / "local"

    def events(self, kind: type[E]) -> list[E]:
        """The ledger's events of one kind."""
        ledger = self.folder / "run" / "local" / "ledger"
        return [event for event in read_all(ledger) if isinstance(event, kind)] if ledger.is_dir() else []

    def wait_event(self, kind: type[E], fits: Callable[[E], bool] = lambda event: True) -> E:
        """The first such event."""

        def look() -> E | None:
            assert self.process.poll() is None or any(fits(event) for event in self.events(kind)), self.log()
            return next((event for event in self.events(kind) if fits(event)), None)

        found: E = until(look, kind.__name__)
        return found

    def workers(self) -> dict[int, int]:
        """Pids by rank, once all live."""

        def look() -> dict[int, int]:
            with contextlib.suppress(NotRunningError):
                workers = ask(Path(self.url) / "local", "status")["workers"]
                pids = {int(rank): it["pid"] for rank, it in workers.items() if it["pid"] and not it["ended"]}
                return pids if pids and len(pids) == len(workers) else {}
            return {}

        found: dict[int, int] = until(look, "workers")
        return found

    def log(self, attempt: int = 0, rank: int = 0, node: str = "") -> str:
        """What a rank wrote, on whatever node."""
        folder = self.local / "nodes" / node if node else self.local
        path = folder / "logs" / f"attempt-{attempt:04d}" / f"rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def wait(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err


@contextlib.contextmanager
def supervised(folder: Path, *words: str, env: dict[str, str] | None = None) -> Iterator[Supervised]:
    """`ftrain supervise --run FOLDER/run` with these words, in `folder`."""
    argv = [*FTRAIN, "supervise", "--run", str(folder / "run"), *words]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=environment)
    try:
        yield Supervised(folder, process, env or {})
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20)
        if process.poll() is None:
            process.kill()
            process.communicate()


def python(*words: str) -> tuple[str, ...]:
    """A command that runs this interpreter."""
    return ("--", sys.executable, *words)


def standing(places: str, *words: str) -> tuple[str, ...]:
    """A command that runs this script, which stands still at these places (see `tests/stands.py`) until it is killed."""
    return python(str(Path(__file__).with_name("stands.py")), places, *words)
