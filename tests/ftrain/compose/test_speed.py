"""How fast a run is now, and when it will be done, measured at its present size alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ftrain.compose.speed import Speed
from ftrain.course import Cursor, cursor_at, updates_left
from ftrain.load import load
from recovery.events import AttemptStarted, Event, PhaseBegan, StepFinished

CONFIG = str(Path(__file__).parents[3] / "configs" / "tiny-dp2.toml")
T0 = 1_700_000_000.0


def steps(first: int, count: int, seconds: float) -> list[Event]:
    return [
        StepFinished(t=T0, attempt=0, step=step, t_begin=T0, t_end=T0 + seconds, tokens=512, sequences=8)
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
    config = load(CONFIG, ("run.steps=100", "batch.global_batch=8"))
    at = partial(cursor_at, config)
    assert after(started(0, 1), *steps(1, 20, 4.0)).eta_s(config, at(20)) == pytest.approx(80 * 4.0)
    grown = after(started(0, 1), *steps(1, 20, 4.0), started(1, 2))
    assert grown.eta_s(config, at(20)) is None, "nothing was measured of it yet"
    assert after(started(0, 1), *steps(1, 20, 4.0), started(1, 2), *steps(21, 1, 2.0)).eta_s(config, at(21)) == pytest.approx(
        79 * 2.0
    )
    again = after(started(0, 1), *steps(1, 20, 4.0), started(1, 1), *steps(21, 1, 4.0))
    assert again.eta_s(config, at(21)) == pytest.approx(79 * 4.0), "an attempt of the same size goes on with what was measured"


def test_a_new_phase_of_the_same_layout_is_another_size() -> None:
    config = load(CONFIG, ("run.steps=100", "batch.global_batch=8"))
    began = PhaseBegan(t=T0, phase=1, phases=2, step=20)
    found = after(started(0, 1), *steps(1, 20, 4.0), began, started(1, 1), *steps(21, 1, 1.0))
    assert found.eta_s(config, cursor_at(config, 21)) == pytest.approx(79 * 1.0)


def test_what_is_left_is_counted_in_tokens() -> None:
    """Updates of twice the tokens take about twice the time."""
    plain = load(CONFIG, ("run.steps=100",))
    tokens = plain.batch.global_batch * plain.data.seq_len
    assert [updates_left(plain, cursor_at(plain, step), tokens) for step in (0, 1, 40, 100)] == [100, 99, 60, 0]
    phased = load(CONFIG, ("run.steps=100", f"phases=[{{from_tokens = {50 * tokens}, data = {{seq_len = 128}}}}]"))
    assert updates_left(phased, cursor_at(phased, 40), tokens) == 10 + 2 * 50
    assert updates_left(phased, cursor_at(phased, 60), 2 * tokens) == 40


def test_the_end_follows_from_what_was_read_and_not_from_what_the_config_would_have_read() -> None:
    """40 updates were of half the sequences, so the phase that begins at a token is 30 updates away and not 10."""
    tokens = (plain := load(CONFIG, ("run.steps=100",))).batch.global_batch * plain.data.seq_len
    phased = load(CONFIG, ("run.steps=100", f"phases=[{{from_tokens = {50 * tokens}, data = {{seq_len = 128}}}}]"))
    read = Cursor.of({"step": 40, "sequences": 40 * plain.batch.global_batch // 2})
    assert updates_left(phased, read, tokens) == 30 + 2 * 30


def test_what_is_told_of_one_moment_is_of_the_same_steps() -> None:
    """Tokens a second times seconds of a step are the tokens of a step, and the time left is so many of those steps."""
    config = load(CONFIG, ("run.steps=100", "batch.global_batch=8"))
    tokens = 8 * config.data.seq_len
    events = [
        StepFinished(t=T0, attempt=0, step=step, t_begin=T0, t_end=T0 + (9.0 if step == 1 else 0.2 + 0.01 * (step % 7)),
                     tokens=tokens, sequences=8)
        for step in range(1, 61)
    ]  # fmt: skip
    found = after(started(0, 1), *events)
    told = found.status()
    mean = sum(0.2 + 0.01 * (step % 7) for step in range(41, 61)) / 20
    assert told["step_s"] == pytest.approx(mean)
    assert told["tokens_per_s"] == pytest.approx(tokens / mean)
    assert found.eta_s(config, cursor_at(config, 60)) == pytest.approx(40 * mean)


def test_the_first_step_of_an_attempt_counts_only_until_there_is_another() -> None:
    assert after(started(0, 1), *steps(1, 1, 30.0)).step_s == 30.0
    assert after(started(0, 1), *steps(1, 1, 30.0), *steps(2, 2, 1.0)).step_s == 1.0
    assert after(started(0, 1), *steps(1, 2, 1.0), started(1, 1), *steps(2, 1, 30.0), *steps(3, 1, 1.0)).step_s == 1.0
    grown = after(started(0, 1), *steps(1, 1, 30.0), started(1, 2), *steps(1, 1, 20.0), *steps(2, 1, 2.0))
    assert grown.step_s == 2.0


def test_nothing_is_told_before_the_first_step_nor_of_tokens_that_nobody_counts() -> None:
    assert Speed().status() == {"step_s": None, "tokens_per_s": None}
    assert Speed().text() == ""
    silent = after(started(0, 1), StepFinished(t=T0, attempt=0, step=1, t_begin=T0, t_end=T0 + 1.0))
    assert silent.status() == {"step_s": 1.0, "tokens_per_s": None}
    assert silent.text() == ""


def test_rates_of_a_line_are_told_at_the_pace_of_now_and_only_at_its_own_size() -> None:
    line = {"layout": "dp1", "step": 21, "seconds": 2.0, "sequences": 8, "tflops": 1.0, "tflops_full": 1.5, "mfu": None,
            "mfu_full": None}  # fmt: skip
    found = after(started(0, 1), *steps(20, 5, 1.0))
    assert found.paced(line)["tflops"] == pytest.approx(2.0)
    assert found.paced({**line, "step": 19})["tflops"] is None, "of a step before this size"
    back = after(started(0, 1), *steps(20, 5, 1.0), started(1, 1), *steps(11, 3, 1.0))
    assert back.paced({**line, "step": 12})["tflops"] == pytest.approx(2.0), "of a step that is done again"
    assert after(started(0, 2), *steps(20, 5, 1.0)).paced(line)["tflops"] is None
