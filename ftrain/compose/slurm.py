"""A run as a Slurm job: from the config, or the words of a supervised script, to the batch file, and the nodes of the job while
the run lives."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec.inspect import type_info

from ftrain.combinations import replicas
from ftrain.compose.args import Launch
from ftrain.compose.command_launch import CommandLaunch
from ftrain.compose.errors import RefusedError
from ftrain.compose.nodes import num_nodes, shared_dir
from ftrain.compose.paths import CONFIGURED, local_dir, local_dir_of
from ftrain.config import Config, Slurm
from ftrain.load import apply_override
from ftrain.phases import most_ranks
from ftrain.schema import ConfigProblems, Problem, find_problems
from recovery.launch import Spawn, spawn
from recovery.slurm import Job, SlurmError, batch_file, container_options, job_id, node_command, nodes_left, requeue

REQUEUE = "requeue"
"""File in the run's folder: the run was ended by the scheduler, and wants to go on."""
FTRAIN = [sys.executable, "-P", "-m", "ftrain.cli.entry"]
AGAIN_S = 10.0  # between two attempts to start nodes that are gone
END_S = 15.0


def job_of(config: Config) -> Job:
    """What to ask Slurm for. RefusedError if the config does not say how many ranks a node has."""
    parallel, slurm = config.parallel, config.slurm
    per_node = config.machine.ranks_per_node
    if not per_node:
        some = min(8, parallel.ranks)
        wanted = f"say how many ranks (GPUs) a node has: --set machine.ranks_per_node={some}, or in [machine] of the config"
        raise RefusedError([f"machine.ranks_per_node = 0: {wanted}"])
    ranks = most_ranks(config)  # nodes are had from the first phase on
    needed = num_nodes(config, ranks)
    return _job(
        slurm,
        needed=needed,
        needs=f"{ranks} ranks at {per_node} a node need {needed}",
        name=Path(config.run.url.rstrip("/")).name or "ftrain",
        folder=shared_dir(config, local_dir(config)),
        what=f"{parallel.ranks} ranks = tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {replicas(config)}, "
        f"{per_node} on each of",
    )


def _job(slurm: Slurm, *, needed: int, needs: str, name: str, folder: Path, what: str) -> Job:
    """`needed` nodes and the spare ones, as [slurm] has them; `needs`, `what`: for the refusal, and for who reads the file."""
    nodes = slurm.nodes or needed + slurm.spare_nodes
    if nodes < needed:
        raise RefusedError([f"slurm.nodes = {nodes}: {needs}"])
    return Job(
        name=name,
        nodes=nodes,
        output=str(folder / "slurm-%j.out"),
        comment=f"{what} {needed} nodes" + (f", {nodes - needed} spare" if nodes > needed else ""),
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        time=slurm.time,
        signal_s=slurm.signal_s,
        requeue=slurm.requeue,
        options=slurm.sbatch,
    )


def slurm_section(overrides: Sequence[str]) -> Slurm:
    """[slurm] of a config that has nothing else, from `slurm.NAME=VALUE`. ConfigProblems if that is not what it is."""
    data: dict[str, Any] = {}
    problems = [problem for override in overrides for problem in apply_override(data, override)]
    others = [Problem(name, "there is no config here (--set)", "slurm.NAME=VALUE") for name in data if name != "slurm"]
    found = [*problems, *others, *find_problems(data.get("slurm", {}), type_info(Slurm), "slurm")]
    if found:
        raise ConfigProblems(found, "--set")
    return msgspec.convert(data.get("slurm", {}), Slurm)


def job_of_command(launch: CommandLaunch, slurm: Slurm) -> Job:
    """What to ask Slurm for. RefusedError if the job would be too small."""
    job = _job(
        slurm,
        needed=max(1, launch.nnodes),
        needs=f"--nnodes {launch.nnodes} needs as many",
        name=Path(launch.url).name,
        folder=local_dir_of(launch.url),
        what=f"{launch.per_node} processes on each of",
    )
    return replace(job, options=(f"--chdir={launch.cwd}", *job.options))


def command_text(launch: CommandLaunch, slurm: Slurm, given: Sequence[str]) -> str:
    """The whole batch file of a supervised command; `given`: the options of `ftrain supervise`, of which the last ones hold."""
    container = container_options(slurm.container_image, slurm.container_mounts)
    options = [*given, "--run", launch.url, *(f"--srun={option}" for option in [*container, *slurm.srun])]
    options += ["--requeue"] if slurm.requeue else []
    return batch_file(job_of_command(launch, slurm), [*FTRAIN, "supervise", *options, "--", *launch.argv])


def batch_text(config: Config, config_path: str, overrides: Sequence[str]) -> str:
    """The whole batch file of a run."""
    settings = [word for override in overrides for word in ("--set", override)]
    path = str(Path(config_path).absolute())
    return batch_file(job_of(config), [*FTRAIN, "run", path, *settings])


def config_of(folder: Path) -> Config:
    """The config that the run in `folder` was launched with."""
    launch = msgspec.json.decode((folder / CONFIGURED).read_bytes(), type=Launch)
    return msgspec.convert(launch.config, Config)


class JobNodes:
    """The srun that holds one agent on each node of this job. Used by the thin parent of a run; main thread only.

    Should it end although the run goes on, it is started again on the nodes that the job still has.
    """

    def __init__(self, folder: Path, argv: Callable[[int], list[str]]) -> None:
        """Nothing is started yet. `argv` gives the srun for so many nodes; its output goes to a log in `folder`."""
        self._folder, self._argv = folder, argv
        self._process: subprocess.Popen[bytes] | None = None
        self._next: float | None = None

    def tick(self) -> None:
        """Have it run."""
        if self._process is None:
            argv = self._argv(nodes_left(job_id()))
            self._process = spawn(Spawn(argv=argv, log=self._folder / "logs" / "srun.log"))
        elif self._process.poll() is not None:
            now = time.monotonic()
            self._next = self._next if self._next is not None else now + AGAIN_S  # the run may just be over
            if now >= self._next:
                self._process, self._next = None, None

    def close(self) -> None:
        """The run is over: the agents leave by themselves, and with them the srun; after a while it is told to."""
        if self._process is None:
            return
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()


def nodes_of_job(folder: Path) -> JobNodes | None:
    """The nodes to be started from here; None if this is no Slurm job, or the run is one of a single machine."""
    config = config_of(folder)
    (folder / REQUEUE).unlink(missing_ok=True)
    if not job_id() or not config.machine.ranks_per_node:
        return None
    shared, wait_s = shared_dir(config, folder), config.recovery.nodes_s
    return JobNodes(folder, lambda nodes: join_command(shared, config.slurm, nodes=nodes, wait_s=wait_s))


def join_command(shared: Path, slurm: Slurm, *, nodes: int, wait_s: float) -> list[str]:
    """The srun that offers `nodes` nodes of this job to the run. Inside a container its own ftrain is used."""
    contained = slurm.container_image or any(option.startswith("--container-image") for option in slurm.srun)
    inside = ["ftrain"] if contained else FTRAIN
    return node_command(
        [*inside, "join", str(shared), "--wait", f"{wait_s:g}"],
        nodes=nodes,
        image=slurm.container_image,
        mounts=slurm.container_mounts,
        options=slurm.srun,
    )


def ask_for_requeue(folder: Path, why: str) -> None:
    """The coordinator's last word when the scheduler ended the run: its parent is to put the job back into the queue."""
    (folder / REQUEUE).write_text(why)


def requeue_if_asked(folder: Path) -> str:
    """Put this job back into the queue if its run was ended by the scheduler; what was done, in words, empty if nothing."""
    why = folder / REQUEUE
    if not job_id() or not why.exists():
        return ""
    try:
        requeue(job_id())
    except SlurmError as error:  # it may be back already: preemption does that by itself
        return f"job {job_id()} was not put back into the queue: {error}"
    return f"job {job_id()} goes back into the queue ({why.read_text()})"
