"""What the benchmark and its ranks tell each other: a closed set, over the supervisor's own framing."""

from __future__ import annotations

from typing import Any

import msgspec


class RankArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's file of arguments."""

    rank: int
    world: int
    epoch: int
    config: dict[str, Any]
    rendezvous: str  # file of the process group's store
    folder: str  # where the peer stores
    slots: dict[str, int]  # arena slots of this rank: name -> inherited descriptor


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Parent to rank: measure this case once. All ranks get the same one."""

    case: str
    number: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Parent to rank: done."""


class Up(msgspec.Struct, frozen=True, kw_only=True, tag="up"):
    """Rank to parent: engine and arenas are there."""

    logical_nbytes: int
    parameters: int


class ForKeeper(msgspec.Struct, frozen=True, kw_only=True, tag="for_keeper"):
    """Rank to parent: to be relayed to the keeper, as the agent would."""

    payload: bytes


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """Rank to parent: the seconds the training loop was blocked, and for our own save the digests of the live state."""

    seconds: float
    cpu_seconds: float
    digests: dict[str, str] = {}
    blocked_s: float = 0.0  # of an overlapped save: what the step waited for, in all


FromParent = Measure | Leave
FromRank = Up | ForKeeper | Measured
