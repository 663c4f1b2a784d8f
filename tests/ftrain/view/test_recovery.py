"""What a run measured of its recovery, handed to the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.plan import plan
from ftrain.view.record import recorded
from ftrain.view.recovery import assumptions
from recovery.events import CheckpointCommitted, SnapshotCompleted
from tests.ledgers import Story, config

ROOT = Path(__file__).parents[3]


def story() -> Story:
    """Two crashes with one second until the verdict and one until the end; restarts of 3 and 5 s from memory."""
    made = Story(config()).start(start_s=20.0).steps(10, blocked_s=0.1)
    made.events += [SnapshotCompleted(t=made.t, attempt=0, step=step) for step in (2, 4, 6, 8, 10)]
    made.events.append(CheckpointCommitted(t=made.t, attempt=0, step=10, nbytes=100, seconds=7.0))
    made.die().start(start_s=3.0).steps(10).die().start(start_s=5.0).steps(10)
    return made


def test_recovery_is_read_off_the_ledger() -> None:
    run = recorded("runs/a", story().events)
    found = assumptions(run)
    assert found["detect_s"] == pytest.approx(run.report.buckets["detection"] / 2)
    assert found["restart_s"] == 4.0
    assert found["load_memory_s"] == 0.0
    assert found["stall_s"] == pytest.approx(10 * 0.1 / 5)
    assert found["upload_s"] == 7.0
    assert "load_storage_s" not in found  # nothing was loaded from storage


def test_the_simulation_starts_from_it_and_what_is_assumed_goes_before(tmp_path: Path) -> None:
    story().write(tmp_path / "run")
    command = ["simulate", str(ROOT / "configs/llama3-405b.toml"), "--hardware", "h100", "--measured", str(tmp_path / "run")]
    result = CliRunner().invoke(plan, [*command, "--assume", "upload_s=30"])
    assert result.exit_code == 0, result.output
    rows = dict(line.split() for line in result.stdout.partition("Assumptions")[2].splitlines() if len(line.split()) == 2)
    assert (rows["restart_s"], rows["upload_s"]) == ("4", "30")
    assert "measured on 4 ranks" in result.stderr


def test_a_run_that_shows_nothing_is_said_to(tmp_path: Path) -> None:
    Story(config()).start().steps(3).write(tmp_path / "run")
    command = ["simulate", str(ROOT / "configs/llama3-405b.toml"), "--hardware", "h100", "--measured", str(tmp_path / "run")]
    result = CliRunner().invoke(plan, command)
    assert result.exit_code == 3
    assert "nothing to take over" in result.stderr
