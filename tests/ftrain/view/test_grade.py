"""Predictions beside measurements: figures from the planner, from the metrics, and their quotient."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftrain.plan import memory, profile, schedule
from ftrain.plan.setup import Setup, options_of
from ftrain.plan.time import step as predicted_step
from ftrain.view.grade import FILE, Grade, grade, keep, lines
from ftrain.view.pace import pace
from ftrain.view.record import recorded
from tests.ledgers import Story, config

H100 = ("machine.hardware=h100", "machine.compute_dtype=bfloat16")
MEAN = {"compute": 0.6, "tp": 0.0, "cp": 0.0, "pp": 0.05, "dp": 0.05, "bubble": 0.25, "imbalance": 0.05}


def line(step: int, **changes: Any) -> dict[str, Any]:
    worst = {name: [0, seconds] for name, seconds in MEAN.items()}
    peaks = [[rank, rank % 2, 10, 20, (3 + rank) << 20] for rank in range(4)]
    return {"attempt": 0, "layout": "tp1 x pp2", "step": step, "mean": MEAN, "worst": worst, "memory": peaks, **changes}


def graded(*overrides: str, metrics: list[dict[str, Any]] | None = None) -> Grade:
    story = Story(config("parallel.pp=2", *overrides)).start().steps(20, seconds=1.0).end()
    return grade(recorded("runs/a", story.events, [line(step) for step in range(1, 21)] if metrics is None else metrics))


def row(found: Grade, key: str, stage: int | None = None) -> tuple[float | None, float | None, float | None]:
    return next((row.predicted, row.measured, row.error) for row in found.rows if (row.key, row.stage) == (key, stage))


def test_every_stage_has_its_memory_and_the_run_its_step_and_bubble() -> None:
    found = graded(*H100)
    setup_config = config("parallel.pp=2", *H100)
    setup = Setup(config=setup_config, profile=profile.load("h100"), options=options_of(setup_config))
    ranks = memory.all_ranks(setup)
    for pp in range(2):
        peak = (5 + pp) << 20  # ranks 2 and 3 are the fullest of their stages
        assert row(found, "memory", pp) == (float(ranks[pp].total), peak, pytest.approx(peak / float(ranks[pp].total) - 1))
    seconds = predicted_step(setup).total
    assert row(found, "step_s") == (seconds, 1.0, pytest.approx(1 / seconds - 1))
    line_ = schedule.uneven(setup)
    assert line_ is not None
    bubble = float(line_.bubble_of_total())
    idle = 0.3 / (0.3 + 0.6)  # bubble and imbalance, over these and compute
    assert row(found, "bubble") == (pytest.approx(bubble), pytest.approx(idle), pytest.approx(idle / bubble - 1))
    assert row(found, "exposed")[1] == pytest.approx(0.10)


def test_without_a_peak_no_time_is_predicted() -> None:
    found = graded()
    assert found.hardware == "laptop"
    assert row(found, "step_s") == (None, 1.0, None)


def test_without_metrics_what_the_ledger_knows_is_still_graded() -> None:
    found = graded(*H100, metrics=[])
    assert row(found, "step_s")[1] == 1.0
    assert row(found, "memory", 0)[1] is None
    assert any("step" in text for text in lines(found))


def test_the_error_is_kept_beside_the_run(tmp_path: Path) -> None:
    found = graded(*H100)
    keep(found, tmp_path)
    kept = json.loads((tmp_path / FILE).read_text())
    assert [entry["error"] for entry in kept["rows"]] == [row.error for row in found.rows]
    keep(found, tmp_path / "elsewhere")  # a run of another machine: nothing to keep it in
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_without_a_readable_config_says_so() -> None:
    story = Story(config()).start().steps(3).end()
    begin = msgspec.structs.replace(story.events[0], config={"run": {"url": "runs/a", "steps_of_another_version": 3}})
    assert "no config" in grade(recorded("runs/a", [begin, *story.events[1:]])).note


def test_the_pace_of_each_layout_and_the_time_that_is_left() -> None:
    """40 of 100 steps on 4 ranks at 1 s, then 20 on 2 ranks at 1.6 s: a rank is worth 125 % of what it was."""
    story = Story(config(), layout="dp4").start(start_s=5.0).steps(41, seconds=1.0)
    story.die().start(layout="dp2", ranks=2, start_s=5.0).steps(21, seconds=1.6)
    found = pace(recorded("runs/a", story.events))
    assert [(row.layout, row.ranks) for row in found.rows] == [("dp4", 4), ("dp2", 2)]
    assert [row.step_s for row in found.rows] == pytest.approx([1.0, 1.6])
    assert found.rows[1].per_rank == pytest.approx(1.25)
    assert found.steps_left == 100 - 62
    wall = 5 + 41 + 2 + 5 + 21 * 1.6
    assert found.eta_s == pytest.approx(38 * 1.6 / ((41 + 21 * 1.6) / wall))
