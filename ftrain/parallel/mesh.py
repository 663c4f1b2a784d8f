"""The mesh of a running rank: its coordinate, and the process groups its collectives use.

`torch.distributed` moves the data; this is the only file that names its collectives. Groups are made for axes of more than
one rank that are not the whole world, in one fixed order on every rank (making a group is itself a collective). A mesh of one
rank needs no `init_process_group` at all, so that tests, `ftrain sample` and a laptop pay for nothing.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ftrain.config import Axis
from ftrain.parallel.shape import AXES, SHARD_AXES, Coordinate, MeshShape

# torch 2.13 renamed the flat collectives; both names mean the same.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_GROUPS: tuple[tuple[Axis, ...], ...] = (("tp",), ("cp",), ("pp",), ("dp",), SHARD_AXES)


class Mesh:
    """A rank's view of the mesh. All ranks construct it, in the same order as other collectives."""

    def __init__(self, shape: MeshShape, rank: int, *, timeout: timedelta | None = None) -> None:
        self.shape = shape
        self.rank = rank
        self.coordinate: Coordinate = shape.coordinate(rank)
        self.shard = shape.shard(self.coordinate)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if shape.world > 1:
            _check_world(shape, rank)
            assert dist.group.WORLD is not None
            self._groups[tuple(range(shape.world))] = dist.group.WORLD
            self._make_groups(timeout)

    def _make_groups(self, timeout: timedelta | None) -> None:
        """The same groups in the same order on every rank, each once."""
        shape, made = self.shape, {tuple(range(self.shape.world))}
        for axes in _GROUPS:
            firsts = [rank for rank in range(shape.world) if not any(shape.coordinate(rank).on(axis) for axis in axes)]
            for members in (shape.group(rank, axes) for rank in firsts):
                if len(members) > 1 and members not in made:
                    made.add(members)
                    group = dist.new_group(list(members), timeout=timeout)
                    if self.rank in members:
                        self._groups[members] = group

    def group(self, axes: tuple[Axis, ...] = AXES) -> dist.ProcessGroup | None:
        """The group of this rank over `axes`; None if it is alone."""
        members = self.shape.group(self.rank, axes)
        return None if len(members) == 1 else self._groups[members]

    def all_reduce(self, tensor: torch.Tensor, axes: tuple[Axis, ...] = AXES) -> torch.Tensor:
        """Sum a tensor over `axes`, in place."""
        group = self.group(axes)
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum a flat buffer of equal regions over the shard axes, in place. Only this rank's region, returned, has the sums."""
        mine = self.region(flat)
        group = self.group(SHARD_AXES)
        if group is not None:
            _reduce_scatter(mine, flat, group=group)
        return mine

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a flat buffer of equal regions with everybody's own region, in place."""
        group = self.group(SHARD_AXES)
        if group is not None:
            _all_gather(flat, self.region(flat), group=group)

    def region(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's region of a flat buffer, as a view."""
        size = flat.numel() // self.shape.shards
        return flat[self.shard * size : (self.shard + 1) * size]


def _check_world(shape: MeshShape, rank: int) -> None:
    if not dist.is_initialized():
        raise RuntimeError(f"a mesh of {shape.world} ranks needs torch.distributed.init_process_group first")
    if (dist.get_world_size(), dist.get_rank()) != (shape.world, rank):
        raise ValueError(
            f"mesh {shape} is for {shape.world} ranks and this is rank {rank} of it, but the process group says "
            f"rank {dist.get_rank()} of {dist.get_world_size()}"
        )
