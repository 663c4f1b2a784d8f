"""What the ranks tell each other once per step, in one all-reduce.

Decisions that all ranks must take alike (stop here, save now, skip this update) may not depend on what each of them happens
to know. So each contributes small integers, they are summed together with the norm and the loss in one fp64 vector, and
everybody acts on the same sums. fp64 holds integers up to 2^53 exactly.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

import torch

from ftrain.parallel.mesh import Mesh
from ftrain.parallel.norm import round_to_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What a rank wishes or reports; after the vote, how many ranks did."""

    stop: int = 0  # finish this step, save and exit
    save: int = 0  # write a checkpoint after this step
    no_slot: int = 0  # I have no free slot for a snapshot
    uploading: int = 0  # my previous upload is not finished


@dataclass(frozen=True, slots=True)
class Vote:
    """The sums over all ranks."""

    norm: float  # of the summed gradients, before clipping
    loss: float
    is_finite: bool  # every gradient and every loss of every rank
    flags: Flags


def vote(mesh: Mesh, *, squares: torch.Tensor, loss: torch.Tensor, flags: Flags, exact: bool) -> Vote:
    """One all-reduce over all ranks. `squares` and `loss` are this rank's fp64 shares; `exact` keeps the norm in fp64."""
    broken = ~(torch.isfinite(squares) & torch.isfinite(loss))
    counts = torch.tensor(astuple(flags), dtype=torch.float64, device=squares.device)
    sums = mesh.all_reduce(torch.cat([torch.stack([squares, loss, broken.double()]), counts])).tolist()
    norm = math.sqrt(sums[0]) if sums[0] >= 0 else math.nan
    return Vote(
        norm=norm if exact else round_to_float32(norm),
        loss=sums[1],
        is_finite=sums[2] == 0,
        flags=Flags(**{field.name: int(count) for field, count in zip(fields(Flags), sums[3:], strict=True)}),
    )
