"""How fast a run is now, and when it will be done, measured at its present size alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.compose.speed import Speed
from ftrain.course import updates_left
from ftrain.load import load
from recovery.events import AttemptStarted, Event, PhaseBegan, StepFinished

CONFIG = str(Path(__file__).parents[3] / "configs" / "tiny-dp2.toml")
T0 = 1_700_000_000.0


def steps(first: int, count: int, seconds: float) -> list[Event]:
    return [
        StepFinished(t=T0, attempt=0, step=step, t_begin=T0, t_end=T0 + seconds, tokens=512)
        for step in range(first, first + count)
    ]


def after(*events: Event) -> Speed:
    speed = Speed()
    for event in events:
        speed.add(event)
    return speed


def started(attempt: int, ranks: int) -> Event:
    return AttemptStarted(t=T0, attempt=attempt, layout=f"dp{ranks}", ranks=ranks, source="memory")


def test_row_47_the_end_is_predicted_from_the_newest_size_alone() -> None:
    config = load(CONFIG, ("run.steps=100",))
    assert after(started(0, 1), *steps(1, 20, 4.0)).eta_s(config, 20) == pytest.approx(80 * 4.0)
    grown = after(started(0, 1), *steps(1, 20, 4.0), started(1, 2))
    assert grown.eta_s(config, 20) is None, "nothing was measured of it yet"
    assert after(started(0, 1), *steps(1, 20, 4.0), started(1, 2), *steps(21, 1, 2.0)).eta_s(config, 21) == pytest.approx(
        79 * 2.0
    )
    again = after(started(0, 1), *steps(1, 20, 4.0), started(1, 1), *steps(21, 1, 4.0))
    assert again.eta_s(config, 21) == pytest.approx(79 * 4.0), "an attempt of the same size goes on with what was measured"


def test_a_new_phase_of_the_same_layout_is_another_size() -> None:
    config = load(CONFIG, ("run.steps=100",))
    began = PhaseBegan(t=T0, phase=1, phases=2, step=20)
    found = after(started(0, 1), *steps(1, 20, 4.0), began, started(1, 1), *steps(21, 1, 1.0))
    assert found.eta_s(config, 21) == pytest.approx(79 * 1.0)


def test_what_is_left_is_counted_in_tokens() -> None:
    """Updates of twice the tokens take about twice the time."""
    plain = load(CONFIG, ("run.steps=100",))
    assert [updates_left(plain, step) for step in (0, 1, 40, 100)] == [100, 99, 60, 0]
    tokens = plain.batch.global_batch * plain.data.seq_len
    phased = load(CONFIG, ("run.steps=100", f"phases=[{{from_tokens = {50 * tokens}, data = {{seq_len = 128}}}}]"))
    assert updates_left(phased, 40) == 10 + 2 * 50
    assert updates_left(phased, 60) == 40
