"""The mesh of a running rank: its coordinate, and the process groups its collectives use.

`torch.distributed` moves the data; this is the only file that names its collectives. Groups are made for axes of more than
one rank that are not the whole world, in one fixed order on every rank (making a group is itself a collective). A mesh of one
rank needs no `init_process_group` at all, so that tests, `ftrain sample` and a laptop pay for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ftrain.config import Axis
from ftrain.parallel.clock import LINK, Activity, Clock, Group, Wait
from ftrain.parallel.shape import AXES, SHARD_AXES, Coordinate, MeshShape

# torch 2.13 renamed the flat collectives; both names mean the same.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Along = tuple[Axis, ...] | Literal["experts", "replicas of experts"]
"""With whom: the ranks that differ along some axes; those that share out the experts; those that have the same ones."""

EXPERTS: Literal["experts"] = "experts"
_SAME_EXPERTS: Literal["replicas of experts"] = "replicas of experts"
GROUPS: tuple[Along, ...] = (("tp",), ("cp",), ("pp",), ("dp",), SHARD_AXES, EXPERTS, _SAME_EXPERTS)


class Work(Protocol):
    """What was started."""

    def wait(self) -> object:
        """Until it is done."""

    def is_completed(self) -> bool:
        """Whether it is."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective that was started: its result, once `wait` returns it."""

    tensor: torch.Tensor
    work: Work | None = None
    clock: Clock | None = None
    activity: Activity = LINK  # what waiting for it counts as

    def wait(self) -> torch.Tensor:
        """The result."""
        if self.work is not None and self.clock is not None:
            before = self.clock.enter(self.activity)
            self.work.wait()
            self.clock.enter(before)
        return self.tensor

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None or self.work.is_completed()


class Mesh:
    """A rank's view of the mesh. All ranks construct it, in the same order as other collectives."""

    def __init__(self, shape: MeshShape, rank: int, *, timeout: timedelta | None = None) -> None:
        self.shape = shape
        self.rank = rank
        self.coordinate: Coordinate = shape.coordinate(rank)
        self.shard = shape.shard(self.coordinate)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._timeout = timeout
        self._outer: dist.ProcessGroup | None = None
        self._made = {tuple(range(shape.world))}
        self.clock = Clock()
        self._waits: dict[Along, Group] = {}
        if shape.world > 1:
            _check_world(shape, rank)
            assert dist.group.WORLD is not None
            self._groups[tuple(range(shape.world))] = dist.group.WORLD
            for along in GROUPS:
                self._make_groups(groups(shape, along))

    def make_neighbours(self, width: int) -> None:
        """Groups of `width` neighbours along tp, for `sum_neighbours`. A collective of all ranks."""
        self._make_groups(_partition(self.shape, lambda rank: self.shape.neighbours(rank, width)))

    def _make_groups(self, all_members: Iterable[tuple[int, ...]]) -> None:
        """The same groups in the same order on every rank, each once."""
        for members in all_members:
            if len(members) > 1 and members not in self._made:
                self._made.add(members)
                group = dist.new_group(list(members), timeout=self._timeout)
                if self.rank in members:
                    self._groups[members] = group

    def group(self, along: Along = AXES) -> dist.ProcessGroup | None:
        """The group of this rank over axes, or another; None if it is alone."""
        them = members(self.shape, self.rank, along)
        return None if len(them) == 1 else self._groups[them]

    def all_reduce(self, tensor: torch.Tensor, axes: tuple[Axis, ...] = AXES) -> torch.Tensor:
        """Sum a tensor over `axes`, in place."""
        group = self.group(axes)
        if group is not None:
            before = self.clock.enter(self._wait(axes))
            self._sends(axes, 2 * tensor.nbytes)
            dist.all_reduce(tensor, group=group)
            self.clock.enter(before)
        return tensor

    def sum_neighbours(self, tensor: torch.Tensor, width: int) -> torch.Tensor:
        """Sum a tensor over this rank's group of `width` neighbours along tp, in place."""
        members = self.shape.neighbours(self.rank, width)
        if len(members) > 1:
            group = self.clock.group(members, "tp")
            before = self.clock.enter(Wait(group, group.ticket()))
            self.clock.send("tp", 2 * tensor.nbytes * (width - 1) / width)
            dist.all_reduce(tensor, group=self._groups[members])
            self.clock.enter(before)
        return tensor

    def start_sum(self, tensor: torch.Tensor, axes: tuple[Axis, ...]) -> Pending:
        """Begin to sum a tensor over `axes`, in place."""
        group = self.group(axes)
        self._sends(axes, 2 * tensor.nbytes)
        return self._pending(tensor, axes, None if group is None else dist.all_reduce(tensor, group=group, async_op=True))

    def start_max(self, tensor: torch.Tensor, axes: tuple[Axis, ...]) -> Pending:
        """Begin to take the largest of each element over `axes`, in place."""
        group = self.group(axes)
        self._sends(axes, 2 * tensor.nbytes)
        largest = dist.ReduceOp.MAX
        work = None if group is None else dist.all_reduce(tensor, op=largest, group=group, async_op=True)
        return self._pending(tensor, axes, work)

    def start_gather(self, out: torch.Tensor, part: torch.Tensor, axes: tuple[Axis, ...]) -> Pending:
        """Begin to fill `out` with everybody's `part` one after the other (both contiguous, compared flat)."""
        self._sends(axes, out.nbytes)
        work = _all_gather(out.view(-1), part.view(-1), group=self.group(axes), async_op=True)
        return self._pending(out, axes, work)

    def start_scatter(self, out: torch.Tensor, whole: torch.Tensor, axes: tuple[Axis, ...]) -> Pending:
        """Begin to sum `whole` over `axes`, of which `out` gets this rank's part (both contiguous, compared flat)."""
        return self._scatter(out, whole, axes)

    def reduce_scatter(self, flat: torch.Tensor, sharers: int = 1) -> torch.Tensor:
        """Sum a flat buffer of equal regions over the shard axes, in place. Only this rank's region, returned, has the sums.

        `sharers`: so many neighbours have other experts in theirs; then over the ranks with the same.
        """
        return self.start_reduce_scatter(flat, sharers).wait()

    def start_reduce_scatter(self, flat: torch.Tensor, sharers: int = 1) -> Pending:
        """Begin to."""
        mine = self.region(flat, sharers)
        return Pending(mine) if self.shape.shards == sharers else self._scatter(mine, flat, _among(sharers))

    def _scatter(self, out: torch.Tensor, whole: torch.Tensor, along: Along) -> Pending:
        """Host tensors are exchanged and added here, in the order of the ranks: Gloo's own takes two to nine times as long."""
        group = self.group(along)
        self._sends(along, whole.nbytes)
        if not whole.is_cpu:
            return self._pending(out, along, _reduce_scatter(out.view(-1), whole.view(-1), group=group, async_op=True))
        parts = whole.new_empty(whole.numel() // out.numel(), out.numel())
        work = dist.all_to_all_single(parts.view(-1), whole.view(-1), group=group, async_op=True)
        return self._pending(out, along, _Summing(work, parts, out.view(-1)))

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill a flat buffer of equal regions with everybody's own region, in place."""
        self.start_all_gather(flat).wait()

    def start_all_gather(self, flat: torch.Tensor, sharers: int = 1) -> Pending:
        """Begin to; `sharers` as in `reduce_scatter`."""
        along = _among(sharers)
        group = self.group(along)
        self._sends(along, flat.nbytes)
        work = None if group is None else _all_gather(flat, self.region(flat, sharers), group=group, async_op=True)
        return self._pending(flat, along, work)

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send the first `sent[0]` rows to the first of those that share out the experts, the next to the second, ...; what
        they sent to this rank, `received[i]` rows from each, one after the other.
        """
        out = rows.new_empty(sum(received), *rows.shape[1:])
        own = self.shape.shard(self.coordinate) % self.shape.ep
        self.clock.send(self._counted(EXPERTS).axis, (rows.shape[0] - sent[own]) * rows[:1].nbytes)
        before = self.clock.enter(self._wait(EXPERTS))
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=self.group(EXPERTS))
        self.clock.enter(before)
        return out

    def start_transfers(self, transfers: Sequence[tuple[torch.Tensor, int, bool]], axis: Axis = "pp") -> list[Pending]:
        """Begin to send (True) or receive (False) tensors to or from other ranks of an axis, by their index, as one batch."""
        group = self.group((axis,))
        here = self.coordinate
        self.clock.send(axis, sum(tensor.nbytes for tensor, _, sends in transfers if sends))
        operations = [
            dist.P2POp(dist.isend if sends else dist.irecv, tensor, self.shape.rank(replace(here, **{axis: peer})), group)
            for tensor, peer, sends in transfers
        ]
        works = dist.batch_isend_irecv(operations)
        if len(works) != len(transfers):  # a backend that makes one of a batch
            works = works * len(transfers)
        return [
            Pending(tensor, work, self.clock, LINK if axis == "pp" else self._wait((axis,)))
            for (tensor, _, _), work in zip(transfers, works, strict=True)
        ]

    def _pending(self, tensor: torch.Tensor, along: Along, work: Work | None) -> Pending:
        return Pending(tensor) if work is None else Pending(tensor, work, self.clock, self._wait(along))

    def _sends(self, along: Along, nbytes: int) -> None:
        """What a ring sends of a buffer of so many bytes from each of its members: all but its own part."""
        if self.group(along) is not None:
            group = self._counted(along)
            self.clock.send(group.axis, nbytes * (len(group.members) - 1) / len(group.members))

    def _counted(self, along: Along) -> Group:
        """The clock's record of a group of more than one member."""
        group = self._waits.get(along)
        if group is None:
            axes = SHARD_AXES if isinstance(along, str) else along
            axis = next(axis for axis in ("dp", "pp", "cp", "tp") if axis in axes and self.shape.size(axis) > 1)
            group = self._waits[along] = self.clock.group(members(self.shape, self.rank, along), axis)
        return group

    def _wait(self, along: Along) -> Wait:
        """What waiting for the collective counts as that is issued now."""
        group = self._counted(along)
        return Wait(group, group.ticket())

    # -- measurements: told apart from the collectives of a step, and not among them ---------------------------------------

    def start_least(self, values: torch.Tensor, members: tuple[int, ...]) -> dist.Work:
        """Begin to take the least of each value over a group, in place. On the host, beside whatever comes next."""
        work: dist.Work = dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._groups[members], async_op=True)
        return work

    def start_total(self, values: torch.Tensor, axes: tuple[Axis, ...]) -> dist.Work | None:
        """Begin to sum values over `axes`, in place, likewise."""
        group = self.group(axes)
        return None if group is None else dist.all_reduce(values, group=group, async_op=True)

    def start_collection(self, values: torch.Tensor) -> tuple[list[torch.Tensor], dist.Work | None]:
        """Begin to bring every rank's values to rank 0, likewise: what they come into, empty on the others."""
        if self.shape.world == 1:
            return [values], None
        into = [torch.empty_like(values) for _ in range(self.shape.world)] if self.rank == 0 else []
        return into, dist.gather(values, into or None, dst=0, async_op=True)

    def replicas(self, inner: int, device_type: str) -> DeviceMesh:
        """For `fully_shard`: this rank's replicas, in inner groups of so many neighbours. A collective of all ranks.

        One axis if there is one inner group, else (outer, inner).
        """
        shape = self.shape
        firsts = [rank for rank in range(shape.world) if shape.shard(shape.coordinate(rank)) == 0]
        ranks = torch.tensor([shape.group(first, SHARD_AXES) for first in firsts]).view(len(firsts), -1, inner)
        whole = DeviceMesh(device_type, ranks, mesh_dim_names=("places", "outer", "inner"))
        if shape.shards == inner:
            return whole["inner"]
        self._outer = whole["outer"].get_group()
        return whole["outer", "inner"]

    def gather_outer(self, part: torch.Tensor, inner: int) -> torch.Tensor:
        """Everybody's `part` over the outer group of `replicas`, [members, elements]."""
        out = part.new_empty(self.shape.shards // inner, part.numel())
        _all_gather(out.view(-1), part, group=self._outer)
        return out

    def region(self, flat: torch.Tensor, sharers: int = 1) -> torch.Tensor:
        """This rank's region of a flat buffer, as a view; `sharers` as in `reduce_scatter`."""
        size, index = flat.numel() * sharers // self.shape.shards, self.shard // sharers
        return flat[index * size : (index + 1) * size]


@lru_cache(maxsize=1024)
def members(shape: MeshShape, rank: int, along: Along) -> tuple[int, ...]:
    """The ranks, ascending, that a rank talks to, itself among them."""
    if along == EXPERTS:
        return shape.expert_group(rank)
    return shape.expert_replicas(rank) if along == _SAME_EXPERTS else shape.group(rank, along)


def groups(shape: MeshShape, along: Along) -> Iterator[tuple[int, ...]]:
    """All ranks by whom they talk to, in the order of their first ranks."""
    return _partition(shape, lambda rank: members(shape, rank, along))


def _partition(shape: MeshShape, group_of: Callable[[int], tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Groups that have no rank in common, asked of one rank each."""
    found: set[int] = set()
    for rank in range(shape.world):
        if rank not in found:
            group = group_of(rank)
            found.update(group)
            yield group


def _among(sharers: int) -> Along:
    """Who shares a buffer's regions: all of CP x DP, or those with the same experts."""
    return SHARD_AXES if sharers == 1 else _SAME_EXPERTS


@dataclass(frozen=True, slots=True)
class _Summing:
    """Summands under way: once they have come, `out` is their sum, one addition after the other, so that no element's bits
    depend on where it lies."""

    work: Work
    parts: torch.Tensor  # [ranks, elements]
    out: torch.Tensor  # [elements]

    def wait(self) -> None:
        """Until they have come and are added."""
        self.work.wait()
        torch.add(self.parts[0], self.parts[1], out=self.out)
        for part in self.parts[2:]:
            self.out.add_(part)

    def is_completed(self) -> bool:
        """Whether they have come."""
        return self.work.is_completed()


def _check_world(shape: MeshShape, rank: int) -> None:
    if not dist.is_initialized():
        raise RuntimeError(f"a mesh of {shape.world} ranks needs torch.distributed.init_process_group first")
    if (dist.get_world_size(), dist.get_rank()) != (shape.world, rank):
        raise ValueError(
            f"mesh {shape} is for {shape.world} ranks and this is rank {rank} of it, but the process group says "
            f"rank {dist.get_rank()} of {dist.get_world_size()}"
        )
