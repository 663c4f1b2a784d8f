"""Which checkpoints to keep: small policies over plain facts, combined by "any of them wants it".

A policy answers one question and knows nothing of stores, so that each can be tested with a list of numbers, and the planner
can simulate what a year of training would keep. There are no flags that disable one another: compose policies instead.
Whatever they say, collection never deletes the newest good checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = [
    "CheckpointFacts",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPinned",
    "KeepUpTo",
    "KeepYoung",
    "RetentionPolicy",
    "kept_steps",
]


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a policy may know of a checkpoint."""

    step: int
    created_s: float
    metric: float | None
    """The evaluation loss recorded with it, if any."""


class RetentionPolicy(Protocol):
    """One reason to keep checkpoints."""

    def keep(self, checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> Collection[int]:
        """The steps to keep, out of checkpoints sorted by step."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest `n`."""

    n: int

    def keep(self, checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> Collection[int]:
        """The `n` highest steps."""
        return {c.step for c in checkpoints[max(0, len(checkpoints) - self.n) :]}


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Every checkpoint whose step is a multiple of `steps`."""

    steps: int

    def keep(self, checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> Collection[int]:
        """The multiples."""
        return {c.step for c in checkpoints if c.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The `n` with the lowest (or highest) metric; of equals the later. Those without a metric do not take part."""

    n: int
    mode: Literal["lowest", "highest"] = "lowest"

    def keep(self, checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> Collection[int]:
        """The best."""
        sign = 1.0 if self.mode == "lowest" else -1.0
        rated = [(sign * c.metric, -c.step) for c in checkpoints if c.metric is not None and not math.isnan(c.metric)]
        return {-step for _, step in sorted(rated)[: self.n]}


@dataclass(frozen=True, slots=True)
class KeepYoung:
    """Everything younger than `seconds`."""

    seconds: float

    def keep(self, checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> Collection[int]:
        """The young ones."""
        return {c.step for c in checkpoints if now_s - c.created_s < self.seconds}


@dataclass(frozen=True, slots=True)
class KeepPinned:
    """Named steps."""

    steps: frozenset[int]

    def keep(self, checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> Collection[int]:
        """Those of the named ones that exist."""
        return {c.step for c in checkpoints if c.step in self.steps}


@dataclass(frozen=True, slots=True)
class KeepUpTo:
    """Everything up to a step: as long as it is not certain that the run will not go back there."""

    step: int

    def keep(self, checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> Collection[int]:
        """The steps up to that one."""
        return {c.step for c in checkpoints if c.step <= self.step}


def kept_steps(policies: Sequence[RetentionPolicy], checkpoints: Sequence[CheckpointFacts], *, now_s: float) -> frozenset[int]:
    """Steps that at least one policy keeps, and always the highest. Without any policy everything is kept."""
    ordered = sorted(checkpoints, key=lambda c: c.step)
    if not policies:
        return frozenset(c.step for c in ordered)
    wanted = {step for policy in policies for step in policy.keep(ordered, now_s=now_s)}
    return frozenset(wanted | {c.step for c in ordered[-1:]})
