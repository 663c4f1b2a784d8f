"""A run as a Slurm job: from the config to the batch file, and the nodes of the job while the run lives."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ftrain.combinations import replicas
from ftrain.compose.args import Launch
from ftrain.compose.errors import RefusedError
from ftrain.compose.nodes import num_nodes, shared_dir
from ftrain.compose.paths import local_dir
from ftrain.config import Config
from recovery.launch import Spawn, spawn
from recovery.slurm import Job, SlurmError, batch_file, job_id, node_command, nodes_left, requeue

REQUEUE = "requeue"
"""File in the run's folder: the run was ended by the scheduler, and wants to go on."""
AGAIN_S = 10.0  # between two attempts to start nodes that are gone
END_S = 15.0


def job_of(config: Config) -> Job:
    """What to ask Slurm for. RefusedError if the config does not say how many ranks a node has."""
    parallel, slurm = config.parallel, config.slurm
    per_node = config.machine.ranks_per_node
    if not per_node:
        wanted = "say how many ranks (GPUs) a node has, e.g. --set machine.ranks_per_node=8"
        raise RefusedError([f"machine.ranks_per_node = 0: {wanted}"])
    needed = num_nodes(config, parallel.ranks)
    nodes = slurm.nodes or needed + slurm.spare_nodes
    if nodes < needed:
        raise RefusedError([f"slurm.nodes = {nodes}: {parallel.ranks} ranks at {per_node} a node need {needed}"])
    return Job(
        name=Path(config.run.url.rstrip("/")).name or "ftrain",
        nodes=nodes,
        output=str(shared_dir(config, local_dir(config)) / "slurm-%j.out"),
        comment=f"{parallel.ranks} ranks = tp {parallel.tp} x cp {parallel.cp} x pp {parallel.pp} x dp {replicas(config)}, "
        f"{per_node} on each of {needed} nodes" + (f", {nodes - needed} spare" if nodes > needed else ""),
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        time=slurm.time,
        signal_s=slurm.signal_s,
        requeue=slurm.requeue,
        options=slurm.sbatch,
    )


def batch_text(config: Config, config_path: str, overrides: Sequence[str]) -> str:
    """The whole batch file of a run."""
    settings = [word for override in overrides for word in ("--set", override)]
    path = str(Path(config_path).absolute())
    return batch_file(job_of(config), [sys.executable, "-P", "-m", "ftrain.cli.entry", "run", path, *settings])


def config_of(folder: Path) -> Config:
    """The config that the run in `folder` was launched with."""
    launch = msgspec.json.decode((folder / "launch.json").read_bytes(), type=Launch)
    return msgspec.convert(launch.config, Config)


class JobNodes:
    """The srun that holds one agent on each node of this job. Used by the thin parent of a run; main thread only.

    Should it end although the run goes on, it is started again on the nodes that the job still has.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        """Nothing is started yet."""
        self._config, self._folder = config, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._next: float | None = None

    def tick(self) -> None:
        """Have it run."""
        if self._process is None:
            self._process = spawn(Spawn(argv=self.argv(), log=self._folder / "logs" / "srun.log"))
        elif self._process.poll() is not None:
            now = time.monotonic()
            self._next = self._next if self._next is not None else now + AGAIN_S  # the run may just be over
            if now >= self._next:
                self._process, self._next = None, None

    def argv(self) -> list[str]:
        """The srun for the nodes as they are now."""
        slurm = self._config.slurm
        inside = ["ftrain"] if slurm.container_image else [sys.executable, "-P", "-m", "ftrain.cli.entry"]
        return node_command(
            [*inside, "join", str(shared_dir(self._config, self._folder)), "--wait", f"{self._config.recovery.nodes_s:g}"],
            nodes=nodes_left(job_id()),
            image=slurm.container_image,
            mounts=slurm.container_mounts,
            options=slurm.srun,
        )

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
    return JobNodes(config, folder) if job_id() and config.machine.ranks_per_node else None


def ask_for_requeue(folder: Path, why: str) -> None:
    """The coordinator's last word when the scheduler ended the run: its parent is to put the job back into the queue."""
    (folder / REQUEUE).write_text(why)


def requeue_if_asked(folder: Path) -> str:
    """Put this job back into the queue if its run was ended by the scheduler; what was done, in words, empty if nothing."""
    why = folder / REQUEUE
    if not job_id() or not why.exists() or not config_of(folder).slurm.requeue:
        return ""
    try:
        requeue(job_id())
    except SlurmError as error:  # it may be back already: preemption does that by itself
        return f"job {job_id()} was not put back into the queue: {error}"
    return f"job {job_id()} goes back into the queue ({why.read_text()})"
