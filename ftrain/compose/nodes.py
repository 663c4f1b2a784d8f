"""What a run on several machines needs beyond one on a single machine: where the nodes find each other, and what each of them
is told. Written by the coordinator into a folder that all nodes see; read by `ftrain join` on each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ftrain.checkpoint.layout import rank_slot_nbytes
from ftrain.checkpoint.names import PEER_SLOTS
from ftrain.compose.args import KeeperArgs
from ftrain.compose.errors import RefusedError
from ftrain.compose.paths import folder_of
from ftrain.config import Config
from ftrain.phases import effective, num_phases
from recovery.files import replace_file
from recovery.network import interface_address, names_of
from recovery.ports import can_bind
from recovery.rendezvous import control_folder
from recovery.spec import FleetSpec

NODE_FILE = "node.json"


class NodeArgs(msgspec.Struct, frozen=True, kw_only=True):
    """What every node is told; what differs from node to node, each finds out by itself."""

    local_dir: str
    """The run's local folder; each node has a folder of its own in it."""
    zygote_preload: str
    lease_s: float
    interfaces: list[str]
    """Of which the node takes the first that it has; empty: the one that leads out of it."""
    keeper: KeeperArgs | None
    """None: the run has no keeper."""
    patience_s: float
    env: dict[str, str] = {}


def shared_dir(config: Config, folder: Path) -> Path:
    """The folder that all nodes see."""
    return folder_of(config.machine.shared_dir) if config.machine.shared_dir else folder


def node_dir(local_dir: Path, node: str) -> Path:
    """A node's own folder: its agent's record and logs, its ranks' logs."""
    return local_dir / "nodes" / node


def this_node() -> str:
    """The name of this node: the scheduler's, else the host's."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def num_nodes(config: Config, ranks: int) -> int:
    """Nodes that so many ranks need."""
    return -(-ranks // config.machine.ranks_per_node) if config.machine.ranks_per_node else 1


def arena_nbytes(config: Config) -> int:
    """Bytes of the memory areas on the node that has most of them, in the phase that needs most."""
    return max(_arena_nbytes(effective(config, number)) for number in range(num_phases(config)))


def _arena_nbytes(config: Config) -> int:
    """Its ranks' slots, and the copies of another node's."""
    sizes = rank_slot_nbytes(config)
    per_node = config.machine.ranks_per_node or len(sizes)
    nodes = [sum(sizes[first : first + per_node]) for first in range(0, len(sizes), per_node)]
    copies = PEER_SLOTS if config.checkpoint.peer_copy and len(nodes) > 1 else 0
    return max(own * config.checkpoint.slots + nodes[number - 1] * copies for number, own in enumerate(nodes))


def fleet_spec(config: Config, folder: Path) -> FleetSpec | None:
    """How the coordinator meets its nodes; None for a run on one machine. NoInterfaceError if this one is not on their net."""
    if not config.machine.ranks_per_node:
        return None
    return FleetSpec(
        control=control_folder(shared_dir(config, folder)),
        host=interface_address(names_of(config.machine.interface))[1],
        port=config.machine.port,
        ranks_per_node=config.machine.ranks_per_node,
        patience_s=config.recovery.nodes_s,
    )


def check_port(spec: FleetSpec | None, option: str) -> None:
    """RefusedError if the coordinator could not wait for its nodes where `option` says, because somebody else does."""
    if spec is not None and not can_bind(spec.host, spec.port):
        raise RefusedError(
            [f"{option}: port {spec.port} of {spec.host} is in use: give another one, or 0 for any that is free"]
        )


def tell_nodes(shared: Path, args: NodeArgs) -> None:
    """Write down what a node must know, before the address: whoever finds the one finds the other."""
    control = control_folder(shared)
    control.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(control / NODE_FILE, args)


def node_args(config: Config, folder: Path, *, preload: str, keeper: KeeperArgs, env: dict[str, str]) -> NodeArgs:
    """What the nodes of a configured run must know."""
    return NodeArgs(
        local_dir=str(folder),
        zygote_preload=preload,
        lease_s=config.recovery.lease_s,
        interfaces=names_of(config.machine.interface),
        keeper=keeper,
        patience_s=config.recovery.nodes_s,
        env=env,
    )


def write(path: Path, record: Any) -> None:
    """Whole or not at all, and for this user only: others read it at any moment."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(record)), mode=0o600)
