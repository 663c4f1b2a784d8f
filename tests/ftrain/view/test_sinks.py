"""Curves for other dashboards: TensorBoard's own reader reads what was written, roll-backs and all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ftrain.cli.entry import cli
from ftrain.view.sinks import Pump, Values
from tests.ledgers import Story, config, fading


def story() -> Story:
    made = Story(config()).start().steps(10).evaluate(2.5)
    return made.die(class_="gpu").start(at=6).steps(10, loss=lambda step: fading(step) + 0.5).end()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: its own reader, with what a session start hides left out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=True)
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_shows_the_final_history(tmp_path: Path) -> None:
    story().write(tmp_path / "run")
    line = b'{"attempt":1,"step":16,"t_end":1.0,"mean":{"compute":0.5},"mfu":0.4,"memory":[[0,0,1,2,3],[1,0,1,2,9]]}\n'
    (tmp_path / "run/local/metrics.jsonl").write_bytes(line)
    result = CliRunner().invoke(cli, ["metrics", str(tmp_path / "run"), "--tensorboard", str(tmp_path / "tb"), "--follow"])
    assert result.exit_code == 0, result.output
    found = scalars(tmp_path / "tb")
    losses = dict(found["train/loss"])
    assert [step for step, _ in found["train/loss"]] == list(range(1, 17))  # each step once
    assert losses[6] == pytest.approx(fading(6))
    assert losses[7] == pytest.approx(fading(7) + 0.5)  # done again
    assert found["speed/step_s"][0] == (1, 1.0)
    assert found["speed/mfu"] == [(16, pytest.approx(0.4))]
    assert found["memory/peak_bytes"] == [(16, 9.0)]
    assert found["step/compute_s"] == [(16, 0.5)]


class Recorder:
    """What a dashboard is told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def values(self, step: int, t: float, values: Values) -> None:
        self.told.append((step, sorted(values)))

    def back(self, step: int, t: float) -> None:
        self.told.append(("back", step))

    def said(self, step: int, t: float, text: str) -> None:
        self.told.append((step, text))

    def close(self) -> None:
        self.told.append("closed")


def test_a_run_is_handed_over_in_order_and_in_parts() -> None:
    events, recorder = story().events, Recorder()
    pump = Pump(recorder)
    for event in events:
        pump.add([event])
    names = ["speed/step_s", "speed/tokens_per_s", "train/grad_norm", "train/loss", "train/lr"]
    assert recorder.told[:10] == [(step, names) for step in range(1, 11)]
    assert recorder.told[10:13] == [(10, ["eval/loss"]), (10, "gpu: it died"), ("back", 6)]
    assert recorder.told[13:] == [(step, names) for step in range(7, 17)]


def test_weights_and_biases_gets_its_own_axis_and_the_attempt(tmp_path: Path) -> None:
    """A module that writes down its calls stands in for the library, which is heavy; test_wandb_offline.py has the real one."""
    (tmp_path / "wandb.py").write_text(
        "import json, sys\n"
        "class Run:\n"
        "    def __getattr__(self, name):\n"
        "        return lambda *args, **kwargs: print(json.dumps([name, args, kwargs]))\n"
        "def init(**kwargs):\n"
        "    print(json.dumps(['init', [], kwargs]))\n"
        "    return Run()\n"
    )
    story().write(tmp_path / "run")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ftrain.cli.entry import cli; cli()"
    command = [sys.executable, "-P", "-c", code, "metrics", str(tmp_path / "run"), "--wandb", "mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    import json

    calls = [json.loads(line) for line in done.stdout.splitlines()]
    assert calls[0][2]["project"] == "mine"
    assert calls[0][2]["resume"] == "allow"
    points = [args[0] for name, args, _ in calls if name == "log" and "train/loss" in args[0]]
    assert [(point["step"], point["attempt"]) for point in points[9:12]] == [(10, 0), (7, 1), (8, 1)]
    assert calls[-1][0] == "finish"


def test_without_a_target_or_the_library_it_is_said(tmp_path: Path) -> None:
    story().write(tmp_path / "run")
    result = CliRunner().invoke(cli, ["metrics", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "where to?" in result.stderr
    code = "import sys; sys.modules['wandb'] = None; from ftrain.cli.entry import cli; cli()"
    command = [sys.executable, "-P", "-c", code, "metrics", str(tmp_path / "run"), "--wandb", "mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'ftrain-runtime[wandb]'" in done.stderr
