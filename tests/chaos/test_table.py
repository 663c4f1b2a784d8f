"""The table of faults: fault -> class -> action -> steps lost, each injected for real into a whole run.

A run that is expected to finish ends bit for bit where the undisturbed one did. A few rows, drawn from a seed, run with every
test run; all of them with the slow ones.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from seaweed import BUCKET, SeaweedServer

from ftrain.compose.drill import damage
from ftrain.compose.proof import stored_digests
from recovery.codes import ExitCode
from recovery.events import CheckpointCommitted, CheckpointFailed
from tests.chaos.test_kills import SNAPSHOT_STEPS, STORE_STEPS, fault
from tests.commands import ftrain_json
from tests.conftest import remount_read_only
from tests.runs import TinyRun, finish, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

SEED = 20260
HANGS = ("--set", "recovery.hang_s=4", "--set", "recovery.hang_floor_s=4")
SOON = 2  # steps may end between what a strike looked at and its effect


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault. `class_` None: no interruption; `again`: the same command then finishes the run."""

    fault: str
    class_: str | None = "unknown"
    action: str | None = "restart"
    lost: int = SNAPSHOT_STEPS
    extra: str = ""
    options: tuple[str, ...] = ()
    strike: Callable[[TinyRun, subprocess.Popen[str]], None] | None = None
    code: ExitCode = ExitCode.DONE
    rank: int | None = 1
    again: bool = False
    env: dict[str, str] = field(default_factory=dict)


def text(words: str) -> str:
    """Rank 1 fails in the words of somebody's library."""
    return fault("step", 10, kind="raise") + f'text = "{words}"\n'


def to(kind: str, number: int) -> Callable[[TinyRun, subprocess.Popen[str]], None]:
    """Signal a process of the run once there is something to go back to."""

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
        os.kill(parent.pid if kind == "parent" else run.processes()[kind][0].pid, number)

    return strike


def damage_newest(run: TinyRun, parent: subprocess.Popen[str]) -> None:
    """A bit of the newest checkpoint flips, and then memory is lost with the agent."""
    run.wait_for(lambda events: sum(isinstance(event, CheckpointCommitted) for event in events) > 1)
    damage(Path(run.url), max(event.step for event in run.events() if isinstance(event, CheckpointCommitted)))
    os.kill(run.processes()["agent"][0].pid, signal.SIGKILL)


NONE = {"class_": None, "action": None, "lost": 0, "rank": None}
STOP = "stop_for_human"
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
    Row(fault="node", lost=STORE_STEPS + SOON, rank=None, strike=to("agent", signal.SIGKILL)),
    Row(fault="corrupt newest checkpoint", lost=2 * STORE_STEPS + SOON, rank=None, strike=damage_newest),
    Row(
        fault="SIGTERM with notice",
        class_=None,
        action=None,
        lost=0,
        rank=None,
        strike=to("parent", signal.SIGTERM),
        code=ExitCode.STOPPED,
        again=True,
    ),
]
ALWAYS = {row.fault for row in random.Random(SEED).sample(ROWS, 2)}


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.fault, marks=() if row.fault in ALWAYS else pytest.mark.slow) for row in ROWS]
)
def test_row(row: Row, tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=row.extra, env=row.env)
    check(run, row, unbroken)


def check(run: TinyRun, row: Row, unbroken: dict[str, str]) -> None:
    """The run takes the fault for what it is, does what is right, loses no more than allowed, and ends where it should."""
    parent = run.start(*row.options)
    if row.strike is not None:
        row.strike(run, parent)
    with no_process_left(run):
        code, output = finish(parent, 300)
    assert code == row.code, output
    told = ftrain_json("report", run.url, *(("--local-dir", run.local_dir) if run.local_dir else ()))["interruptions"]
    if row.class_ is None:
        assert told == []
    else:
        last = told[-1]
        assert (last["class"], last["action"], last["first_failing_rank"]) == (row.class_, row.action, row.rank)
        assert last["steps_lost"] <= row.lost
    if row.again:
        code, output = run.run(*row.options)
        assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)


# -- what needs a machine of its own -------------------------------------------------------------------------------------


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """`memory_group(bytes)` makes a memory cgroup with that limit (version 1 or 2) and gives its folder."""
    made: list[Path] = []

    def make(nbytes: int) -> Path:
        root = Path("/sys/fs/cgroup")
        first = root / "memory" if (root / "memory").is_dir() else root
        group = first / f"ftrain-test-{os.getpid()}"
        try:
            group.mkdir()
            made.append(group)
            limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
            limit.write_text(str(nbytes))
        except (OSError, StopIteration) as error:
            pytest.skip(f"no memory cgroup can be made: {error}")
        return group

    yield make
    for group in made:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and (group / "cgroup.procs").read_text().strip():
            time.sleep(0.05)
        group.rmdir()


@pytest.mark.slow
def test_out_of_memory_in_a_cgroup(
    memory_group: Callable[[int], Path], tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    group = memory_group(3 * 2**30)

    def enter(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        (group / "cgroup.procs").write_text(str(parent.pid))

    row = Row(fault="cgroup OOM", class_="host_oom", strike=enter, extra=fault("step", 10, kind="oom"))
    check(TinyRun(folder=tmp_path, corpus=corpus, extra=row.extra), row, unbroken)


@pytest.mark.slow
def test_a_file_system_that_becomes_read_only_for_a_while(
    small_disk: Callable[[int], Path], tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    disk = small_disk(40)
    run = TinyRun(folder=tmp_path / "config", corpus=corpus, url=str(disk / "run"), local_dir=str(tmp_path / "local"))

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
        remount_read_only(disk)
        run.wait_for(lambda events: any(isinstance(event, CheckpointFailed) for event in events))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

    check(run, Row(fault="read-only file system", **NONE, strike=strike), unbroken)


@pytest.mark.slow
def test_a_full_dev_shm(tmp_path: Path, corpus: str, unbroken: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mount namespace of its own: snapshots are in memfds, which do not care."""
    from tests import runs

    fill = "mount -t tmpfs -o size=64k full /dev/shm && ! dd if=/dev/zero of=/dev/shm/ballast 2>/dev/null"
    private = ["unshare", "--mount", "sh", "-c", f'{fill}; exec "$@"', "sh"]
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a mount namespace needs root")
    monkeypatch.setattr(runs, "FTRAIN", [*private, *runs.FTRAIN])
    check(TinyRun(folder=tmp_path, corpus=corpus), Row(fault="full /dev/shm", **NONE), unbroken)


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[SeaweedServer]:
    """A server that a test may end."""
    server = SeaweedServer(tmp_path / "seaweed")
    (tmp_path / "seaweed").mkdir()
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
@pytest.mark.s3
def test_a_store_that_is_down_for_a_minute(
    own_s3: SeaweedServer, tmp_path: Path, corpus: str, unbroken: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in own_s3.environment().items():
        monkeypatch.setenv(name, value)
    run = TinyRun(folder=tmp_path / "c", corpus=corpus, url=f"s3://{BUCKET}/down", local_dir=str(tmp_path / "local"))

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
        own_s3.stop()
        time.sleep(60)
        own_s3.start()

    check(run, Row(fault="S3 down for 60 s", **NONE, strike=strike), unbroken)


@pytest.mark.slow
@pytest.mark.s3
def test_wrong_credentials_are_refused_before_anything_is_started(
    s3: SeaweedServer, tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    run = TinyRun(folder=tmp_path, corpus=corpus, url=f"s3://{BUCKET}/refused", local_dir=str(tmp_path / "local"))
    code, output = run.run()
    assert code == ExitCode.STORAGE, output
    assert "Traceback" not in output
    assert not (run.local / "logs").exists()
