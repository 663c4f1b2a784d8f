"""A script's run that is taken up by another command, or asked for what only its owner can do."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.command import CommandDelegate
from ftrain.compose.command_launch import CommandLaunch
from ftrain.compose.endwatch import EndWatch
from ftrain.compose.paths import SUPERVISED
from ftrain.compose.supervise import made_by_another, prepare
from recovery.notice import Lookout
from recovery.owner import HeldError


def launch(folder: Path, *argv: str, cwd: str = "/work") -> CommandLaunch:
    return CommandLaunch(url=str(folder), argv=argv, cwd=cwd, nproc=2)


def test_another_command_in_the_folder_of_a_run_is_said_and_not_refused(tmp_path: Path) -> None:
    first, second = (launch(tmp_path, "python3", f"{name}/train.py") for name in "ab")
    assert made_by_another(first) == ""
    folder, held = prepare(first)
    with pytest.raises(HeldError, match=f"process {os.getpid()} on"):
        prepare(second)
    assert msgspec.json.decode((folder / SUPERVISED).read_bytes(), type=CommandLaunch) == first, (
        "a refused start writes nothing"
    )
    held.release()
    assert made_by_another(second) == ""  # checked and never started: nothing is there to go on from
    (folder / "ledger").mkdir()
    assert made_by_another(first) == ""
    said = made_by_another(second)
    assert said.startswith(f"{tmp_path} was made by another command: python3 a/train.py; now python3 b/train.py goes on in it.")
    assert "--run" in said
    elsewhere = made_by_another(launch(tmp_path, "python3", "a/train.py", cwd="/other"))
    assert "python3 a/train.py (in /work); now python3 a/train.py (in /other)" in elsewhere
    assert prepare(second)[0] == folder
    assert made_by_another(second) == ""


def test_drain_and_resize_of_a_script_say_why_not_and_what_to_do(tmp_path: Path) -> None:
    watch = EndWatch(Lookout((), poll_s=60.0, clock=lambda: 0.0), margin_s=0.0)
    delegate = CommandDelegate(launch(tmp_path, "true"), tmp_path, watch)
    said = r"a script runs with the processes it was started with, .*: `ftrain stop` it, .* another --nproc"
    with pytest.raises(ValueError, match=said):
        delegate.choose_layout([], "a place was drained")
    with pytest.raises(ValueError, match=said):
        delegate.resize({"ranks": 1}, [])
    several = CommandDelegate(msgspec.structs.replace(launch(tmp_path, "true"), nnodes=2), tmp_path, watch)
    with pytest.raises(ValueError, match=said):
        several.resize({"ranks": 1}, [])
    delegate.close()
