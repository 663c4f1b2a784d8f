"""Injected faults: a named point, a step, a rank. For demonstrations, tests and drills; a run without `[[faults]]`
pays one comparison.

A fault fires once in the life of a run: a marker file, created before the act, survives the process that the act
ends. So do a few words in the process's log, for those who read the report of what followed. Who runs a drill may hold a
fault: it does not fire before its hold is removed, at whatever step that is. Points:

- in a worker: `step` (between two steps), `gradients` (complete, not yet voted on), `copy` (in the
  middle of a snapshot), `restore` (after the state is back)
- in the keeper: `upload` (in the middle of a pack)
- in the coordinator: `before_manifest`, `after_manifest`, `before_commit`, `after_commit`

"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from ftrain.config import Fault
from recovery.injected import announcement
from recovery.memory import cgroup_limits
from storage.objects import Bytes, ObjectStore
from storage.wrapper import WrappingStore

WORKER_POINTS = ("step", "gradients", "copy", "restore")
KEEPER_POINTS = ("upload",)
COORDINATOR_POINTS = ("before_manifest", "after_manifest", "before_commit", "after_commit")
SLOW_S = 0.05
POINTS = WORKER_POINTS + KEEPER_POINTS + COORDINATOR_POINTS


def marker(folder: Path, number: int) -> Path:
    """The file that says that fault `number` has fired."""
    return folder / f"fault-{number}"


def hold(folder: Path, number: int) -> Path:
    """The file that keeps fault `number` from firing for as long as it is there."""
    return folder / f"fault-{number}.held"


class Faults:
    """The faults of one process."""

    def __init__(
        self,
        faults: Sequence[Fault],
        folder: Path,
        *,
        rank: int | None = None,
        corrupt: Callable[[str], None] | None = None,
    ) -> None:
        """`folder` holds the markers of what has fired; `rank` is None outside workers; `corrupt` spoils a gradient."""
        self._folder, self._corrupt = folder, corrupt
        self.delay_s = 0.0
        """What this rank takes longer over each forward pass."""
        self._armed = [
            (number, fault)
            for number, fault in enumerate(faults)
            if rank is None or fault.rank == rank or fault.at not in WORKER_POINTS
        ]

    def reached(self, point: str, step: int) -> None:
        """Named point `point` was reached at `step`: do what each fault that is armed there says."""
        for number, fault in self._armed:
            if fault.at == point and step >= fault.step and self._claim(number):
                sys.stderr.write(f"{announcement(number, fault.kind, point, step)}\n")
                sys.stderr.flush()
                self._act(fault, step)

    def _claim(self, number: int) -> bool:
        if hold(self._folder, number).exists():
            return False
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(marker(self._folder, number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def _act(self, fault: Fault, step: int) -> None:
        if fault.kind in ("nan", "flip", "part") and self._corrupt is not None:
            self._corrupt(fault.kind)
        elif fault.kind == "slow":
            self.delay_s = SLOW_S
        else:
            _act(fault, step)


SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "abort": signal.SIGABRT, "stop": signal.SIGSTOP}


def _act(fault: Fault, step: int) -> None:
    if fault.kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.kind])
    elif fault.kind == "import":
        import_module("ftrain_injected_fault")
    elif fault.kind == "oom":
        _use_up_memory()
    elif fault.kind == "exit":
        os._exit(1)
    elif fault.kind == "lock":
        threading.Event().wait()  # nobody will ever set it
    elif fault.kind == "raise":
        raise RuntimeError(fault.text or f"injected fault at {fault.at!r}, step {step}")
    while fault.kind == "loop":
        continue


def _use_up_memory() -> None:
    """Until the kernel ends this process: only within a memory cgroup, for whose members the limit was set."""
    if not any(limit < 2**50 for limit in cgroup_limits()):
        raise RuntimeError("no memory cgroup limits this process: the fault would take the whole machine's memory")
    held = []
    while True:
        held.append(b"\x01" * 2**24)


class CommitPoints(WrappingStore):
    """Announces the named points of a commit, seen from the keys that are written."""

    def __init__(self, inner: ObjectStore, faults: Faults) -> None:
        super().__init__(inner)
        self._faults = faults

    def put(self, key: str, data: Bytes) -> None:
        """As the inner store; a manifest is a point before and after."""
        manifest = key.endswith(".manifest")
        if manifest:
            self._faults.reached("before_manifest", _step_of(key))
        super().put(key, data)
        if manifest:
            self._faults.reached("after_manifest", _step_of(key))

    def create(self, key: str, data: bytes) -> bool:
        """As the inner store; a commit is a point before and after."""
        commit = key.rsplit("/", 1)[-1].startswith("commit-")
        if commit:
            self._faults.reached("before_commit", _step_of(key))
        created = super().create(key, data)
        if commit:
            self._faults.reached("after_commit", _step_of(key))
        return created


def _step_of(key: str) -> int:
    """The step in "checkpoints/step-00000010/..."."""
    return int(key.split("/")[-2].removeprefix("step-"))
