"""The writer for Weights & Biases against the real library, offline: what it keeps is read back, point by point.

The library is no dependency of the tests (docs/adr/0025): it is installed into a folder of its own here, and only here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ledgers import Story, config

pytestmark = pytest.mark.slow

READER = Path(__file__).with_name("wandb_reader.py")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `import wandb` finds the real one, which reaches for no account and no network."""
    folder = tmp_path_factory.mktemp("wandb")
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder / "library"), "wandb>=0.19"]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"wandb cannot be installed here: {done.stderr[-200:]}")
    mine = {"PYTHONPATH": str(folder / "library"), "WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(folder)}
    return {**os.environ, **mine, "WANDB_DIR": str(folder)}


def kept(library: dict[str, str]) -> list[dict[str, Any]]:
    """All records of the newest offline run."""
    (file,) = Path(library["WANDB_DIR"], "wandb").glob("offline-run-*/run-*.wandb")
    read = subprocess.run([sys.executable, str(READER), str(file)], capture_output=True, text=True, check=True, env=library)
    return [json.loads(line) for line in read.stdout.splitlines()]


def test_the_real_library_keeps_every_point_with_its_step_and_attempt(library: dict[str, str], tmp_path: Path) -> None:
    story = Story(config()).start().steps(10).evaluate(2.5).die().start(at=6).steps(10).end()
    story.write(tmp_path / "run")
    command = [sys.executable, "-P", "-m", "ftrain.cli.entry", "metrics", str(tmp_path / "run"), "--wandb", "mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=library, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = kept(library)
    assert next(it["project"] for it in records if it["kind"] == "run") == "mine"
    assert {"kind": "metric", "glob": "*", "axis": "step"} in records
    points = [it["values"] for it in records if it["kind"] == "history"]
    steps = [(it["step"], it["attempt"], it["train/loss"]) for it in points if "train/loss" in it]
    first = [(step, 0, pytest.approx(2 + 3 / step)) for step in range(1, 11)]
    assert steps == first + [(step, 1, pytest.approx(2 + 3 / step)) for step in range(7, 17)]
    assert [(it["step"], it["eval/loss"]) for it in points if "eval/loss" in it] == [(10, 2.5)]
    assert [(it["title"], it["text"]) for it in records if it["kind"] == "alert"] == [("step 10", "gpu: it died")]
    assert records[-1]["kind"] == "exit"
