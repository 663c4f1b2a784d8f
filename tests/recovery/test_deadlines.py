"""How long a rank may be silent: learned by phase, between the floor and the configured limit."""

from __future__ import annotations

import pytest

from recovery.deadlines import Deadlines
from recovery.events import StepFinished
from recovery.heartbeat import Beat


def step(number: int, seconds: float, *, evaluate_s: float = 0.0, blocked_s: float = 0.0) -> StepFinished:
    end = 100.0 + seconds + evaluate_s + blocked_s
    return StepFinished(t=end, step=number, t_begin=100.0, t_end=end, evaluate_s=evaluate_s, blocked_s=blocked_s)


def allowed(deadlines: Deadlines, phase: str | None, *, warm: bool = True) -> float:
    beat = None if phase is None else Beat(rank=0, attempt=0, step=7, phase=phase)
    return deadlines.allowed_s(beat, warm=warm, hang_s=300.0, start_s=600.0)


def test_each_phase_has_its_own_yardstick() -> None:
    deadlines = Deadlines(floor_s=10.0)
    deadlines.learn([step(1, 4.0), step(2, 3.0, evaluate_s=20.0), step(3, 3.0, blocked_s=9.0)])
    assert allowed(deadlines, "forward") == pytest.approx(20.0)
    assert allowed(deadlines, "evaluate") == pytest.approx(100.0)
    assert allowed(deadlines, "checkpoint") == pytest.approx(45.0)


def test_neither_below_the_floor_nor_above_the_limit() -> None:
    deadlines = Deadlines(floor_s=10.0)
    deadlines.learn([step(1, 0.1)])
    assert allowed(deadlines, "forward") == 10.0
    deadlines.learn([step(2, 100.0)])
    assert allowed(deadlines, "forward") == 300.0


def test_what_was_never_seen_gets_the_configured_limit_and_a_first_step_that_of_a_start() -> None:
    deadlines = Deadlines(floor_s=10.0)
    deadlines.learn([step(1, 4.0)])
    assert allowed(deadlines, "evaluate") == 300.0
    assert allowed(deadlines, "forward", warm=False) == 600.0
    assert allowed(deadlines, None) == 600.0


def test_a_slow_step_is_forgotten_after_a_while() -> None:
    deadlines = Deadlines(floor_s=1.0)
    deadlines.learn([step(0, 50.0), *(step(number, 2.0) for number in range(1, 40))])
    assert allowed(deadlines, "forward") == pytest.approx(10.0)
