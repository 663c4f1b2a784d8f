"""Where the time of a step went: metrics.jsonl of a made-up run, added up."""

from __future__ import annotations

from typing import Any

import pytest

from ftrain.view.grade import grade
from ftrain.view.record import Recorded, recorded
from ftrain.view.went import lines, went
from tests.ledgers import Story, config

MEAN = {"compute": 0.6, "pp": 0.1, "imbalance": 0.3, "cp": 0.0}


def line(step: int, *, layout: str, attempt: int = 0, mfu: float | None = 0.4, **changes: Any) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "layout": layout,
        "step": step,
        "tokens": 1000,
        "seconds": 1.0,
        "tflops": 400.0,
        "tflops_full": 416.0,
        "mfu": mfu,
        "mfu_full": None if mfu is None else mfu * 1.04,
        "peak": "989 TFLOP/s dense bfloat16 (h100)" if mfu else "machine.hardware is not set",
        "device": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "mean": MEAN,
        "worst": {"compute": [1, 0.8], "pp": [0, 0.1], "imbalance": [0, 0.6], "cp": [0, 0.0]},
        "memory": [[0, 0, 10 << 30, 12 << 30, 20 << 30], [1, 1, 10 << 30, 12 << 30, 30 << 30]],
        **changes,
    }


def run_of(*metrics: dict[str, Any], steps: int = 4) -> Recorded:
    return recorded("runs/a", Story(config()).start().steps(steps).end().events, metrics)


def test_steps_are_added_up_but_for_the_first_of_an_attempt() -> None:
    cold = line(1, layout="a", mean=dict.fromkeys(MEAN, 100.0))
    slow = line(3, layout="a", seconds=3.0, tflops=400 / 3, mfu=0.4 / 3, mean={**MEAN, "compute": 2.6})
    found = went(run_of(cold, line(2, layout="a"), slow, line(4, layout="a")))
    assert found is not None
    assert found.steps == 3
    assert found.step_s == pytest.approx((1 + 3 + 1) / 3)
    assert [row.bucket for row in found.buckets] == ["compute", "pp", "imbalance"]  # nothing went to cp
    assert sum(row.share for row in found.buckets) == pytest.approx(1)
    assert found.buckets[0].worst_rank == 1
    assert found.speed.tokens_per_s == pytest.approx(3000 / 5)
    assert found.speed.tflops == pytest.approx(3 * 400 / 5)  # all work over all time
    assert found.speed.mfu == pytest.approx(3 * 0.4 / 5)


def test_only_the_newest_layout_counts() -> None:
    found = went(
        run_of(line(1, layout="a"), line(2, layout="a"), line(3, layout="b"), line(4, layout="b", mean={"compute": 9.0}))
    )
    assert found is not None
    assert found.layout == "b"
    assert found.step_s == pytest.approx((1 + 9) / 2)


def test_the_text_names_what_a_utilisation_depends_on() -> None:
    text = "\n".join(lines(went(run_of(line(2, layout="a"), line(3, layout="a")))))
    for part in (
        "mean of 2 steps",
        "compute",
        "60.0 %",
        "most on rank 1: 800.0 ms",
        "MFU 40.0% of 989 TFLOP/s dense bfloat16 (h100)",
    ):
        assert part in text
    assert "attention halved (41.6% with attention in full)" in text
    assert "stage 1: 30.0 GiB on rank 1" in text


def test_without_a_peak_there_is_no_utilisation_and_without_metrics_no_section() -> None:
    text = "\n".join(lines(went(run_of(line(2, layout="a", mfu=None)))))
    assert "MFU unknown: machine.hardware is not set" in text
    assert went(run_of()) is None
    assert "not known here" in lines(None)[0]


def test_the_peak_of_a_rank_is_the_number_that_the_grade_has() -> None:
    """The most of all steps that count, not what the newest line happens to tell."""
    peaks = [[[0, 0, 10, 20, peak << 20]] for peak in (900, 70, 71, 68)]  # the first step of an attempt does not count
    run = run_of(*(line(step, layout="a", device="cpu", memory=peak) for step, peak in enumerate(peaks, start=1)))
    found = went(run)
    assert found is not None
    assert [row.peak for row in found.memory] == [71 << 20]
    (graded,) = (row for row in grade(run).rows if row.key == "memory")
    assert graded.measured == 71 << 20
