"""The rows of the table of faults that need a machine of their own, or a part of one: cgroups, disks, /dev/shm, clocks, stores,
nodes and their network. Whatever is filled, unplugged or turned back belongs to the test alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from seaweed import BUCKET, SeaweedServer

from ftrain.compose.proof import stored_digests
from recovery.events import CheckpointCommitted, CheckpointFailed, Ready, steps_of
from tests.chaos.table import MACHINES, Row, check, committed
from tests.chaos.test_disk import fill
from tests.chaos.test_nodes import MACHINE, link, network
from tests.conftest import remount_read_only
from tests.nodes_run import nodes_run
from tests.runs import TinyRun, finish, no_process_left

__all__ = ["network"]

pytestmark = [pytest.mark.dist, pytest.mark.chaos, pytest.mark.slow]

INJECTED: dict[str, str] = {}
"""Fault -> the test that injects it."""
HOUR = 3600


def injects(*faults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks the test of these rows."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        INJECTED.update(dict.fromkeys(faults, test.__name__))
        return test

    return mark


def failed_save(run: TinyRun) -> None:
    """Wait until a save has failed."""
    run.wait_for(lambda events: any(isinstance(event, CheckpointFailed) for event in events))


# -- memory --------------------------------------------------------------------------------------------------------------


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


@injects("cgroup OOM")
def test_out_of_memory_in_a_cgroup(
    memory_group: Callable[[int], Path], tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    group = memory_group(3 * 2**30)

    def enter(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        (group / "cgroup.procs").write_text(str(parent.pid))

    row = replace(MACHINES["cgroup OOM"], strike=enter)
    check(TinyRun(folder=tmp_path, corpus=corpus, extra=row.extra), row, unbroken)


@injects("full /dev/shm")
def test_a_full_dev_shm(tmp_path: Path, corpus: str, unbroken: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mount namespace of its own: snapshots are in memfds, which do not care."""
    from tests import runs

    filled = "mount -t tmpfs -o size=64k full /dev/shm && ! dd if=/dev/zero of=/dev/shm/ballast 2>/dev/null"
    private = ["unshare", "--mount", "sh", "-c", f'{filled}; exec "$@"', "sh"]
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a mount namespace needs root")
    monkeypatch.setattr(runs, "FTRAIN", [*private, *runs.FTRAIN])
    check(TinyRun(folder=tmp_path, corpus=corpus), MACHINES["full /dev/shm"], unbroken)


# -- disks ---------------------------------------------------------------------------------------------------------------


def on_disk(disk: Path, tmp_path: Path, corpus: str, row: Row) -> TinyRun:
    """A run whose checkpoints lie on `disk`, and nothing else does."""
    return TinyRun(
        folder=tmp_path / "config",
        corpus=corpus,
        url=str(disk / "run"),
        local_dir=str(tmp_path / "local"),
        extra=row.extra,
    )


@injects("full disk")
def test_a_disk_that_is_full_for_a_while(
    small_disk: Callable[[int], Path], tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    disk = small_disk(40)

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        committed(run)
        fill(disk)
        failed_save(run)
        (disk / "ballast").unlink()

    row = replace(MACHINES["full disk"], strike=strike)
    check(on_disk(disk, tmp_path, corpus, row), row, unbroken)


@injects("full local disk")
def test_a_local_disk_that_is_full_for_a_while(
    small_disk: Callable[[int], Path], tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    """Ledger, logs and metrics have no room; snapshots are in memory. What the ledger missed is written when there is room."""
    disk = small_disk(80)  # less is refused at the start

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        run.wait_for_step(3)
        fill(disk)
        said = run.local / "logs" / "coordinator.log"
        deadline = time.monotonic() + 60
        while len(list((Path(run.url) / "checkpoints").glob("*/commit-*"))) < 1:
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.05)
        (disk / "ballast").unlink()

    row = replace(MACHINES["full local disk"], strike=strike)
    run = TinyRun(
        folder=tmp_path / "config", corpus=corpus, url=str(tmp_path / "run"), local_dir=str(disk / "local"), extra=row.extra
    )
    check(run, row, unbroken)
    steps = [record.step for event in run.events() for record in steps_of(event)]
    assert steps == list(range(1, run.steps + 1))


@injects("read-only file system")
def test_a_file_system_that_becomes_read_only_for_a_while(
    small_disk: Callable[[int], Path], tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    disk = small_disk(40)

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        committed(run)
        remount_read_only(disk)
        failed_save(run)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

    row = replace(MACHINES["read-only file system"], strike=strike)
    check(on_disk(disk, tmp_path, corpus, row), row, unbroken)


# -- stores --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SeaweedServer]:
    """A server that a test may end, and that the environment points at."""
    server = SeaweedServer(tmp_path / "seaweed")
    server.start()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def in_bucket(tmp_path: Path, corpus: str, row: Row) -> TinyRun:
    return TinyRun(
        folder=tmp_path / "c", corpus=corpus, url=f"s3://{BUCKET}/run", local_dir=str(tmp_path / "local"), extra=row.extra
    )


@pytest.mark.s3
@injects("S3 down for 60 s")
def test_a_store_that_is_down_for_a_minute(
    own_s3: SeaweedServer, tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        committed(run)
        own_s3.stop()
        time.sleep(60)
        own_s3.start()

    row = replace(MACHINES["S3 down for 60 s"], strike=strike)
    check(in_bucket(tmp_path, corpus, row), row, unbroken)


def renew_secret(run: TinyRun, server: SeaweedServer, secret: str) -> None:
    """The run's key has this secret from now on. The ranks do nothing meanwhile: a server's start takes as long as it takes."""
    workers = run.processes()["worker"]
    for worker in workers:
        worker.suspend()
    server.stop()
    server.secret = secret
    server.start()
    for worker in workers:
        worker.resume()


def reasons(run: TinyRun) -> list[str]:
    return [event.reason for event in run.events() if isinstance(event, CheckpointFailed)]


@pytest.mark.s3
@injects("credentials that turn wrong for a while")
def test_credentials_that_turn_wrong_while_the_run_goes_on(
    own_s3: SeaweedServer, tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    """A save fails in words, no step is lost, and the next save finds what is right again."""
    right = own_s3.secret

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        committed(run)
        renew_secret(run, own_s3, "another")
        failed_save(run)
        renew_secret(run, own_s3, right)

    row = replace(MACHINES["credentials that turn wrong for a while"], strike=strike)
    run = in_bucket(tmp_path, corpus, row)
    check(run, row, unbroken)
    (reason,) = reasons(run)
    assert "the secret key does not belong to the access key" in reason
    assert [record.step for event in run.events() for record in steps_of(event)] == list(range(1, run.steps + 1))


@pytest.mark.s3
@injects("credentials that turn wrong for good")
def test_credentials_that_stay_wrong_to_the_end_cost_what_is_not_stored(
    own_s3: SeaweedServer, tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    right, row = own_s3.secret, MACHINES["credentials that turn wrong for good"]
    run = in_bucket(tmp_path, corpus, row)
    parent = run.start()
    committed(run)
    renew_secret(run, own_s3, "another")
    with no_process_left(run):
        code, output = finish(parent)
    assert code == row.code, output
    assert "the secret key does not belong to the access key" in output
    assert "Traceback" not in output
    stored = max(event.step for event in run.events() if isinstance(event, CheckpointCommitted))
    own_s3.stop()
    own_s3.secret = right
    own_s3.start()
    code, output = run.run()
    assert code == 0, output
    begun = [event.step for event in run.events() if isinstance(event, Ready)]
    assert begun[-1] == stored
    assert stored_digests(run.url) == (run.steps, unbroken)


@pytest.mark.s3
@injects("wrong credentials")
def test_wrong_credentials_are_refused_before_anything_is_started(
    own_s3: SeaweedServer, tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    row = MACHINES["wrong credentials"]
    run = in_bucket(tmp_path, corpus, row)
    code, output = run.run()
    assert code == row.code, output
    assert "Traceback" not in output
    assert not (run.local / "logs").exists()


# -- clocks --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """A file that says how far the wall clock of those who have `clock_env` in their environment is off, in seconds."""
    if find_spec("libfaketime") is None or not sys.platform.startswith("linux"):
        pytest.skip("libfaketime is missing: pip install libfaketime")
    file = tmp_path / "clock"
    file.write_text("+0")
    return file


def clock_env(clock: Path) -> dict[str, str]:
    """For the processes whose clock it is. The monotonic clock goes on, as it does when a machine's clock is set."""
    spec = find_spec("libfaketime")
    assert spec is not None
    assert spec.origin is not None
    library = Path(spec.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1"
    fixed = {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}
    return {"LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(clock), **fixed}


@pytest.mark.parametrize("seconds", [pytest.param(HOUR, id="ahead"), pytest.param(-HOUR, id="back")])
@injects("clock an hour ahead", "clock an hour back")
def test_a_clock_that_jumps(seconds: int, clock: Path, tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    """Nothing is decided by the wall clock: no lease ends, nobody is called hung, and the report's books still add up."""

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        committed(run)
        clock.write_text(f"{seconds:+d}")

    row = replace(MACHINES[f"clock an hour {'ahead' if seconds > 0 else 'back'}"], strike=strike)
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=row.extra, env=clock_env(clock))
    check(run, row, unbroken)
    ends = [record.t_end for event in run.events() for record in steps_of(event)]
    jumps = [later - end for end, later in pairwise(ends)]
    assert sum(jump * seconds > 0.9 * HOUR**2 for jump in jumps) == 1


@injects("clock of one node an hour ahead")
def test_the_clock_of_one_node_jumps(clock: Path, tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    row = MACHINES["clock of one node an hour ahead"]
    env = [f"{name}={value}" for name, value in clock_env(clock).items()]
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=MACHINE + row.extra)

    def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
        committed(run)
        clock.write_text(f"+{HOUR}")

    with nodes_run(run, "n1", "n2", inside=lambda node: ["env", *env] if node == "n2" else []):
        check(run, replace(row, strike=strike), unbroken)


# -- nodes ---------------------------------------------------------------------------------------------------------------


@injects("node killed")
def test_a_node_is_killed(tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    row = MACHINES["node killed"]
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=MACHINE + row.extra)
    with nodes_run(run, "n1", "n2") as nodes:

        def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
            committed(run)
            nodes.kill("n2")
            nodes.join("n3")

        check(run, replace(row, strike=strike), unbroken)


@injects("veth down")
def test_the_network_of_a_node_is_gone(network: Sequence[str], tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    """For longer than the lease: its ranks are ended by its own agent, and a spare takes their part."""
    bridge, *names = network
    row = MACHINES["veth down"]
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=f'{MACHINE}interface = "ftrain0,{bridge}"\n{row.extra}')
    inside = {"n1": names[0], "n2": names[1]}

    def enter(node: str) -> Sequence[str]:
        return ["ip", "netns", "exec", inside[node]] if node in inside else []

    with nodes_run(run, "n1", "n2", inside=enter) as nodes:

        def strike(run: TinyRun, parent: subprocess.Popen[str]) -> None:
            committed(run)
            link(names[1], "down")
            nodes.join("n3")
            run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 2)
            nodes.kill("n2")  # it knows of no end, and would call for ever

        check(run, replace(row, strike=strike), unbroken)
