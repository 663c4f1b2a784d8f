"""A fault that a run's config injects is told before it strikes, where the report of what follows finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from ftrain.config import Fault, FaultKind, FaultPoint
from ftrain.faults import Faults, hold, marker
from recovery.classify import classify, explain
from recovery.evidence import Evidence, log_tails
from recovery.injected import announcement
from tests.recovery.verdicts import STEPS

STRIKE = """
import sys
from pathlib import Path
from ftrain.config import Fault
from ftrain.faults import Faults

faults = [Fault(kind="slow", step=3), Fault(kind=sys.argv[2], step=7, rank=1)]
own = Faults(faults, Path(sys.argv[1]), rank=1)
for step in range(1, 9):
    own.reached("step", step)
"""


@pytest.mark.parametrize(
    ("kind", "status", "class_", "reason"),
    [
        ("kill", -9, "unknown", "rank 1 was killed by SIGKILL, injected by this run's config"),
        ("exit", 1, "unknown", "rank 1 ended with exit code 1"),
        ("raise", 1, "software_error", "rank 1: RuntimeError: injected fault at 'step', step 7"),
    ],
)
def test_a_fault_is_told_in_the_log_of_the_process_before_it_strikes(
    tmp_path: Path, kind: str, status: int, class_: str, reason: str
) -> None:
    log = tmp_path / "rank.log"
    with log.open("wb") as out:
        argv = [sys.executable, "-P", "-c", STRIKE, str(tmp_path / "faults"), kind]
        assert subprocess.run(argv, stderr=out, check=False).returncode == status
    said = f"[rank1]: injected by this run's config: faults.1 {kind} at 'step', step 7"
    lines = log_tails({1: log}).log
    assert lines[0] == said
    verdict = classify(Evidence(exit={"0": None, "1": status}, order=("1",), log=lines, steps=6))
    assert (verdict.class_, verdict.first_failing_rank, verdict.reason) == (class_, 1, reason)
    assert said in [line.text for line in verdict.evidence]
    without = classify(msgspec.structs.replace(Evidence(exit={"0": None, "1": status}, order=("1",), steps=6), log=lines[1:]))
    assert (without.class_, without.confidence, without.action) == (verdict.class_, verdict.confidence, verdict.action)


def test_a_fault_that_is_held_fires_once_when_its_hold_is_gone(tmp_path: Path) -> None:
    hold(tmp_path, 0).touch()
    faults = Faults([Fault(kind="raise", step=3)], tmp_path, rank=0)
    for step in range(1, 6):
        faults.reached("step", step)
    assert not marker(tmp_path, 0).exists()
    hold(tmp_path, 0).unlink()
    with pytest.raises(RuntimeError, match="injected fault at 'step', step 6"):
        faults.reached("step", 6)
    assert marker(tmp_path, 0).exists()
    faults.reached("step", 7)


@pytest.mark.parametrize("kind", get_args(FaultKind))
@pytest.mark.parametrize("point", get_args(FaultPoint))
def test_the_words_of_an_injected_fault_decide_nothing(kind: str, point: str) -> None:
    """What is weighed with them is what was weighed without: the class of a drilled failure is the class of a real one."""
    log = [*STEPS, "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:1234"]
    end = {"exit": {"0": 1, "1": -9}, "order": ["1", "0"]}
    said = f"[rank1]: {announcement(0, kind, point, 87)}"
    bare, told = (explain(msgspec.convert({**end, "log": lines}, Evidence)) for lines in (log, [*log, said]))
    assert told.considered == bare.considered
    assert told.discarded == bare.discarded
    for field in ("class_", "component", "first_failing_rank", "retryable", "action", "confidence", "signature"):
        assert getattr(told.verdict, field) == getattr(bare.verdict, field)
    assert [line.text for line in told.verdict.evidence] == [*(line.text for line in bare.verdict.evidence), said]
    assert ("injected by this run's config" in told.verdict.reason) is (kind == "kill")  # the others send no such signal
