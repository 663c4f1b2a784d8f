"""A private Slurm cluster on this machine, for tests: real slurmctld, slurmd, munged, srun, on ports and in folders of its own.

Each "node" is a slurmd of its own name (Slurm's multiple-slurmd support); nothing of the system's services is used or changed.
A node is killed as a power cut would do it: slurmd, its step daemons, and every process that was started under its name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.free_ports import later

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
PATIENCE_S = 30.0
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=2
InactiveLimit=0
KillWait={kill_wait}
MessageTimeout=5
TCPTimeout=2
JobRequeue=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What this machine lacks for such a cluster, in words; empty if nothing."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} missing: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "several slurmd on one machine need root"


def wait_until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Until the condition holds."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)


class SlurmCluster:
    """`num_nodes` nodes n1, n2, ... in a partition main."""

    def __init__(self, folder: Path, num_nodes: int, *, kill_wait_s: int = 20) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o755)
        self.folder, self.names = folder, [f"n{number}" for number in range(1, num_nodes + 1)]
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        host, ports = socket.gethostname().split(".")[0], _free_ports(num_nodes + 1)
        rows = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 State=UNKNOWN"
            for name, port in zip(self.names, ports[1:], strict=True)
        ]
        text = CONFIG.format(host=host, port=ports[0], user="root", folder=folder, kill_wait=kill_wait_s, nodes="\n".join(rows))
        (folder / "slurm.conf").write_text(text)
        (folder / "state").mkdir(exist_ok=True)

    def start(self) -> None:
        """All daemons, until every node is idle."""
        munge = self.folder / "munge"
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(secrets.token_bytes(128))
        (munge / "key").chmod(0o400)
        files = [f"--{kind}-file={munge / kind}" for kind in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--force", f"--socket={self.folder / 'munge.socket'}", "--num-threads=2", *files)
        self._daemon("slurmctld", "-f", self.env["SLURM_CONF"])
        for name in self.names:
            self.start_node(name)
        wait_until(lambda: len(self.idle()) == len(self.names), "idle nodes")

    def _daemon(self, *argv: str) -> None:
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{argv[0]}: {done.stderr}"

    def start_node(self, name: str) -> None:
        """A node that is new, or that comes back."""
        self._daemon("slurmd", "-N", name, "-f", self.env["SLURM_CONF"])

    def run(self, *argv: str) -> str:
        """Output of one of Slurm's commands. A controller that is busy with a lost node may not answer at first."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
            if done.returncode == 0:
                return done.stdout.strip()
            assert "Unable to contact" in done.stderr, f"{argv}: {done.stderr}"
            assert time.monotonic() < deadline, f"{argv}: {done.stderr}"
            time.sleep(0.2)

    def idle(self) -> list[str]:
        """Idle nodes."""
        return self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()

    def state(self, job: str) -> str:
        """Of a job; empty if Slurm has forgotten it."""
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def _processes(self, name: str) -> list[int]:
        """Everything that was started under this node's name."""
        marks = {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.env['SLURM_CONF']}".encode()}
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marks <= set((folder / "environ").read_bytes().split(b"\0")):
                    found.append(int(folder.name))
        return found

    def stands_still(self, name: str) -> bool:
        """Whether some process of this node was stopped by a signal."""
        return any(_state(pid) == "T" for pid in self._processes(name))

    def kill_node(self, name: str) -> None:
        """As if its power was cut."""
        victims = [int((self.folder / f"slurmd.{name}.pid").read_text())]
        inside = self._processes(name)
        victims += [parent for pid in inside if (parent := _step_daemon(pid))]
        for pid in dict.fromkeys([*victims, *inside]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _step_daemons(self) -> list[int]:
        """All slurmstepd of this cluster: one that cannot reach its controller any more waits for ever."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (folder / "comm").read_text().strip() == "slurmstepd":
                    found += [int(folder.name)] if os.readlink(folder / "cwd").startswith(str(self.folder)) else []
        return found

    def stop(self) -> None:
        """End all jobs and daemons, whatever state they are in."""
        for pid in [*(pid for name in self.names for pid in self._processes(name)), *self._step_daemons()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        files = [*self.folder.glob("slurmd.*.pid"), self.folder / "slurmctld.pid", self.folder / "munge" / "pid"]
        pids = [int(file.read_text()) for file in files if file.exists()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """One letter of /proc; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _step_daemon(pid: int) -> int:
    """The slurmstepd that started a process, 0 if there is none."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return parent if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text() else 0
    except OSError:
        return 0


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(later(taken=found))
    return found


@contextlib.contextmanager
def slurm_cluster(folder: Path, num_nodes: int) -> Iterator[SlurmCluster]:
    """A cluster that is up."""
    cluster = SlurmCluster(folder, num_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
