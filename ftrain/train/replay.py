"""A result that is not believed is computed once more before it changes the state, and what the two have in common is told.

The step is a pure function of the state and the data, and the state is still the one before it, so the repetition must agree
bit for bit (at a fixed layout on CPUs it does: docs/certify.md). If it agrees, the result came from the data or the code. If
not, some rank computed wrongly in one of the two: silent corruption. Each rank keeps what it contributed to the vote (its
share of the loss, and the squares of the gradients that it owns); whose share differs computed something else, or, where only
the squares do, owns the gradients that somebody computed differently. Kernels that do not repeat themselves (some on GPUs)
make all ranks differ: then nobody is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from ftrain.checkpoint.messages import Doubt
from ftrain.parallel.mesh import Mesh


class Outcome(Protocol):
    """What is looked at of a step's result."""

    @property
    def step(self) -> int: ...

    @property
    def loss(self) -> float: ...

    @property
    def grad_norm(self) -> float: ...

    @property
    def applied(self) -> bool: ...


def differing(mesh: Mesh, before: torch.Tensor, after: torch.Tensor) -> tuple[int, ...]:
    """The ranks whose shares [n] fp64 differ in a bit; a collective, the same answer on all ranks."""
    marks = torch.zeros(mesh.shape.world, dtype=torch.int64, device=after.device)
    marks[mesh.rank] = int(not torch.equal(before.view(torch.int64), after.view(torch.int64)))
    return tuple(int(rank) for rank in mesh.all_reduce(marks).nonzero().flatten())


def doubt(first: Outcome, again: Outcome, ranks: Sequence[int]) -> Doubt | None:
    """What to say of a step that was repeated; None if it failed alike, which is told when it has failed often enough."""
    finite = math.isfinite(first.grad_norm) and math.isfinite(first.loss)
    was = f"had a gradient norm of {first.grad_norm:.3g}, far above the usual" if finite else "was not finite"
    if not ranks:
        reason = f"step {first.step} {was}, and the same when repeated: data or code"
        return Doubt(step=first.step, reason=reason) if again.applied else None
    now = "another" if finite else "finite" if again.applied else "not finite in another way"
    one = ranks[0] if len(ranks) == 1 else None
    who = f"rank {one} computed something else" if one is not None else f"{len(ranks)} ranks computed something else"
    reason = f"step {first.step} {was}, and {now} when repeated: silent corruption; {who}"
    return Doubt(step=first.step, reason=reason, rank=one, corruption=True)
