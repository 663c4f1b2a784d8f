"""Whole runs for tests: a tiny config, `ftrain run` as a real process, its ledger, and kills by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ftrain.compose.ledgers import LedgerTail
from recovery.client import NotRunningError, ask
from recovery.events import Event, RunEnded, StopRequested, steps_of
from recovery.files import replace_file

TEMPLATE = """
[run]
url = "{url}"
steps = {steps}
seed = 3
{local}
[model]
layers = 2
hidden = 32
heads = 2
ffn = 64
vocab = 257
[data]
sources = [{{ path = "{corpus}" }}]
seq_len = 32
heldout_fraction = 0.05
[batch]
global_batch = {global_batch}
micro_batch = {micro_batch}
[parallel]
ranks = {ranks}
[optimizer]
lr = 1e-3
[schedule]
warmup_steps = 3
[evaluate]
every_steps = 10
sequences = 8
[checkpoint]
snapshot_steps = 3
every_steps = 9
grace_s = 0
[recovery]
backoff_s = 0.1
lease_s = 20
stop_s = 60
{extra}
"""


@dataclass(kw_only=True)
class TinyRun:
    """A run of a 0.05M-parameter model; everything about it is in its folder."""

    folder: Path
    corpus: str
    url: str = ""
    local_dir: str = ""
    steps: int = 30
    ranks: int = 2
    global_batch: int = 8
    micro_batch: int = 2
    extra: str = ""
    env: dict[str, str] = field(default_factory=dict)
    parent: subprocess.Popen[str] | None = field(default=None, init=False, repr=False)  # of the newest start

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.url = self.url or str(self.folder / "run")
        text = TEMPLATE.format(
            url=self.url,
            local=f'local_dir = "{self.local_dir}"' if self.local_dir else "",
            corpus=self.corpus,
            steps=self.steps,
            ranks=self.ranks,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            extra=self.extra,
        )
        replace_file(self.config, text.encode())  # another test process may be reading the same

    @property
    def config(self) -> Path:
        return self.folder / "config.toml"

    @property
    def local(self) -> Path:
        return Path(self.local_dir) if self.local_dir else Path(self.url) / "local"

    def start(self, *options: str) -> subprocess.Popen[str]:
        """`ftrain run`, in the background."""
        self.parent = subprocess.Popen(
            [*FTRAIN, "run", str(self.config), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.env},
        )
        STARTED.append(self)
        return self.parent

    def run(self, *options: str, timeout_s: float = 180) -> tuple[int, str]:
        """`ftrain run` to its end: exit code and output."""
        return finish(self.start(*options), timeout_s)

    def events(self) -> list[Event]:
        """The whole ledger."""
        return list(LedgerTail(self.local / "ledger", from_start=True).new())

    def wait_for(self, condition: Callable[[Sequence[Event]], bool], timeout_s: float = 120) -> None:
        """Until the ledger says so."""
        tail, seen = LedgerTail(self.local / "ledger", from_start=True), list[Event]()
        deadline = time.monotonic() + timeout_s
        while not condition(seen):
            over = self.parent is not None and self.parent.poll() is not None
            time.sleep(0.02)
            seen += tail.new()
            if over and not condition(seen):
                raise AssertionError(f"the run ended before: {finish(self.parent)}")
            assert time.monotonic() < deadline, f"not within {timeout_s} s; the last events: {seen[-5:]}"

    def wait_for_step(self, step: int) -> None:
        """Until a step is finished."""
        self.wait_for(lambda events: any(record.step >= step for event in events for record in steps_of(event)))

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The live processes of this run, by kind."""
        found: dict[str, list[psutil.Process]] = {kind: [] for kind in (*MARKS, "zygote", "worker")}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            kind = next((kind for kind, mark in MARKS.items() if mark in words), None)
            if kind and str(self.local) in " ".join(words):
                found[kind].append(process)
        forks = [child for agent in found["agent"] for child in _children(agent) if "recovery.zygote" in _words(child)]
        workers = self.worker_pids()
        found["worker"] = [process for process in forks if process.pid in workers]
        found["zygote"] = [process for process in forks if process.pid not in workers]
        return found

    def halted(self) -> psutil.Process:
        """The rank that has stopped itself at the step of `halt`; `resume()` lets it go on, and with it all the others."""
        deadline = time.monotonic() + 120
        while True:
            for worker in self.processes()["worker"]:
                with suppress(psutil.NoSuchProcess):
                    if worker.status() == psutil.STATUS_STOPPED:
                        return worker
            assert self.parent is None or self.parent.poll() is None, f"the run ended before: {finish(self.parent)}"
            assert time.monotonic() < deadline, "no rank has stopped itself"
            time.sleep(0.02)

    def worker_pids(self) -> set[int]:
        """What the live coordinator says; empty if there is none."""
        try:
            workers = ask(self.local, "status")["workers"]
        except NotRunningError:
            return set()
        return {worker["pid"] for worker in workers.values()}


STARTED: list[TinyRun] = []  # by the test that runs now
FTRAIN = [sys.executable, "-P", "-m", "ftrain.cli.entry"]
MARKS = {
    "coordinator": "ftrain.compose.coordinator",
    "agent": "recovery.agent",
    "keeper": "ftrain.compose.keeper",
}


def asked_to_stop(events: Sequence[Event]) -> bool:
    """For `wait_for`: the run knows that it is to stop."""
    return any(isinstance(event, StopRequested) for event in events)


def halt(step: int, rank: int = 1) -> str:
    """A fault: a rank stands still after this step, so that who has something to do in the middle of a run is never late."""
    return f'[[faults]]\nkind = "stop"\nat = "step"\nstep = {step}\nrank = {rank}\n'


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def _words(process: psutil.Process) -> list[str]:
    """Its command line; none of one that has ended meanwhile."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def finish(process: subprocess.Popen[str], timeout_s: float = 180) -> tuple[int, str]:
    """Wait for a run's end."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s} s:\n{output[-3000:]}") from None
    return process.returncode, output


def ended(events: Sequence[Event]) -> bool:
    """Whether the run is over."""
    return any(isinstance(event, RunEnded) for event in events)


def kill_tree(run: TinyRun, parent: subprocess.Popen[str]) -> None:
    """kill -9 of everything at once, as a power cut would."""
    victims = [parent.pid, *(p.pid for group in run.processes().values() for p in group)]
    for pid in victims:
        with suppress(ProcessLookupError):  # with the agent its children die, and may be gone before it is their turn
            os.kill(pid, signal.SIGKILL)
    parent.communicate()


def end_all() -> None:
    """After a test, also one that failed: a run that lives on would slow down, and confuse, those that follow."""
    for run in STARTED:
        for process in (p for group in run.processes().values() for p in group):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if run.parent is not None and run.parent.poll() is None:
            run.parent.kill()
            run.parent.communicate()
    STARTED.clear()


@contextmanager
def no_process_left(run: TinyRun) -> Iterator[None]:
    """Nothing of the run lives on."""
    yield
    deadline = time.monotonic() + 10
    while any(run.processes().values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(run.processes().values())
