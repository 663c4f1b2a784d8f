"""Rank arithmetic: which rank sits where in the mesh, and with whom it talks.

Pure integers, so that the planner, the supervisor's `--dry-run` and the tests can ask about 5,120 ranks without starting
one. Rank order is a tuple, innermost axis first: neighbouring ranks differ in the first axis. The default puts tensor
parallelism on neighbours, because it talks most, and data parallelism outermost, because it talks least.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ftrain.config import Axis, Config

AXES: tuple[Axis, ...] = ("tp", "cp", "pp", "dp")

# The axes over which master weights and moments are cut (ZeRO-1): both hold the same weights and different tokens.
SHARD_AXES: tuple[Axis, ...] = ("cp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Coordinate:
    """A place in the mesh, one index per axis, each counted from 0."""

    tp: int = 0
    cp: int = 0
    pp: int = 0
    dp: int = 0

    def on(self, axis: Axis) -> int:
        """The index along one axis."""
        return int(getattr(self, axis))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Sizes of the four mesh axes, and the order in which ranks run through them (innermost first).

    `ep` is no axis: it says how many neighbours of a CP x DP group share out the experts among them.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    order: tuple[Axis, ...] = AXES

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"rank order {self.order}: wanted each of {', '.join(AXES)} exactly once")
        if min(self.size(axis) for axis in AXES) < 1:
            raise ValueError(f"mesh {self}: every axis needs a size of at least 1")
        if self.ep < 1 or self.shards % self.ep:
            raise ValueError(f"mesh {self}: experts are shared out over a divisor of cp x dp = {self.shards}")

    def __str__(self) -> str:
        axes = " x ".join(f"{axis}{self.size(axis)}" for axis in self.order)
        return f"{axes}, ep{self.ep}" if self.ep > 1 else axes

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.size(axis) for axis in AXES)

    @property
    def shards(self) -> int:
        """Number of parts into which ZeRO-1 cuts each stage's optimizer state."""
        return prod(self.size(axis) for axis in SHARD_AXES)

    def size(self, axis: Axis) -> int:
        """The size of one axis."""
        return int(getattr(self, axis))

    def check(self, rank: int) -> None:
        """Raise ValueError if there is no such rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} of a mesh of {self.world} ranks ({self})")

    def coordinate(self, rank: int) -> Coordinate:
        """The place of a rank."""
        self.check(rank)
        indices: dict[str, int] = {}
        for axis in self.order:
            rank, indices[axis] = divmod(rank, self.size(axis))
        return Coordinate(**indices)

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a place: the inverse of `coordinate`."""
        rank = 0
        for axis in reversed(self.order):
            rank = rank * self.size(axis) + coordinate.on(axis)
        return rank

    def group(self, rank: int, axes: tuple[Axis, ...]) -> tuple[int, ...]:
        """The ranks, ascending, that differ from this one at most along `axes`: those it reduces over `axes` with.

        One addition a rank: the coordinates of 16,384 ranks, each looked at for each kind of group, took half a minute.
        """
        self.check(rank)
        first, offsets, stride = rank, [0], 1
        for axis in self.order:  # innermost first, so that offsets ascend
            size = self.size(axis)
            if axis in axes:
                first -= rank // stride % size * stride
                offsets = [outer + inner for outer in range(0, size * stride, stride) for inner in offsets]
            stride *= size
        return tuple(first + offset for offset in offsets)

    def neighbours(self, rank: int, width: int) -> tuple[int, ...]:
        """The ranks of this one's run of `width` neighbours along tp (which `width` divides)."""
        start = self.coordinate(rank).tp // width * width
        return self.group(rank, ("tp",))[start : start + width]

    def shard(self, coordinate: Coordinate) -> int:
        """Which of the `shards` regions of every bucket this place owns: its index within its CP x DP group."""
        shard = 0
        for axis in reversed(self.order):
            if axis in SHARD_AXES:
                shard = shard * self.size(axis) + coordinate.on(axis)
        return shard

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """The ranks, ascending, that share out the experts with this one: `ep` neighbours of its CP x DP group."""
        first = self.shard(self.coordinate(rank)) // self.ep * self.ep
        return self.group(rank, SHARD_AXES)[first : first + self.ep]

    def expert_replicas(self, rank: int) -> tuple[int, ...]:
        """The ranks, ascending, of its CP x DP group that have the same experts: those it reduces their gradients with."""
        return self.group(rank, SHARD_AXES)[self.shard(self.coordinate(rank)) % self.ep :: self.ep]

    def coordinates(self) -> tuple[Coordinate, ...]:
        """All places, in rank order."""
        return tuple(self.coordinate(rank) for rank in range(self.world))


def mesh_shape(config: Config) -> MeshShape:
    """The mesh a config asks for. DP is what remains of the ranks."""
    parallel = config.parallel
    unit = parallel.tp * parallel.cp * parallel.pp
    if parallel.ranks % unit:
        raise ValueError(
            f"parallel.ranks = {parallel.ranks} is not a multiple of tp x cp x pp = "
            f"{parallel.tp} x {parallel.cp} x {parallel.pp} = {unit}"
        )
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "dp": parallel.ranks // unit}
    return MeshShape(**sizes, ep=parallel.ep, order=parallel.order)
