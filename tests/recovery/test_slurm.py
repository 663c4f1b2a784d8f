"""The batch file and the srun, against what sbatch and srun take; the rule by which a requeued job inherits its own run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recovery.owner import HeldError, Owner, claim, inherits, this_process
from recovery.slurm import Job, SlurmError, batch_file, is_down, node_command, nodes_left, submit

ARGV = ["/usr/bin/python3", "-P", "-m", "ftrain.cli.entry", "run", "/a folder/run.toml", "--set", "run.steps=3"]


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_batch_file_says_all_and_is_replaced_by_the_run() -> None:
    job = Job(
        name="dense",
        nodes=640,
        output="/shared/slurm-%j.out",
        comment="two\nlines",
        partition="train",
        account="lab",
        qos="high",
        time="2-00:00:00",
        signal_s=120,
        options=("--exclusive", "--gpus-per-node=8"),
    )
    text = batch_file(job, ARGV)
    assert text.splitlines()[:3] == ["#!/bin/bash", "# two", "# lines"]
    assert options(text) == [
        "--job-name=dense",
        "--nodes=640",
        "--ntasks-per-node=1",
        "--output=/shared/slurm-%j.out",
        "--open-mode=append",
        "--partition=train",
        "--account=lab",
        "--qos=high",
        "--time=2-00:00:00",
        "--signal=B:USR1@120",
        "--no-kill",
        "--requeue",
        "--exclusive",
        "--gpus-per-node=8",
    ]
    assert text.splitlines()[-1] == ("exec /usr/bin/python3 -P -m ftrain.cli.entry run '/a folder/run.toml' --set run.steps=3")


def test_what_is_not_given_is_left_to_the_cluster() -> None:
    found = options(batch_file(Job(name="n", nodes=2, output="o", signal_s=0, requeue=False), ["true"]))
    assert not [
        option for option in found if option.split("=")[0] in ("--partition", "--account", "--qos", "--time", "--signal")
    ]
    assert "--no-requeue" in found


def test_the_srun_names_nodes_and_tasks_outright_and_enters_the_container() -> None:
    argv = node_command(
        ["ftrain", "join", "/s"], nodes=3, image="/img/x.sqsh", mounts=("/a:/a", "/b:/c:ro"), options=("--mpi=none",)
    )
    assert argv[0] == "srun"
    assert argv[-3:] == ["ftrain", "join", "/s"]
    assert {"--no-kill", "--kill-on-bad-exit=0", "--overlap", "--nodes=3", "--ntasks=3", "--mpi=none"} <= set(argv)
    assert {"--container-image=/img/x.sqsh", "--container-mounts=/a:/a,/b:/c:ro"} <= set(argv)
    assert not [word for word in node_command(["x"], nodes=1) if word.startswith("--container")]


def test_where_there_is_no_slurm_the_words_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="there is no sbatch here"):
        submit(tmp_path / "job")
    assert nodes_left("1", {"SLURM_JOB_NUM_NODES": "7"}) == 7
    assert not is_down("n1")


def test_slurms_own_words_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: moon' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SlurmError, match="invalid partition specified: moon"):
        submit(tmp_path / "job")


@pytest.mark.parametrize(
    ("job", "env", "expected"),
    [
        ("7", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ("7", {"SLURM_JOB_ID": "7"}, False),  # its first life: somebody else's process
        ("7", {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
        ("", {"SLURM_RESTART_COUNT": "1"}, False),
        ("", {}, False),
    ],
)
def test_a_requeued_job_inherits_from_its_earlier_life_only(job: str, env: dict[str, str], expected: bool) -> None:
    owner = Owner(host="elsewhere", boot_id="b", pid=1, start_time=1, job_id=job)
    assert inherits(owner, env) is expected


def test_a_requeued_job_takes_the_folder_that_its_earlier_life_held_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    held = claim(tmp_path)
    record = (tmp_path / "owner.json").read_text().replace(f'"{this_process().host}"', '"elsewhere"')
    held.release()
    (tmp_path / "owner.json").write_text(record)
    with pytest.raises(HeldError, match="elsewhere"):
        claim(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    claim(tmp_path).release()
