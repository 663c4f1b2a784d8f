"""How the processes of a run are started and watched: the two specifications, without the machinery that obeys them."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from recovery import paths

LEAVE = signal.SIGUSR2
"""To an agent: end the workers and leave. SIGTERM is not for it: a scheduler sends that to every process of a job."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent is started with."""

    node: str
    local_dir: str
    coordinator: str
    """Path of the coordinator's socket."""
    control: str = ""
    """Folder with the run's key and the coordinator's address, for an agent on another machine."""
    zygote_preload: str = ""
    """Module the zygote imports."""
    keeper_argv: tuple[str, ...] = ()
    """Command of the keeper, to which its socket's number is appended; empty: no keeper."""
    lease_s: float = 60.0
    patience_s: float = 0.0
    """How long an agent waits for its first coordinator, if that is longer than the lease: it holds nothing yet."""
    env: dict[str, str] = {}
    """Added to the environment of keeper, zygote and workers."""
    host: str = "127.0.0.1"
    """Address on which the workers of an attempt meet."""
    node_env: dict[str, str] = {}
    """What only this node knows (its network interface): wins over what the coordinator says of a worker's environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Agents on several machines: whom to wait for, and where they find the coordinator. Times in seconds."""

    control: Path
    """Folder that all nodes see, with the run's key and the coordinator's address."""
    host: str
    """Address at which the coordinator listens, and which the agents can reach."""
    port: int = 0
    ranks_per_node: int = 1
    patience_s: float = 600.0
    """Longest wait for enough nodes."""
    rejoin_s: float = 5.0
    """An agent whose connection was ended from its side, and that has not called again after so long, is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSpec:
    """How the processes of a run are started and watched. Times in seconds."""

    local_dir: Path
    node: str = "localhost"
    host: str = "127.0.0.1"
    """Address on which the workers of an attempt meet."""
    places: int = 1
    """Ranks that this node has room for."""
    zygote_preload: str = ""
    keeper_argv: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    lease_s: float = 60.0
    hang_s: float = 300.0
    hang_floor_s: float = 60.0
    """Nobody is suspected sooner, however fast the run was so far."""
    start_s: float = 600.0
    """Longest time from an attempt's start to its first step."""
    stop_s: float = 120.0
    drain_s: float = 600.0
    """Longest wait, after the last step, for what is still on its way to storage."""
    settle_s: float = 0.3
    """Longest wait for the peers' own errors after a death."""
    quiet_s: float = 0.1
    """That wait ends when nothing more has been heard for so long."""
    evidence_s: float = 1.5
    teardown_s: float = 15.0
    """Longest time from SIGKILL to a worker's end."""
    tick_s: float = 0.25
    """How often somebody looks around where no event would wake anybody: for silent ranks, notices, what a script wrote."""
    agent_s: float = 30.0
    """Longest time for an agent to come forward."""
    prepare_s: float = 300.0
    """Longest time to allocate the memory areas."""
    fleet: FleetSpec | None = None
    """None: one machine, whose agent the coordinator starts itself."""
    take_over: bool = False
    """Take the run from an owner on another host."""

    def for_agent(self) -> AgentSpec:
        """What the agent of this node is started with."""
        return AgentSpec(
            node=self.node,
            local_dir=str(self.local_dir),
            coordinator=str(paths.coordinator_socket(self.local_dir)),
            zygote_preload=self.zygote_preload,
            keeper_argv=self.keeper_argv,
            lease_s=self.lease_s,
            env=self.env,
            host=self.host,
        )
