"""What the coordinator tells a worker and the keeper at their start, as plain records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.retries import EVIDENCE_ENV
from ftrain.config import Machine
from recovery.messages import WorkerSpec
from recovery.network import first_present
from recovery.places import Place


class WorkerArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of ftrain.compose.worker:main."""

    config: dict[str, Any]
    restore_url: str  # the run whose checkpoints the state may come from: this one, or the one it begins from
    local_dir: str
    storage_step: int | None  # newest committed step there, or None
    stored_step: int  # newest committed step of this run, 0 if there is none
    local_step: int | None  # newest step of the local tier, or None
    own_slots: list[str]  # this rank's arena slots
    source_slots: list[str]  # all slots a snapshot may be restored from
    layout: str
    whole: dict[str, Any] = {}  # the config of all phases, if there are several; `config` is that of this one
    phase: int = 0
    slot: int = 0  # place on its node: which GPU
    slots: int = 1  # places of that node
    spread: bool = False  # whether other ranks' slots are on other nodes
    nodes: list[str] = []  # of each rank, where the nodes hold copies of each other's snapshots
    control: str = ""  # folder in which their keepers say how they are reached
    evidence: bool = False  # more of it than usual
    skips: list[tuple[int, int]] = []  # first and last update of each range whose data are passed over
    nearer: bool = True  # whether a snapshot in memory may be what the attempt begins with
    port: int = 0  # added by the agent, as the host is
    host: str = "127.0.0.1"


class KeeperArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The keeper's file of arguments."""

    url: str
    local_dir: str
    upload_mib_s: float
    faults: list[dict[str, Any]]
    storage: dict[str, Any] = {}
    local_url: str = ""
    local_every_steps: int = 0
    several_nodes: bool = False
    control: str = ""  # where keepers find each other; empty: they do not copy to each other
    interfaces: list[str] = []  # of which the first that there is leads to other nodes


class Memo(msgspec.Struct, frozen=True, kw_only=True):
    """What a coordinator that finds an earlier one's agent must know about its memory."""

    generation: int
    epoch: int
    attempt: int
    parallel: dict[str, Any] = {}  # of its newest attempt, which may be another than the launch asks for
    phase: int = 0
    places: tuple[Place, ...] = ()
    held: dict[int, dict[str, int]] = {}  # memory areas of older layouts that are still needed
    homes: dict[str, str] = {}  # where those are, if there are several nodes
    asked: str = ""  # digest of the config that its workers were started for
    skips: list[tuple[int, int]] | None = None  # ranges of data that they were told to pass over


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the newest `ftrain run` wants, as the coordinator reads it at each of its starts."""

    config: dict[str, Any]
    fingerprint: str
    changes: list[dict[str, Any]]
    origin_url: str = ""  # --from: the state of another run's checkpoint is the first state of this one
    origin_step: int = 0
    take_over: bool = False
    command: str = ""  # of a person: goes on with the run


def record_once(folder: str, changes: list[dict[str, Any]]) -> bool:
    """Whether the changes of a launch are still to be put into the ledger: its first coordinator does, the next ones do not."""
    marker, wanted = Path(folder) / "changes-recorded", msgspec.json.encode(changes)
    if not changes or (marker.exists() and marker.read_bytes() == wanted):
        return False
    marker.write_bytes(wanted)
    return True


def worker_spec(rank: int, args: WorkerArgs, machine: Machine) -> WorkerSpec:
    """How a worker is started: its entry, its arguments, its environment, and the memory areas it gets."""
    return WorkerSpec(
        rank=rank,
        entry="ftrain.compose.worker:main",
        args=msgspec.to_builtins(args),
        memfds=tuple(args.source_slots),
        env={
            "GLOO_SOCKET_IFNAME": first_present(machine.interface),
            "OMP_NUM_THREADS": str(machine.threads),
            **(EVIDENCE_ENV if args.evidence else {}),
        },
    )
