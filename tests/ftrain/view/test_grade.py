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
from ftrain.plan.volume import volumes
from ftrain.view.grade import FILE, Grade, grade, grades, keep, lines
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


def test_each_layout_is_graded_by_its_own_prediction_and_its_own_steps() -> None:
    story = Story(config("parallel.pp=2", *H100), layout="pp2 x dp2").start().steps(21, seconds=1.0)
    story.die().start(layout="pp2 x dp1", ranks=2).steps(21, seconds=3.0).end()
    metrics = [line(step, layout="pp2 x dp2", memory=[[0, 0, 10, 20, 3 << 20]]) for step in range(1, 22)]
    metrics[-1]["layout"] = "pp2 x dp1"  # written when the next layout was chosen already
    metrics += [line(step, attempt=1, layout="pp2 x dp1", memory=[[0, 0, 10, 20, 7 << 20]]) for step in range(22, 43)]
    wide, narrow = grades(recorded("runs/a", story.events, metrics))
    for found, ranks, step_s, peak in ((wide, 4, 1.0, 3 << 20), (narrow, 2, 3.0, 7 << 20)):
        own = config("parallel.pp=2", f"parallel.ranks={ranks}", *H100)
        setup = Setup(config=own, profile=profile.load("h100"), options=options_of(own))
        assert f"on {ranks} ranks" in found.heading
        assert row(found, "step_s")[:2] == (predicted_step(setup).total, step_s)
        assert row(found, "memory", 0)[:2] == (float(memory.all_ranks(setup)[0].total), peak)
        assert found.heading in lines(found)[0]
    assert "steps 1 to 21" in wide.heading
    assert "steps 22 to 42" in narrow.heading


def test_a_start_that_failed_predicts_nothing_of_the_steps_before_it() -> None:
    story = Story(config("parallel.pp=2", *H100)).start().steps(20).launch("parallel.pp=2", "model.ffn=8192")
    (found,) = grades(recorded("runs/a", story.start(source="storage", ready=False).die().end().events))
    assert row(found, "memory", 0)[0] == row(graded(*H100), "memory", 0)[0]
    assert found.hardware == "h100"


def test_a_ramp_is_graded_by_the_steps_of_its_newest_batch_and_a_prediction_for_it() -> None:
    ramped = config(
        "batch.global_batch=32", "batch.ramp=[{global_batch=8, tokens=100000}, {global_batch=16, tokens=200000}]", *H100
    )
    story = Story(ramped).start().steps(9, seconds=1.0, tokens=8 * 64).steps(5, seconds=3.0, tokens=16 * 64).end()
    found = grade(recorded("runs/a", story.events, []))
    own = config("batch.global_batch=16", *H100)
    setup = Setup(config=own, profile=profile.load("h100"), options=options_of(own))
    assert row(found, "step_s")[:2] == (predicted_step(setup).total, 3.0)


@pytest.mark.parametrize("change", [{"layout": "tp9"}, {"config": {"model": {"of": "another version"}}}])
def test_a_layout_whose_config_is_not_told_is_not_predicted_by_another_ones(change: dict[str, Any]) -> None:
    story = Story(config("parallel.pp=2")).start().steps(5).end()
    events = [msgspec.structs.replace(story.events[0], **change), *story.events[1:]]
    (found,) = grades(recorded("runs/a", events))
    assert "no config" in found.note


BIG = ("model.hidden=4096", "model.ffn=16384")


@pytest.mark.parametrize(
    ("overrides", "reserved", "peak", "why"),
    [
        pytest.param(BIG, 9 << 30, 6 << 30, "", id="big enough"),
        pytest.param((), 300 << 20, 50 << 20, "not comparable at this size", id="Python and libraries are most of it"),
        pytest.param(BIG, 0, 9 << 30, "not comparable: the whole process", id="earlier versions knew only the whole process"),
    ],
)
def test_a_cpu_ranks_private_memory_is_graded_where_it_is_mostly_tensors(
    overrides: tuple[str, ...], reserved: int, peak: int, why: str
) -> None:
    metrics = [line(step, device="cpu", memory=[[0, 0, 40 << 20, reserved, peak]]) for step in range(1, 21)]
    found = graded(*overrides, metrics=metrics)
    predicted, measured, error = row(found, "memory", 0)
    assert predicted is not None
    assert (predicted >= 1 << 30) is (overrides == BIG)
    assert measured == peak  # of the private memory, not of the process; shown in any case
    assert (error is None) is bool(why)
    text = "\n".join(lines(found))
    assert ("not comparable" in text) is bool(why)
    assert why in text
    assert "memory (tensors | process's own)" in text
    assert "not measured: a CPU counts no tensors" in text  # of the planned parts: state, activations


def test_a_gpu_counts_tensors_and_nothing_is_set_apart() -> None:
    assert all(not row.apart for row in graded(*H100).rows)


def test_without_a_peak_no_time_is_predicted() -> None:
    found = graded()
    assert found.hardware == "laptop"
    assert row(found, "step_s") == (None, 1.0, None)


def test_a_profile_that_nobody_named_is_called_assumed() -> None:
    assert "(hardware profile laptop, assumed)" in lines(graded())[0]
    assert "(hardware profile h100)" in lines(graded(*H100))[0]


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


def test_what_was_read_is_what_updates_read_whatever_the_config_is_now() -> None:
    """Ten updates of 16 sequences, of which a roll-back undoes four, and five of 8 after --accept-change."""
    story = Story(config("batch.global_batch=8")).start().steps(10).die().start(at=6).steps(5, tokens=512)
    assert [list(it) for it in pace(recorded("runs/a", story.events)).read] == [["stdlib", 64, 136, 136 * 64]]


def test_tokens_for_experts_count_with_what_replicas_exchange() -> None:
    """The engine counts both along dp, so the prediction is their sum: one row, one bucket of the step."""
    overrides = (*H100, "model.experts=4", "parallel.ep=2")
    found = graded(*overrides, metrics=[line(step, sent={"dp": 1e6, "pp": 10.0}) for step in range(1, 21)])
    chosen = config("parallel.pp=2", *overrides)
    setup = Setup(config=chosen, profile=profile.load("h100"), options=options_of(chosen))
    planned = {volume.name: float(volume.nbytes) for volume in volumes(setup, aligned=True)}
    assert set(planned) == {"PP", "EP", "DP x CP"}, "two replicas that share the experts: nobody has the same ones"
    assert row(found, "sent_dpxcp")[:2] == (planned["EP"] + planned["DP x CP"], 1e6)
    assert not [key for key in (row.key for row in found.rows) if key in ("sent_ep", "ep_s")]
    step = predicted_step(setup)
    assert row(found, "dp_s")[0] == step.dp + step.ep
