"""Whole runs with a rank that stands still: found, told apart, named with its line, and survived bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.events import InterruptionClassified, Suspected
from tests.chaos.test_kills import check_same_end, fault
from tests.runs import TinyRun, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        pytest.param("stop", "stopped: stopped by a signal", id="SIGSTOP"),
        pytest.param("loop", "loop: runs without end at ftrain/faults.py", id="endless loop"),
        pytest.param("lock", "lock: waits for a lock or a message at ftrain/faults.py", id="lock", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_still(kind: str, says: str, tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=fault("step", 10, kind=kind))
    with no_process_left(run):
        code, output = run.run("--set", "recovery.hang_s=4", "--set", "recovery.hang_floor_s=4")
    assert code == 0, output
    check_same_end(run, unbroken)
    told = run.events()
    (verdict,) = [event.verdict for event in told if isinstance(event, InterruptionClassified)]
    assert (verdict.class_, verdict.first_failing_rank) == ("collective_timeout", 1)
    found = [event for event in told if isinstance(event, Suspected)][-1]
    assert found.rank == 1
    assert found.reason.startswith(says)
