"""Slurm: the batch file of a run, the command that starts its nodes, and the way back into the queue.

One job holds all nodes. Its batch script *is* `ftrain run` or `ftrain supervise` (by `exec`, so that signals for the batch
shell reach it), which starts one agent per node with a single `srun`. A lost node must end neither: hence `--no-kill` for the
job and for the step. The exit code of such an srun is not to be trusted: it is 0 although a task died.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMAND_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked for. Empty values are left to the cluster."""

    name: str
    nodes: int
    output: str
    """File of the batch script's output, with Slurm's %j."""
    comment: str = ""
    """For people who read the file."""
    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    signal_s: int = 300
    requeue: bool = True
    options: tuple[str, ...] = ()


class SlurmError(Exception):
    """Slurm refused or is not here; the message has its words."""


def batch_file(job: Job, argv: Sequence[str]) -> str:
    """The file for sbatch that runs `argv` in an allocation."""
    given = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "output": job.output,
        "open-mode": "append",
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "time": job.time,
        "signal": f"B:USR1@{job.signal_s}" if job.signal_s else "",
    }
    options = [f"--{name}={value}" for name, value in given.items() if value]
    options += ["--no-kill", "--requeue" if job.requeue else "--no-requeue", *job.options]
    lines = [f"# {line}" for line in job.comment.splitlines()] + [f"#SBATCH {option}" for option in options]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(argv)}", ""])


def container_options(image: str, mounts: Sequence[str]) -> list[str]:
    """Options of Pyxis; none without an image."""
    found = [f"--container-image={image}"] if image else []
    return found + ([f"--container-mounts={','.join(mounts)}"] if mounts else [])


def node_command(
    argv: Sequence[str], *, nodes: int, image: str = "", mounts: Sequence[str] = (), options: Sequence[str] = ()
) -> list[str]:
    """The srun that runs `argv` once on each of the `nodes` nodes of this job.

    The numbers are given outright: a range of nodes (`--nodes=1-N`) without a number of tasks ends slurmctld 22.05.
    """
    container = container_options(image, mounts)
    fixed = ["--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--overlap", "--cpu-bind=none"]
    return ["srun", *fixed, f"--nodes={nodes}", f"--ntasks={nodes}", *container, *options, *argv]


def job_id(env: Mapping[str, str] = os.environ) -> str:
    """The job that this process is in; empty if it is in none."""
    return env.get("SLURM_JOB_ID", "")


def nodes_left(job: str, env: Mapping[str, str] = os.environ) -> int:
    """How many nodes a job has now: with --no-kill, a lost one is taken off."""
    try:
        return int(_run(["squeue", "--noheader", "--format=%D", "--jobs", job]))
    except (SlurmError, ValueError):
        return int(env.get("SLURM_JOB_NUM_NODES", "1"))


def is_down(node: str) -> bool:
    """Whether the controller has given a node up."""
    try:
        return _run(["sinfo", "--noheader", "--format=%T", "--nodes", node]).strip().startswith("down")
    except SlurmError:
        return False


def submit(path: Path) -> str:
    """Hand a batch file in; the job's number. SlurmError if it is not taken."""
    return _run(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]


def requeue(job: str) -> None:
    """Have a job run again from the beginning. Slurm ends what still runs of it. SlurmError if it will not."""
    _run(["scontrol", "requeue", job])


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    except FileNotFoundError:
        raise SlurmError(f"there is no {argv[0]} here: submit from a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{argv[0]} did not answer within {COMMAND_LIMIT_S:g} s") from None
    if done.returncode:
        raise SlurmError(f"{argv[0]}: {done.stderr.strip() or done.stdout.strip() or f'exit code {done.returncode}'}")
    return done.stdout
