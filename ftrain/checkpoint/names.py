"""Names of memory areas: whose they are can be told from the name alone, by agents, keepers and workers alike.

arena-g0002-r00017-s1     slot 1 of rank 17 in the second changed layout, on its own node
peer-g0002-r00017-s0      a copy of one of its snapshots, on another node
"""

from __future__ import annotations

import re
from typing import NamedTuple

OWN = "arena-"
PEER = "peer-"
PEER_SLOTS = 2
"""Areas for the copies of one rank: one that is whole, and one that is being filled."""

_NAME = re.compile(r"(arena-|peer-)g(\d+)-r(\d+)-s(\d+)")


class AreaName(NamedTuple):
    """The parts of a name."""

    peer: bool
    generation: int
    rank: int
    number: int

    def __str__(self) -> str:
        return f"{PEER if self.peer else OWN}g{self.generation:04d}-r{self.rank:05d}-s{self.number}"


def area_name(name: str) -> AreaName:
    """The parts of a name; ValueError if it is none."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not the name of a memory area")
    kind, *numbers = found.groups()
    return AreaName(kind == PEER, *map(int, numbers))


def is_peer(name: str) -> bool:
    """Whether an area holds copies of another node's snapshots."""
    return name.startswith(PEER)


def of_peer(name: str) -> str:
    """Generation and rank of an area, "g0002-r00017": the same for a rank's own areas and for those of its copies."""
    return name.split("-", 1)[1].rsplit("-", 1)[0]


def peer_name(rank: int, index: int, generation: int) -> str:
    """Name of an area for copies of a rank's snapshots."""
    return str(AreaName(True, generation, rank, index))
