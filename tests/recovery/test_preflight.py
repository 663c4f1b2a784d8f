"""Checks that pass, warn, fail, hang and die, and what each of them costs the others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from recovery import probes
from recovery.preflight import Check, Concern, examine
from recovery.timeouts import Timeouts, explain, misordered


def fine(word: str) -> str:
    return f"found {word}"


def concern() -> str:
    raise Concern("a little less than one would like")


def broken() -> str:
    raise ValueError("twelve is not seven")


def stuck() -> str:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
    return ""


def dies() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def noisy() -> str:
    os.write(1, b"this goes to standard output\n")
    return "quiet"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds this module."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def check(name: str, **more: object) -> Check:
    limits = {"limit_s": 60.0, **more}  # the child's first check imports this module, and pytest with it
    return Check(name=name, entry=f"tests.recovery.test_preflight:{name}", **limits)  # type: ignore[arg-type]


def test_each_answer_is_kept_apart() -> None:
    asked = [
        check("fine", args={"word": "it"}),
        check("concern"),
        check("broken", remedy="count again"),
        check("noisy"),
        check("missing"),
        check("fine", args={"word": "the end"}),
    ]
    found = examine(asked)
    assert [it.status for it in found] == ["ok", "warning", "failed", "ok", "failed", "ok"]
    assert found[0].text == "found it"
    assert found[2].line() == "broken: failed: twelve is not seven; count again"
    assert found[3].text == "quiet"


def test_what_hangs_or_dies_does_not_take_the_others_along() -> None:
    found = examine([check("dies"), check("stuck", limit_s=0.2), check("fine", args={"word": "the end"})])
    assert [it.status for it in found] == ["failed", "hung", "ok"]
    assert found[0].text == "the check's process died"
    assert found[1].text == "no answer within 0.2 s"


def test_no_question_no_child() -> None:
    assert examine([]) == []


# -- the probes -------------------------------------------------------------------------------------------------------


def test_a_healthy_node(tmp_path: Path) -> None:
    assert "renamed" in probes.disk(str(tmp_path / "new"), 1)
    assert list((tmp_path / "new").iterdir()) == []
    assert "127.0.0.1" in probes.port("127.0.0.1")
    assert "allocated" in probes.anonymous_memory()
    assert probes.interface("lo") == "lo is there"
    assert "needed" in probes.memory(0)
    assert "open files" in probes.descriptors(8)


def test_an_unfit_node(tmp_path: Path) -> None:
    with pytest.raises(probes.ProbeError, match="needed"):
        probes.disk(str(tmp_path), 1 << 62)
    with pytest.raises(probes.ProbeError, match=r"no network interface 'nope0'; there are .*lo"):
        probes.interface("nope0")
    with pytest.raises(probes.ProbeError, match="needed"):
        probes.descriptors(1 << 40)
    with pytest.raises(probes.ProbeError, match="are needed"):
        probes.memory(1 << 62)
    with pytest.raises(Concern, match="less than"):
        probes.shared_memory(str(tmp_path), 1 << 62)
    with pytest.raises(Concern, match="not there"):
        probes.shared_memory(str(tmp_path / "missing"))


# -- time limits ------------------------------------------------------------------------------------------------------

GOOD = {"collective_s": 120.0, "hang_s": 300.0, "start_s": 600.0, "stop_s": 120.0, "lease_s": 60.0}


def test_the_defaults_are_in_order() -> None:
    from ftrain.config import Recovery

    recovery = Recovery()
    assert misordered(Timeouts(**{name: getattr(recovery, name) for name in GOOD})) == []
    assert explain(Timeouts(**GOOD)) == ""


def test_all_that_is_wrong_is_in_one_message() -> None:
    text = explain(Timeouts(**{**GOOD, "hang_s": 60.0, "lease_s": 0.5}, scheduler_s=30.0, warning_s=100.0))
    assert "recovery.collective_s (120 s) must be shorter than recovery.hang_s (60 s)" in text
    assert "recovery.hang_s (60 s) must be shorter than the scheduler's limit (30 s)" in text
    assert "recovery.stop_s (120 s) must be shorter than the scheduler's kill (100 s)" in text
    assert "heartbeat (1 s) must be shorter than recovery.lease_s (0.5 s)" in text
    assert text.endswith(
        "(heartbeat = 1, collective_s = 120, hang_s = 60, start_s = 600, stop_s = 120, lease_s = 0.5, scheduler_s = 30, "
        "warning_s = 100)"
    )
