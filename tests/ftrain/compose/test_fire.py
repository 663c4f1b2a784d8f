"""When a drill strikes, seen from a ledger and markers that the test writes: no process is needed for that."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ftrain.compose.course import Course
from ftrain.compose.drill import variant
from ftrain.compose.fire import VERDICT_S, Fire
from ftrain.compose.strikes import (
    Strike,
    inside,
)
from ftrain.faults import hold, marker
from ftrain.load import load
from recovery.events import InterruptionClassified, StepFinished
from recovery.ledger import Ledger
from recovery.verdict import Verdict

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-dp2.toml"


def test_a_run_goes_on_after_a_strike_when_two_new_steps_have_ended_after_it(tmp_path: Path) -> None:
    """Not when steps are told of that had ended before: reports may be half a second on their way."""
    course = Course(variant(load(str(CONFIG)), tmp_path / "broken"), tmp_path)
    ledger = Ledger(course.local / "ledger", epoch=0)

    def goes_on(*steps: tuple[int, float]) -> bool:
        for step, t in steps:
            ledger.append(StepFinished(t=t, attempt=0, step=step, t_begin=t - 1.0, t_end=t))
        course.look()
        return course.goes_on

    assert goes_on((1, 101.0), (2, 102.0))
    course.watch(105.5)
    assert not goes_on((3, 103.0), (4, 104.0), (5, 105.0))  # told late
    assert not goes_on((6, 106.0))  # it was under way
    assert not goes_on((5, 107.0), (6, 108.0))  # done again
    assert goes_on((7, 109.0))
    ledger.close()


UNKNOWN = Verdict(class_="unknown", component="unknown")


class UnderFire:
    """A run under fire without its processes: its ledger is written, and its faults made, by the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
        strikes = [Strike(after_s=0.0, kind=kind, rank=1) for kind in kinds]
        self.course = Course(variant(load(str(CONFIG)), folder / "broken", inside(strikes)), folder)
        workers = {"1": {"pid": 2**22 + 1, "ended": False}}  # beyond the largest pid there is
        monkeypatch.setattr(self.course, "status", lambda: {"phase": "running", "agent_pid": 0, "workers": workers})
        self.course.committed = [1]
        self.faults = self.course.local / "faults"
        self._ledger = Ledger(self.course.local / "ledger", epoch=0)
        self._said: list[str] = []
        self._fire = Fire(self.course, strikes, self._said.append)

    def step(self, step: int, t: float) -> None:
        self._ledger.append(StepFinished(t=t, attempt=0, step=step, t_begin=t - 1.0, t_end=t))

    def judge(self, t: float) -> None:
        self._ledger.append(InterruptionClassified(t=t, attempt=0, verdict_id="1", verdict=UNKNOWN))

    def make(self, number: int, t: float) -> None:
        marker(self.faults, number).touch()
        os.utime(marker(self.faults, number), (t, t))

    def tick(self) -> tuple[list[str], bool]:
        """What has been struck by now, and whether the fire is over."""
        self.course.look()
        over = self._fire.tick()
        return [strike.kind for strike in self._fire.struck], over


def test_what_a_process_does_to_itself_is_held_until_it_is_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fire = UnderFire(tmp_path, monkeypatch, "flip", "nan")
    assert all(hold(fire.faults, number).exists() for number in (0, 1))
    fire.step(1, 101.0)
    fire.step(2, 102.0)
    assert fire.tick() == ([], False)
    assert [hold(fire.faults, number).exists() for number in (0, 1)] == [False, True]
    fire.step(3, 103.0)
    fire.step(4, 104.0)
    assert fire.tick() == ([], False), "the run goes on, but the fault is yet to come"
    assert hold(fire.faults, 1).exists()
    fire.make(0, 105.0)
    assert fire.tick() == (["flip"], False)
    fire.step(5, 106.0)
    assert fire.tick() == (["flip"], False)
    assert hold(fire.faults, 1).exists()
    fire.step(6, 107.0)
    assert fire.tick() == (["flip"], False)
    assert not hold(fire.faults, 1).exists()
    fire.make(1, 107.5)
    assert fire.tick() == (["flip", "nan"], False)
    fire.step(7, 108.0)
    fire.step(8, 109.0)
    assert fire.tick() == (["flip", "nan"], True)


def test_nothing_is_struck_before_the_verdict_on_the_last_strike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent, say, is missed some seconds after its death: a strike in between would have no verdict of its own."""
    now = time.time()
    fire = UnderFire(tmp_path, monkeypatch, "worker-kill", "nan")
    fire.step(1, now - 2.0)
    fire.step(2, now - 1.0)
    assert fire.tick() == (["worker-kill"], False)
    fire.step(3, now + 10.0)
    fire.step(4, now + 11.0)
    assert fire.tick() == (["worker-kill"], False)
    assert hold(fire.faults, 0).exists()
    fire.judge(now + 12.0)
    fire.step(5, now + 11.5)
    assert fire.tick() == (["worker-kill"], False)
    fire.step(6, now + 13.0)
    assert fire.tick() == (["worker-kill"], False)
    assert hold(fire.faults, 0).exists(), "one step alone may have been all but finished"
    fire.step(7, now + 14.0)
    fire.tick()
    assert not hold(fire.faults, 0).exists()


def test_a_strike_on_which_there_is_no_verdict_is_shown_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fire = UnderFire(tmp_path, monkeypatch, "gpu-error")
    fire.step(1, 101.0)
    fire.step(2, 102.0)
    fire.tick()
    fire.make(0, time.time() - VERDICT_S)
    fire.step(3, time.time() + 1.0)
    fire.step(4, time.time() + 2.0)
    assert fire.tick() == (["gpu-error"], False)
    fire.step(5, time.time() + 3.0)
    fire.step(6, time.time() + 4.0)
    assert fire.tick() == (["gpu-error"], True)


def test_a_run_that_was_asked_to_stop_is_started_again_before_the_next_strike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    fire = UnderFire(tmp_path, monkeypatch, "sigterm")
    fire.step(1, now - 2.0)
    fire.step(2, now - 1.0)
    with subprocess.Popen(["sleep", "600"]) as parent:
        fire.course.parent = parent.pid
        assert fire.tick() == (["sigterm"], False)
        assert parent.wait() == -signal.SIGTERM
    fire.step(3, now + 10.0)
    fire.step(4, now + 11.0)
    assert fire.tick() == (["sigterm"], False)
    fire.course.parent += 1
    assert fire.tick() == (["sigterm"], True)
