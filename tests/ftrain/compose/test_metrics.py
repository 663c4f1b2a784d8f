"""metrics.jsonl: a line for every step, whole if its ranks lived to tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftrain.checkpoint.messages import RankMemory, StepDone, StepTimes, decode_worker, encode
from ftrain.compose.metrics import MetricsFile, memory_text, newest, shares_text, told
from ftrain.compose.speed import Speed
from ftrain.config import Config
from ftrain.load import load
from recovery.events import StepFinished
from tests.chaos.test_disk import fill

CONFIG: Config = load(str(Path(__file__).parents[3] / "configs" / "tiny-dp2.toml"))


def done(step: int) -> StepDone:
    return StepDone(
        step=step,
        t_begin=100.0 + step,
        t_end=100.5 + step,
        blocked_s=0.0,
        evaluate_s=0.0,
        loss=1.0,
        grad_norm=1.0,
        lr=0.1,
        tokens=1000,
        applied=True,
        sequences=8,
    )


def times(step: int) -> StepTimes:
    memory = [RankMemory(0, 0, 1 << 20, 0, 2 << 20), RankMemory(1, 1, 1 << 20, 0, 3 << 20)]
    message = StepTimes(
        step=step, mean={"compute": 0.4, "data": 0.1}, worst={"data": (1, 0.2)}, memory=memory, device="cpu", dtype="float32"
    )
    again = decode_worker(encode(message))  # as it arrives
    assert again == message
    return message


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_waits_for_what_the_ranks_tell(tmp_path: Path) -> None:
    file = MetricsFile(str(tmp_path))
    file.append(done(1), attempt=0, layout="dp2")
    assert not lines(tmp_path)
    file.append(done(2), attempt=0, layout="dp2")
    file.times(times(1), CONFIG)
    (line,) = lines(tmp_path)
    assert line["step"] == 1
    assert line["tokens_per_s"] == 2000
    assert line["mean"] == {"compute": 0.4, "data": 0.1}
    assert line["memory"][1] == [1, 1, 1 << 20, 0, 3 << 20]
    assert line["tflops"] > 0
    assert line["mfu"] is None
    assert line["peak"] == "machine.hardware is not set"
    file.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_no_step_is_lost_when_its_ranks_die(tmp_path: Path) -> None:
    file = MetricsFile(str(tmp_path))
    for step in (1, 2, 3):
        file.append(done(step), attempt=0, layout="dp2")
    file.times(times(2), CONFIG)
    file.append(done(2), attempt=1, layout="dp2")
    file.append(done(3), attempt=1, layout="dp2")
    file.times(times(3), CONFIG)
    file.times(times(9), CONFIG)  # of a step that nobody reported
    file.close()
    found = [(line["attempt"], line["step"], "mean" in line) for line in lines(tmp_path)]
    assert found == [(0, 1, False), (0, 2, True), (0, 3, False), (1, 2, False), (1, 3, True)]


def test_status_tells_the_newest_whole_step(tmp_path: Path) -> None:
    file = MetricsFile(str(tmp_path))
    speed = Speed()
    assert file.status(speed) == {}
    speed.begin("dp2", 0)
    for step in (1, 2, 3):  # the newest whole line is of step 1: of 16 sequences a second, of 12.8 over the steps that count
        seconds = 0.5 if step == 1 else 0.625
        speed.add(StepFinished(t=0.0, attempt=0, step=step, t_begin=0.0, t_end=seconds, tokens=1000, sequences=8))
    file.append(done(1), attempt=0, layout="dp2")
    file.times(times(1), CONFIG)
    status = file.status(speed)
    (line,) = lines(tmp_path)
    assert status["speed"].startswith(f"{line['tflops'] * 12.8 / 16:.3g} TFLOP/s a rank")
    speed.begin("dp1", 0)
    assert file.status(speed)["speed"] == "", "rates of another layout are told by nobody"
    assert "MFU unknown: machine.hardware is not set" in status["speed"]
    assert status["step_went_to"] == "compute 80%, data 20%"
    assert status["memory"] == "peak stage 0: 2.00 MiB (rank 0), stage 1: 3.00 MiB (rank 1)"
    file.close()


@pytest.mark.parametrize("nbytes", [0, 100_000], ids=["near the end", "far from it"])
def test_the_newest_whole_line_is_found(tmp_path: Path, nbytes: int) -> None:
    assert newest(tmp_path) is None
    file = MetricsFile(str(tmp_path))
    file.append(done(1), attempt=0, layout="dp2")
    file.times(times(1), CONFIG)
    file.append(done(2), attempt=0, layout="dp2")
    file.close()  # without the times of step 2
    with (tmp_path / "metrics.jsonl").open("ab") as torn:
        torn.write(b'{"step": 3, "mean"' + bytes(nbytes))
    found = newest(tmp_path)
    assert found is not None
    assert found["step"] == 1
    assert told(found)["step_went_to"] == "compute 80%, data 20%"


def test_a_full_disk_costs_lines_and_neither_the_run_nor_a_half_line(
    small_disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk(1)
    file = MetricsFile(str(disk))
    write_steps(file, 1, 3)
    fill(disk)
    write_steps(file, 3, 40)  # the last block of the file takes some
    (disk / "ballast").unlink()
    write_steps(file, 40, 42)
    file.close()
    steps = [line["step"] for line in lines(disk)]
    kept = steps[:-2]
    assert kept == list(range(1, len(kept) + 1))
    assert 2 <= len(kept) < 39
    assert steps[-2:] == [40, 41]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert f"; {39 - len(kept)} lines were left out" in caplog.text


def write_steps(file: MetricsFile, first: int, end: int) -> None:
    for step in range(first, end):
        file.append(done(step), attempt=0, layout="dp2")
        file.times(times(step), CONFIG)


def test_texts_of_nothing() -> None:
    assert shares_text({}) == ""
    assert shares_text({"compute": 0.0}) == ""
    assert memory_text([]) == ""
