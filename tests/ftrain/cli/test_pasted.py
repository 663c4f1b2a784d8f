"""The command that goes on, pasted into a shell of another folder: the same run, and never a new one there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ftrain.cli.hints import from_here
from ftrain.cli.run import again


def test_what_is_relative_stays_relative_to_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "it's $HOME"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "my file").write_text("found")
    pasted = subprocess.run(["bash", "-c", from_here(["cat", "my file"])], cwd="/", capture_output=True, text=True, check=True)
    assert pasted.stdout == "found"


def test_the_command_of_a_run_begins_where_its_config_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = again("my.toml", ["run.url=runs/x"], accept_change=True, origin=None)
    assert command == f"cd {tmp_path} && ftrain run my.toml --set run.url=runs/x --accept-change"
