"""`ftrain status|save|stop` where nobody answers: what the ledger knows of the run, and what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.entry import cli
from recovery.owner import claim
from tests.ledgers import Story, config


def asked(command: str, url: Path) -> str:
    result = CliRunner().invoke(cli, [command, str(url)])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


@pytest.mark.parametrize("command", ["status", "save", "stop"])
def test_a_run_that_has_ended_is_said_to_have_with_its_step(command: str, tmp_path: Path) -> None:
    url = tmp_path / "run"
    Story(config()).start().steps(60).end("stopped").write(url)
    said = asked(command, url)
    assert "the run is not running: stopped at step 60" in said
    assert "`ftrain run CONFIG` goes on with it" in said
    assert f"`ftrain report {url}` explains" in said
    assert "No such file" not in said


def test_a_finished_run_goes_on_with_more_steps_only(tmp_path: Path) -> None:
    Story(config()).start().steps(100).end().write(tmp_path / "run")
    said = asked("status", tmp_path / "run")
    assert "finished at step 100" in said
    assert "with more run.steps" in said


def test_a_run_without_an_end_has_lost_its_coordinator(tmp_path: Path) -> None:
    Story(config()).start().steps(10).write(tmp_path / "run")
    said = asked("status", tmp_path / "run")
    assert "does not answer; its ledger goes to step 10" in said
    assert "ask again in a moment" in said


def test_a_path_that_is_no_run_keeps_its_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none", "empty"):
        assert f"no live run at {tmp_path / name / 'local'}: No such file" in asked("status", tmp_path / name)
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("command", ["status", "stop"])
def test_a_copy_of_a_live_run_names_the_one_that_is_live(command: str, tmp_path: Path) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    Story(config()).start().steps(10).write(live)
    held = claim(live / "local")
    shutil.copytree(live, copy)
    said = asked(command, copy)
    assert f"it is a copy: process {os.getpid()} on " in said
    assert f"in {live / 'local'}; ask for that one" in said
    assert "goes on with it" not in said
    held.release()
