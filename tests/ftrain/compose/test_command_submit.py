"""The batch file of a supervised script, from the words that would supervise it."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import pytest

from ftrain.cli.submit import of_command, of_config
from ftrain.compose.command_launch import CommandLaunch
from ftrain.compose.errors import RefusedError
from ftrain.compose.slurm import join_command, slurm_section
from ftrain.compose.supervise import check_nodes
from ftrain.config import Slurm
from ftrain.schema import ConfigProblems

NODES = ["--nnodes", "4", "--nproc", "8"]


def parts(words: list[str], *settings: str) -> tuple[Path, set[str], list[str]]:
    """Folder, what Slurm is asked for, and the command."""
    folder, text = of_command(words, settings)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert lines[-1].startswith("exec ")
    return folder, asked, shlex.split(lines[-1])


def test_the_file_asks_for_the_nodes_and_is_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*NODES, "--run", "runs/x", "--", "python", "train.py", "--name", "two words", "--run", "its own"]
    folder, asked, command = parts(words, "slurm.time=2-00:00:00", "slurm.spare_nodes=1", "slurm.partition=train")
    assert folder == tmp_path / "runs/x/local"
    assert {"--nodes=5", "--ntasks-per-node=1", "--time=2-00:00:00", "--partition=train", "--no-kill", "--requeue"} <= asked
    assert {f"--chdir={tmp_path}", f"--output={folder}/slurm-%j.out", "--signal=B:USR1@300", "--job-name=x"} <= asked
    start = command.index("supervise")
    options, script = command[start + 1 : command.index("--")], command[command.index("--") + 1 :]
    assert script == ["python", "train.py", "--name", "two words", "--run", "its own"]
    assert options == [*NODES, "--run", "runs/x", "--run", str(tmp_path / "runs/x"), "--requeue"]  # the last one holds


def test_a_container_and_the_options_of_srun_reach_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("slurm.container_image=/img.sqsh", 'slurm.srun=["--mpi=none"]', "slurm.requeue=false")
    _, asked, command = parts([*NODES, "--", "python", "train.py"], *settings)
    assert "--no-requeue" in asked
    assert "--requeue" not in command
    options = tuple(word.removeprefix("--srun=") for word in command if word.startswith("--srun="))
    assert options == ("--container-image=/img.sqsh", "--mpi=none")
    argv = join_command(Path("/s"), Slurm(srun=options), nodes=4, wait_s=60.0)
    assert argv[argv.index("--mpi=none") + 1 :] == ["ftrain", "join", "/s", "--wait", "60"]  # the image's own ftrain
    assert "ftrain.cli.entry" in join_command(Path("/s"), Slurm(), nodes=4, wait_s=60.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["slurm.tim=60"], "tim"),
        (["parallel.tp=2"], "there is no config here"),
        (["slurm.spare_nodes=-1"], "spare_nodes"),
        (["slurm"], "not of the form"),
    ],
)
def test_what_is_no_setting_of_slurm_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigProblems, match=words):
        slurm_section(settings)
    assert slurm_section([]) == Slurm()


def test_too_small_a_job_and_a_command_that_cannot_work_are_refused_before_they_wait_in_a_queue() -> None:
    with pytest.raises(RefusedError, match=r"slurm.nodes = 3: --nnodes 4 needs as many"):
        of_command([*NODES, "--", "python", "train.py"], ["slurm.nodes=3"])
    with pytest.raises(RefusedError, match="no program"):
        of_command([*NODES, "--", "no-such-program"], [])
    with pytest.raises(click.UsageError, match="one CONFIG, or"):
        of_config(["a.toml", "b.toml"], [])


def test_started_by_srun_on_every_node_it_says_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(RefusedError, match="start it once, in the batch script"):
        check_nodes(CommandLaunch(url="/r", argv=("true",), cwd="/", nnodes=2, nproc=1))
    check_nodes(CommandLaunch(url="/r", argv=("true",), cwd="/"))  # several runs of one machine each are something else
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    check_nodes(CommandLaunch(url="/r", argv=("true",), cwd="/", nnodes=2, nproc=1))
