"""A whole run, killed in the middle of its batch ramp: what it trains, and everything that is told of its time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ftrain.compose.proof import stored_digests
from ftrain.train.times import BUCKETS
from tests.chaos.test_kills import fault
from tests.commands import ftrain, ftrain_json
from tests.runs import TinyRun, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

STEPS = 12
OPTIONS = (
    ("batch.ramp", "[{tokens = 896, global_batch = 4}]"),  # 28 sequences: steps 1 to 7
    ("machine.profile_steps", "[2, 3]"),
    ("machine.hardware", '"h100"'),
)
SIZES = [4] * 7 + [8] * 5


def options(*pairs: tuple[str, str]) -> Sequence[str]:
    return [word for key, value in pairs for word in ("--set", f"{key}={value}")]


def metrics(run: TinyRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.local / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def killed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyRun, str]:
    """The run and its output."""
    run = TinyRun(folder=tmp_path_factory.mktemp("killed"), corpus=corpus, steps=STEPS, extra=fault("step", 5))
    with no_process_left(run):
        code, output = run.run(*options(*OPTIONS))
    assert code == 0, output
    return run, output


@pytest.mark.slow
def test_a_run_killed_in_its_ramp_ends_where_the_unbroken_one_does(
    killed: tuple[TinyRun, str], tmp_path: Path, corpus: str
) -> None:
    unbroken = TinyRun(folder=tmp_path, corpus=corpus, steps=STEPS)
    code, output = unbroken.run(*options(OPTIONS[0]))
    assert code == 0, output
    assert stored_digests(killed[0].url) == stored_digests(unbroken.url)


def test_everything_is_told_of_the_time_of_a_run(killed: tuple[TinyRun, str]) -> None:
    run, output = killed
    newest = {line["step"]: line for line in metrics(run)}
    assert {step: line["sequences"] for step, line in newest.items()} == dict(enumerate(SIZES, 1))
    for line in newest.values():
        assert set(line["mean"]) == set(BUCKETS)
        assert line["tflops"] > 0
        assert (line["mfu"], line["peak"]) == (None, "machine.hardware is h100, the ranks compute on cpu")
        assert [row[0] for row in line["memory"]] == [0, 1]
    found = ftrain_json("report", run.url)["step_time"]
    assert sum(row["share"] for row in found["buckets"]) == pytest.approx(1)
    text = ftrain("report", run.url).stdout
    assert "where a step's time went" in text
    assert "MFU unknown: machine.hardware is h100, the ranks compute on cpu" in text
    traces = sorted((run.local / "profiles").iterdir())
    assert [path.name for path in traces] == [f"attempt-0-steps-2-3-rank-{rank}.json" for rank in (0, 1)]
    assert f"steps 2 to 3 traced, one file a rank, for ui.perfetto.dev: {traces[0].parent}" in output
    names = {event.get("name") for event in json.loads(traces[1].read_text())["traceEvents"]}
    assert {"ftrain: compute", "ftrain: data", "ftrain: dp collective"} <= names
