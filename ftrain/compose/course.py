"""One of the two runs of a drill, from outside: started and stopped as by a person, followed by its ledger."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftrain.compose.ledgers import LedgerTail
from ftrain.config import Config
from ftrain.load import to_toml
from recovery.client import NotRunningError, ask
from recovery.events import CheckpointCommitted, Event, InterruptionClassified, steps_of
from recovery.launch import python

POLL_S = 0.05
LEAST_PATIENCE_S = 180.0


class DrillError(RuntimeError):
    """The drill could not be carried out; what it leaves is in its folder."""


class Course:
    """One of the two runs, as a person would start and stop it."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.url = config, Path(config.run.url)
        self.local = self.url / "local"
        self._toml = folder / f"{self.url.name}.toml"
        self._toml.write_text(to_toml(config))
        self.log = folder / f"{self.url.name}.log"
        self._tail = LedgerTail(self.local / "ledger", from_start=True)
        self.every = config.checkpoint.every_steps
        self.parent = 0
        """Pid of `ftrain run`."""
        self.told: list[Event] = []
        self.committed: list[int] = []
        self.step = 0
        self.restarts = 0
        self.judged = 0.0
        """When the last verdict was made (unix time)."""
        self._since, self._newer = 0.0, 0

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The run, which does not outlive its drill."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                python("ftrain.cli.entry", "run", str(self._toml)), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.parent = process.pid
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.config.recovery.stop_s + 30.0)

    def look(self) -> None:
        """What the ledger says that is new."""
        for event in self._tail.new():
            self.told.append(event)
            if isinstance(event, CheckpointCommitted) and event.step % self.every == 0:
                self.committed.append(event.step)
            if isinstance(event, InterruptionClassified):
                self.judged = event.t
                self.watch(event.t)
            for record in steps_of(event):
                self._newer += record.step > self.step and record.t_end > self._since
                self.step = max(self.step, record.step)

    def watch(self, since: float) -> None:
        """From now on `goes_on` is about what comes after `since` (wall clock), and after what it was about before."""
        self._since, self._newer = max(self._since, since), 0

    @property
    def goes_on(self) -> bool:
        """Whether new steps have ended since then, and not only one, which may have been all but finished. When they are told
        of says nothing: reports of earlier ones may still be on their way.
        """
        return self._newer > 1

    def run_alone(self, seconds: float, until: int | None = None) -> int:
        """Undisturbed, for a while and at least until there is a checkpoint, or just until that of step `until`; its step."""
        with self.running() as process:
            deadline = time.monotonic() + LEAST_PATIENCE_S + seconds
            began: float | None = None  # the time counts from the first step
            while until not in self.committed and (
                until is not None or not self.committed or began is None or time.monotonic() - began <= seconds
            ):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise DrillError(f"the unbroken run ends or does not get to a checkpoint; see {self.log}")
                time.sleep(POLL_S)
                self.look()
                began = time.monotonic() if began is None and self.step else began
        self.look()
        return self.committed[-1]

    def status(self) -> dict[str, Any] | None:
        """What the live coordinator says; None if there is none."""
        with contextlib.suppress(NotRunningError, ValueError, OSError):
            return ask(self.local, "status")
        return None
