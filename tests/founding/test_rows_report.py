"""Founding rows that a report shows of a run: what was measured, beside what was planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftrain.plan import cost
from ftrain.plan.memory import all_ranks
from ftrain.plan.params import largest
from ftrain.plan.schedule import idle_of_compute, of_total
from ftrain.plan.setup import Setup
from ftrain.plan.time import utilisation
from ftrain.plan.volume import volumes
from ftrain.view.compare import compare
from ftrain.view.grade import Grade, grade
from ftrain.view.pace import lines as pace_lines
from ftrain.view.pace import pace
from ftrain.view.predict import predict
from ftrain.view.record import Recorded, recorded
from ftrain.view.went import went
from tests.ledgers import T0, Story, config

GPU = ("machine.hardware=h100", "machine.compute_dtype=bfloat16")
MEAN = {"compute": 0.6, "tp": 0.05, "cp": 0.0, "pp": 0.05, "dp": 0.1, "bubble": 0.15, "imbalance": 0.05}


def line(step: int, *, mean: dict[str, float] = MEAN, **more: Any) -> dict[str, Any]:
    """A step as the ranks measured it, of two stages."""
    rates = {"tflops": 400.0, "tflops_full": 416.0, "mfu": 400 / 989, "mfu_full": 416 / 989}
    where = {"peak": "989 TFLOP/s dense bfloat16 (h100)", "device": "NVIDIA H100", "dtype": "bfloat16"}
    return {
        "attempt": 0, "layout": "tp1 x pp2", "step": step, "tokens": 1024, "seconds": 1.0, **rates, **where, "mean": mean,
        "worst": {name: [0, seconds] for name, seconds in mean.items()},
        "memory": [[rank, rank % 2, 1_000 + rank, 0, 5_000 + rank] for rank in range(4)],
        "stages": [mean, {**mean, "compute": 2 * mean["compute"]}],
        **more,
    }  # fmt: skip


def run(*overrides: str, seconds: float = 1.0, **more: Any) -> Recorded:
    story = Story(config("parallel.pp=2", *GPU, *overrides), layout="tp1 x pp2").start().steps(20, seconds=seconds).end()
    return recorded("runs/a", story.events, [line(step, **more) for step in range(1, 21)])


def row(found: Grade, key: str, stage: int | None = None) -> tuple[float | None, float | None]:
    return next((row.predicted, row.measured) for row in found.rows if (row.key, row.stage) == (key, stage))


def setup_of(*overrides: str) -> Setup:
    return predict(config("parallel.pp=2", *GPU, *overrides)).setup


def test_row_02_the_measured_memory_stands_beside_the_predicted_kinds() -> None:
    """Weights, gradients and optimizer are what stays between two steps; activations what a step needs on top."""
    found, said = grade(run()), predict(config("parallel.pp=2", *GPU))
    for stage in range(2):
        memory = said.memory[stage]
        assert row(found, "state", stage) == (
            float(memory.state),
            1_002 + stage,
        )  # of ranks 2 and 3, the fullest of their stages
        assert memory.state >= memory.weights + memory.gradients + memory.master + memory.moments
        assert row(found, "activations", stage) == (float(memory.activations + memory.buffers), 4_000)


def test_row_06_every_stage_has_its_peak_its_computing_and_its_waiting() -> None:
    found = grade(run())
    for stage in range(2):
        assert row(found, "memory", stage)[1] == 5_002 + stage
        assert row(found, "busy_s", stage)[1] == pytest.approx(0.6 * (1 + stage))
        assert row(found, "bubble_s", stage)[1] == pytest.approx(0.15)
    fewer, more = (predict(config("parallel.pp=2", *GPU, f"batch.global_batch={batch}")).bubble for batch in (8, 32))
    assert more < fewer  # more micro-batches cut the waiting; the stages' load counts embedding and head


def test_row_07_the_slowest_stage_over_the_mean_is_measured_and_predicted() -> None:
    predicted, measured = row(grade(run()), "slowest_over_mean", 1)
    assert measured == pytest.approx(1.2 / 0.9)
    assert predicted == float(cost.imbalance(setup_of()))


def test_row_24_communication_is_told_apart_by_whether_something_hides_it() -> None:
    """What is exposed is a bucket of the step; what is hidden lies inside compute, and the comparison shows the difference."""
    hidden = {**MEAN, "compute": 0.62, "dp": 0.0}
    a, b = run(), run("parallel.overlap_reduce=true", seconds=0.92, mean=hidden)
    exposed = next(row for row in compare(a, b).rows if row.key == "exposed")
    assert exposed.a == pytest.approx(0.20)
    assert exposed.b == pytest.approx(0.10 / 0.92)


def test_row_30_what_the_plan_leaves_out_is_measured_minus_predicted() -> None:
    found = next(row for row in grade(run()).rows if row.key == "memory" and row.stage == 0)
    assert found.error is not None
    assert found.measured is not None
    assert found.predicted is not None
    assert found.error == pytest.approx((found.measured - found.predicted) / found.predicted)


def test_row_32_fsdp_beside_the_distributed_optimizer_on_the_same_task() -> None:
    """Weights, gradients and optimizer all cut: less memory; gathered forward and backward, reduced back: more traffic."""
    plain = predict(config("parallel.ranks=8", *GPU)).setup
    fsdp = replace(plain, options=replace(plain.options, sharding="fsdp"))
    d, m, n = plain.mesh.shards, plain.microbatches, largest(plain).total
    sent = [next(float(volume.ideal) for volume in volumes(each) if volume.name == "DP x CP") for each in (plain, fsdp)]
    assert sent == pytest.approx([(d - 1) / d * n * (4 + 2), (d - 1) / d * n * (2 * 2 + 4) * m])
    held = [float(max(rank.weights + rank.gradients for rank in all_ranks(each))) for each in (plain, fsdp)]
    assert held == pytest.approx([6 * n, 6 * n / d])


def test_row_41_the_price_of_recompute_and_what_it_saves() -> None:
    """Extra time and saved bytes of two runs that differ in nothing else."""
    a = run()
    b = run("parallel.recompute=full", seconds=1.3, memory=[[rank, rank % 2, 1_000, 0, 2_000] for rank in range(4)])
    found = compare(a, b)
    rows = {row.key: row for row in found.rows}
    assert [item.path for item in found.config] == ["parallel.recompute"]
    assert rows["step_s"].change == pytest.approx(0.3)
    assert (rows["memory"].a, rows["memory"].b) == (5_003, 2_000)
    assert float(rows["memory_predicted"].b or 0) < float(rows["memory_predicted"].a or 0)
    assert "identical" in found.learning.verdict


def test_row_47_scaling_out_is_logged_step_by_step_and_recalibrates_the_end() -> None:
    story = Story(config("run.steps=200"), layout="dp1").start(ranks=1).steps(31, seconds=4.0, tokens=1024)
    story.die(planned=True, class_="preemption", component="host")
    story.start(layout="dp2", ranks=2).steps(31, seconds=2.1, tokens=1024)
    story.die(planned=True, class_="preemption", component="host")
    story.start(layout="dp4", ranks=4).steps(31, seconds=1.2, tokens=1024)
    found = pace(recorded("runs/a", story.events))
    assert [(row.ranks, row.tokens_per_update) for row in found.rows] == [(1, 1024), (2, 1024), (4, 1024)]
    assert [row.tokens_per_s for row in found.rows] == pytest.approx([1024 / 4, 1024 / 2.1, 1024 / 1.2])
    assert [row.per_rank for row in found.rows] == pytest.approx([1, 4 / 2.1 / 2, 4 / 1.2 / 4])
    assert found.eta_s is not None
    assert found.eta_s > found.steps_left * 1.2 if found.steps_left else False  # corrected by the effective time so far
    assert len([text for text in pace_lines(found) if "rank)" in text or "ranks)" in text]) == 3


def test_row_55_the_time_that_is_left_is_corrected_by_the_effective_time() -> None:
    """Half of the time since the launch counted, so the rest takes twice its step time."""
    story = Story(config("run.steps=100")).start(start_s=50.0).steps(50, seconds=1.0)
    made = recorded("runs/a", story.events)
    assert made.report.effective_time == pytest.approx(0.5)
    assert pace(made).eta_s == pytest.approx(50 * 1.0 / 0.5)


def test_row_72_mfu_names_its_peak_and_its_formula() -> None:
    """Never without: 400 of 989 dense is 40.4 %, and no row prints a number whose peak is unknown."""
    found = grade(run())
    assert found.mfu == pytest.approx(400 / 989)
    assert "989 TFLOP/s dense" in found.mfu_of
    assert "attention halved" in found.mfu_of
    unknown = grade(run(mfu=None, mfu_full=None, peak="unknown"))
    assert unknown.mfu is None


def test_row_73_why_a_larger_run_is_less_efficient_is_attributed() -> None:
    """Same batch on twice the replicas: the parts of the step that grew say why."""
    slow = {**MEAN, "compute": 0.3, "dp": 0.15, "bubble": 0.16}
    small, large = went(run()), went(run("parallel.ranks=8", mean=slow))
    assert small is not None
    assert large is not None
    shares = [{bucket.bucket: bucket.share for bucket in found.buckets} for found in (small, large)]
    assert shares[1]["compute"] < shares[0]["compute"]
    grown = max(shares[1], key=lambda bucket: shares[1][bucket] - shares[0][bucket])
    assert grown == "dp"
    # and MFU falls with the step's time per token, whatever the cause
    assert utilisation(setup_of(), 2.0) == pytest.approx(utilisation(setup_of(), 1.0) / 2)


def test_row_74_interruptions_are_counted_planned_apart_with_the_time_between_them() -> None:
    """47 planned and 419 unexpected in 54 days: 466, one each 2.78 h, an unexpected one each 3.09 h."""
    story = Story(config("run.steps=100000"))
    gap = (54 * 86400 - 466 * 2) / 466  # each interruption takes the two seconds of its verdict and decision
    for number in range(466):
        story.start(start_s=gap - 10.0).steps(1, seconds=10.0)
        story.die(planned=number % 10 == 0, class_="firmware" if number % 10 == 0 else "gpu")
    made = recorded("runs/a", story.events).report
    assert (len(made.interruptions), sum(row.planned for row in made.interruptions)) == (466, 47)
    assert made.wall_s == pytest.approx(54 * 86400)
    assert made.wall_s / len(made.interruptions) / 3600 == pytest.approx(2.78, abs=0.005)
    assert made.mtbf_s is not None
    assert made.mtbf_s / 3600 == pytest.approx(3.09, abs=0.005)


def test_row_75_causes_add_up_to_all_of_the_interruptions() -> None:
    story = Story(config("run.steps=1000"))
    for class_, count in (("gpu", 5), ("hbm", 3), ("network", 2)):
        for _ in range(count):
            story.start(start_s=1.0).steps(2).die(class_=class_, component=class_)
    made = recorded("runs/a", story.events).report
    assert [(row.class_, row.count) for row in made.causes] == [("gpu", 5), ("hbm", 3), ("network", 2)]
    assert sum(row.count for row in made.causes) == len(made.interruptions)
    assert sum(row.share for row in made.causes) == pytest.approx(1.0)


def test_row_78_throughput_by_the_hour_of_the_day_shows_a_slow_noon() -> None:
    """Two per cent less at noon, over two days."""
    story = Story(config("run.steps=100000"))
    story.t = T0 - T0 % 86400 + 86400
    story.start(start_s=0.0)
    for hour in range(48):
        story.steps(60, seconds=60.0 * (1.02 if hour % 24 == 12 else 1.0), tokens=6000)
        story.t = T0 - T0 % 86400 + 86400 + (hour + 1) * 3600 + (72 if hour % 24 == 12 else 0)
    rates = recorded("runs/a", story.events).report.tokens_per_s_by_hour
    assert rates[9] == pytest.approx(100.0)
    assert rates[12] == pytest.approx(100.0 / 1.02, rel=1e-6)
    assert min(rates, key=rates.__getitem__) == 12


def test_row_79_every_synchronous_stop_of_a_run_is_in_its_report() -> None:
    """The planner has the watts of one stop; the report says how often all ranks stood still, and for how long."""
    story = Story(config()).start(start_s=5.0).steps(10).die().start(at=10, start_s=7.0).steps(10, blocked_s=0.5).end()
    made = recorded("runs/a", story.events).report
    down = made.interruptions[0].down_s
    assert down == pytest.approx(2.0 + 7.0)  # verdict and decision, then the restart
    assert made.buckets["checkpoint"] == pytest.approx(10 * 0.5)


def test_the_planned_idle_share_is_that_of_the_schedule_when_stages_are_equal() -> None:
    wide = ("model.ffn=131072",)
    m = setup_of(*wide).microbatches
    assert predict(config("parallel.pp=2", *GPU, *wide)).bubble == pytest.approx(
        float(of_total(idle_of_compute("1f1b", p=2, m=m, v=1))), abs=5e-4
    )
