"""What `ftrain supervise` was asked for, and what each of the command's processes is told of it: the words of torchrun."""

from __future__ import annotations

import os

import msgspec

from recovery.ports import PORTS


class CommandLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What `ftrain supervise` wants, as the coordinator reads it at each of its starts. `nproc` 0: one process, which gets no
    variables of a rank. `nnodes` 0: this machine. Times in seconds."""

    url: str
    argv: tuple[str, ...]
    cwd: str
    nproc: int = 0
    nnodes: int = 0
    min_nodes: int = 0
    """Least nodes to go on with; 0: all of them."""
    nodes_s: float = 600.0
    lease_s: float = 60.0
    interface: str = ""
    port: int = 0
    """Of the coordinator, for the other nodes; 0: any."""
    srun: tuple[str, ...] = ()
    requeue: bool = False
    patterns: tuple[str, ...] = ()
    hang_s: float = 600.0
    start_s: float | None = None
    output_is_progress: bool = False
    stop_s: float = 60.0
    max_restarts: int = 3
    master_addr: str = ""
    master_port: int = 0
    openblas_threads: str | None = None
    take_over: bool = False
    webhook: str = ""
    command: str = ""

    @property
    def per_node(self) -> int:
        """Processes of an attempt on each node."""
        return max(1, self.nproc)

    @property
    def ports(self) -> tuple[int, int]:
        """First and last of the ports of which rank 0 opens one."""
        return (self.master_port, self.master_port) if self.master_port else PORTS


def environment(launch: CommandLaunch, rank: int, nodes: int, attempt: int) -> dict[str, str]:
    """What torchrun tells its workers, under the same names, but for where they meet: that the first one's agent knows. For a
    single process only what every script may want."""
    always = {"PYTHONUNBUFFERED": "1", "FTRAIN_RUN": launch.url}
    if launch.nproc == 0:
        return always
    world, local = str(nodes * launch.nproc), str(launch.nproc)
    threads = {"OMP_NUM_THREADS": "1"} if launch.nproc > 1 and "OMP_NUM_THREADS" not in os.environ else {}
    return {
        **always,
        **threads,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % launch.nproc),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": str(rank // launch.nproc),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local,
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        "TORCHELASTIC_RUN_ID": launch.url,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
