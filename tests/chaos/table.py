"""The table of faults: fault -> class -> action -> steps lost. Data, how one row is checked, and the table that the docs show.

    python -m tests.chaos.table       prints the table of docs/recovery.md

`ROWS` are injected into a plain run (tests.chaos.test_table); `MACHINES` need a machine of their own, or a part of one
(tests.chaos.test_table_machines). `MUST_HOLD` names every fault that has to be in the table, and the rows that are it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftrain.compose.proof import stored_digests
from ftrain.compose.victims import damage
from recovery.codes import ExitCode
from recovery.events import CheckpointCommitted
from tests.chaos.test_kills import SNAPSHOT_STEPS, STORE_STEPS, fault
from tests.commands import ftrain_json
from tests.runs import TinyRun, finish, no_process_left

HANGS = ("--set", "recovery.hang_s=4", "--set", "recovery.hang_floor_s=4")
SOON = 2  # steps may end between what a strike looked at and its effect
NOTICE_S = 30.0
LOST = {
    0: "none",
    SNAPSHOT_STEPS: "those since the newest snapshot",
    STORE_STEPS + SOON: "those since the newest checkpoint",
    2 * STORE_STEPS + SOON: "those since the checkpoint before it",
}
"""What the numbers of these runs (a snapshot every 3 steps, a checkpoint every 9) mean anywhere."""
Strike = Callable[[TinyRun, "subprocess.Popen[str]"], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault, and what must come of it.

    `class_` None: no interruption. `lost`: at most so many steps. `code`: of the run that was struck; `again`: the same command
    then finishes it. `limit_s`: seconds that the run has to end.
    """

    fault: str
    class_: str | None = "unknown"
    action: str | None = "restart"
    lost: int = SNAPSHOT_STEPS
    extra: str = ""
    options: tuple[str, ...] = ()
    strike: Strike | None = None
    code: ExitCode = ExitCode.DONE
    rank: int | None = 1
    again: bool = False
    env: dict[str, str] = field(default_factory=dict)
    limit_s: float = 300.0


def check(run: TinyRun, row: Row, unbroken: dict[str, str]) -> None:
    """The run takes the fault for what it is, does what is right, loses no more than allowed, and ends where it should."""
    parent = run.start(*row.options)
    if row.strike is not None:
        row.strike(run, parent)
    with no_process_left(run):
        code, output = finish(parent, row.limit_s)
    assert code == row.code, output
    told = ftrain_json("report", run.url, *(("--local-dir", run.local_dir) if run.local_dir else ()))["interruptions"]
    if row.class_ is None:
        assert told == []
    else:
        last = told[-1]
        assert (last["class"], last["action"], last["first_failing_rank"]) == (row.class_, row.action, row.rank), last
        assert last["steps_lost"] <= row.lost
    if row.again:
        code, output = run.run(*row.options)
        assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)


def committed(run: TinyRun) -> None:
    """Wait until there is something to go back to."""
    run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))


def text(words: str) -> str:
    """Rank 1 fails in the words of somebody's library."""
    return fault("step", 10, kind="raise") + f'text = "{words}"\n'


def to(kind: str, number: int) -> Strike:
    """Signal a process of the run once there is something to go back to."""

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        committed(run)
        os.kill(parent.pid if kind == "parent" else run.processes()[kind][0].pid, number)

    return strike


def damage_newest(run: TinyRun, parent: subprocess.Popen[str]) -> None:
    """A bit of the newest checkpoint flips, and then memory is lost with the agent."""
    run.wait_for(lambda events: sum(isinstance(event, CheckpointCommitted) for event in events) > 1)
    damage(Path(run.url), max(event.step for event in run.events() if isinstance(event, CheckpointCommitted)))
    os.kill(run.processes()["agent"][0].pid, signal.SIGKILL)


SLOWLY = fault("step", 1, rank=0, kind="slow")  # each of the steps takes a fifth of a second: time for something to happen
NONE = {"class_": None, "action": None, "lost": 0, "rank": None}
STOP = "stop_for_human"
NODE_LOST = {"class_": "node_failure", "action": "restart_exclude_node", "lost": STORE_STEPS + SOON, "extra": SLOWLY}
ROWS = [
    Row(fault="kill -9", extra=fault("step", 11)),
    Row(fault="segfault", class_="process_crash", extra=fault("step", 10, kind="segv")),
    Row(fault="abort", class_="process_crash", extra=fault("step", 10, kind="abort")),
    Row(fault="SIGSTOP", class_="collective_timeout", extra=fault("step", 10, kind="stop"), options=HANGS),
    Row(fault="endless loop", class_="collective_timeout", extra=fault("step", 10, kind="loop"), options=HANGS),
    Row(fault="lock never released", class_="collective_timeout", extra=fault("step", 10, kind="lock"), options=HANGS),
    Row(
        fault="mismatched collectives",
        class_="collective_timeout",
        action=STOP,
        extra=fault("gradients", 10, kind="part"),
        options=HANGS,
        code=ExitCode.GIVEN_UP,
        again=True,
    ),
    Row(
        fault="exception",
        class_="software_error",
        action=STOP,
        extra=fault("step", 10, kind="raise"),
        code=ExitCode.GIVEN_UP,
        again=True,
    ),
    Row(
        fault="import error after a restart",
        class_="dependency_error",
        action=STOP,
        extra=fault("step", 11) + fault("restore", 6, kind="import"),
        code=ExitCode.CONFIG,
        again=True,
    ),
    Row(
        fault="illegal address", class_="cuda_program_error", extra=text("CUDA error: an illegal memory access was encountered")
    ),
    Row(
        fault="GPU memory full",
        class_="cuda_oom",
        action=STOP,
        extra=text("CUDA out of memory. Tried to allocate 2.00 GiB"),
        code=ExitCode.GIVEN_UP,
        again=True,
    ),
    Row(
        fault="uncorrectable ECC",
        class_="gpu_memory_error",
        action="restart_exclude_node",
        extra=text("CUDA error: uncorrectable ECC error encountered"),
        code=ExitCode.RETRY_ELSEWHERE,
        again=True,
    ),
    Row(fault="NaN in one rank", **NONE, extra=fault("gradients", 10, kind="nan")),
    Row(fault="flipped bit in one rank's gradients", **NONE, extra=fault("gradients", 22, kind="flip")),
    Row(fault="keeper in an upload", **NONE, extra=fault("upload", 9)),
    Row(fault="coordinator", **NONE, strike=to("coordinator", signal.SIGKILL)),
    Row(fault="zygote", **NONE, strike=to("zygote", signal.SIGKILL)),
    Row(fault="agent, and its memory", lost=STORE_STEPS + SOON, rank=None, strike=to("agent", signal.SIGKILL)),
    Row(fault="corrupt newest checkpoint", lost=2 * STORE_STEPS + SOON, rank=None, strike=damage_newest),
    Row(
        fault="SIGTERM, 30 s before the end",
        **NONE,
        extra=SLOWLY,
        strike=to("parent", signal.SIGTERM),
        code=ExitCode.STOPPED,
        again=True,
        limit_s=NOTICE_S,
    ),
]
MACHINES = {
    row.fault: row
    for row in (
        Row(fault="cgroup OOM", class_="host_oom", extra=fault("step", 10, kind="oom")),
        Row(fault="full disk", **NONE, extra=SLOWLY),
        Row(fault="full local disk", **NONE, extra=SLOWLY),
        Row(fault="read-only file system", **NONE, extra=SLOWLY),
        Row(fault="full /dev/shm", **NONE),
        Row(fault="S3 down for 60 s", **NONE),
        Row(fault="wrong credentials", **NONE, code=ExitCode.STORAGE),
        Row(fault="credentials that turn wrong for a while", **NONE, extra=SLOWLY),
        Row(
            fault="credentials that turn wrong for good",
            **NONE | {"lost": STORE_STEPS + SOON},
            extra=SLOWLY,
            code=ExitCode.STORAGE,
        ),
        Row(fault="clock an hour ahead", **NONE, extra=SLOWLY),
        Row(fault="clock an hour back", **NONE, extra=SLOWLY),
        Row(fault="clock of one node an hour ahead", **NONE, extra=SLOWLY),
        Row(fault="node killed", **NODE_LOST),
        Row(fault="veth down", **NODE_LOST, options=("--set", "recovery.lease_s=6")),
    )
}
MUST_HOLD: dict[str, Sequence[str]] = {
    "kill -9": ["kill -9"],
    "segfault": ["segfault"],
    "abort": ["abort"],
    "SIGSTOP": ["SIGSTOP"],
    "endless loop": ["endless loop"],
    "Python exception": ["exception"],
    "import error after restart": ["import error after a restart"],
    "cgroup OOM": ["cgroup OOM"],
    "full disk": ["full disk", "full local disk"],
    "read-only file system": ["read-only file system"],
    "full /dev/shm": ["full /dev/shm"],
    "S3 server down for 60 s": ["S3 down for 60 s"],
    "wrong credentials": [
        "wrong credentials",
        "credentials that turn wrong for a while",
        "credentials that turn wrong for good",
    ],
    "corrupt newest checkpoint": ["corrupt newest checkpoint"],
    "NaN in one rank": ["NaN in one rank"],
    "flipped bit in one rank's gradients": ["flipped bit in one rank's gradients"],
    "SIGTERM with 30 s notice": ["SIGTERM, 30 s before the end"],
    "veth down between two nodes": ["veth down"],
    "node kill": ["node killed", "agent, and its memory"],
    "coordinator kill": ["coordinator"],
    "clock jump": ["clock an hour ahead", "clock an hour back", "clock of one node an hour ahead"],
    "CUDA-like error texts": ["illegal address", "GPU memory full", "uncorrectable ECC"],
}


def markdown() -> str:
    """The table as the docs show it."""
    lines = ["| Fault | Class | Action | Steps lost, at most | Exit code |", "|---|---|---|---|---|"]
    for row in (*ROWS, *MACHINES.values()):
        class_, action = row.class_ or "no interruption", (row.action or "").replace("_", " ") or "none needed"
        lines.append(f"| {row.fault} | {class_} | {action} | {LOST[row.lost]} | {int(row.code)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
