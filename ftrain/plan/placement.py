"""Which links a group's traffic crosses, once ranks are laid onto servers, racks and pods in their order.

Ranks fill servers one after the other, so a group's links follow from the rank order alone. Two bandwidths are told apart
for each network tier that is oversubscribed: what is left if every card sends across it at once (50 / 7 GB/s between
Llama 3's pods), and what a ring in rank order gets, which crosses a pod's edge only where its neighbours lie in two pods.
The second is why contiguous replicas and an outermost DP axis make a 1:7 network bearable.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ftrain.config import Axis
from ftrain.parallel.shape import AXES, MeshShape
from ftrain.plan.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The slowest part of a group's ring."""

    link: str
    """Name of the link or tier."""
    gb_s: float
    """Per direction, for a ring in rank order."""
    crowded_gb_s: float
    """Per direction, if every card sends across this tier at once."""
    crosses_servers: bool


@lru_cache(maxsize=4096)
def path(mesh: MeshShape, axes: tuple[Axis, ...], profile_key: ProfileKey, *, run: int = 0, step: int = 1) -> Path:
    """The slowest link of the groups along `axes`, over all of them. `run`: of the parts of so many neighbours of a group;
    `step`: of those of every so manieth member."""
    if not crossing_share(mesh, axes, profile_key.server_gpus, run=run, step=step):
        link = profile_key.link_gb_s
        return Path(link=profile_key.link_name, gb_s=link, crowded_gb_s=link, crosses_servers=False)
    name, rate, crowded = "network", profile_key.nic_gb_s, profile_key.nic_gb_s
    for tier, inner in zip(profile_key.tiers, profile_key.units, strict=True):
        share = crossing_share(mesh, axes, inner, run=run, step=step)
        if not share:
            break
        name, over = tier
        crowded = min(crowded, profile_key.nic_gb_s / over)
        rate = min(rate, profile_key.nic_gb_s * min(1.0, 1.0 / (over * share)))
    return Path(link=name, gb_s=rate, crowded_gb_s=crowded, crosses_servers=True)


def crossing_share(mesh: MeshShape, axes: tuple[Axis, ...], unit: int, *, run: int = 0, step: int = 1) -> float:
    """The share of a unit's ranks whose next ring member lies in another unit, in the unit where it is largest.

    Units are runs of `unit` ranks. `run` and `step`: of parts of the groups, as `path` has them. Ranks are gone through one by
    one only where `run` or `step` cut an axis unevenly.
    """
    if unit >= mesh.world:
        return 0.0
    axes = tuple(axis for axis in mesh.order if axis in axes and mesh.size(axis) > 1)
    levels = _levels(mesh, axes, run=run, step=step)
    if levels is None:
        crossing = Counter(a // unit for a, b in ring_hops(mesh, axes, run=run, step=step) if a // unit != b // unit)
        return max(crossing.values(), default=0) / unit
    share = _aligned(levels, unit, mesh.world)
    return _unaligned(mesh, levels, unit) if share is None else share


class Level(NamedTuple):
    """An axis along which a ring moves: in runs of `run` neighbours along it, to every `step`th of them."""

    axis: Axis
    stride: int
    """Ranks between two neighbours along the axis."""
    run: int
    step: int

    @property
    def members(self) -> int:
        """Places of the ring along the axis."""
        return self.run // self.step

    @property
    def hop(self) -> int:
        """Ranks from one to the next."""
        return self.stride * self.step


def _levels(mesh: MeshShape, axes: tuple[Axis, ...], *, run: int, step: int) -> list[Level] | None:
    """Of the rings along `axes`, innermost first; None if `run` or `step` cut an axis unevenly."""
    found, rest = [], run or prod(mesh.size(axis) for axis in axes)
    for axis in axes:
        stride = prod(mesh.size(inner) for inner in mesh.order[: mesh.order.index(axis)])
        size = mesh.size(axis)
        taken = min(size, rest)
        if rest % taken or size % taken or (step % taken and taken % step):
            return None
        rest //= taken
        if step < taken:
            found.append(Level(axis, stride, taken, step))
        step = max(1, step // taken)
    return found


def _aligned(levels: list[Level], unit: int, world: int) -> float | None:
    """Inside a unit no hop crosses. The first level that leaves it crosses from the unit's last stride of ranks, and does so in
    the one hop of each inner ring that leads to its next member. None if unit and levels do not fit into each other."""
    leading = 1.0
    for level in levels:
        span = level.stride * level.run
        if unit % span:
            fits = (span % unit == 0 or span == world) and (unit % level.hop == 0 or level.hop % unit == 0)
            return leading * min(1.0, level.hop / unit) if fits else None
        leading /= level.members
    return 0.0


def _unaligned(mesh: MeshShape, levels: list[Level], unit: int) -> float:
    """Counted unit by unit: of each kind of hop, which goes as far wherever it is, those that begin so near to the end.

    A hop of kind k moves along level k, from the last place of all levels inside it to their first; the last kind closes the
    ring. Which ranks make it follows from their places along each axis, so they are counted digit by digit.
    """
    back = [(level.members - 1) * level.hop for level in levels]
    far = [level.hop - sum(back[:kind]) for kind, level in enumerate(levels)]
    most = 0
    for first in range(0, mesh.world, unit):
        end = min(first + unit, mesh.world)
        found = _closing(mesh, levels, min(end, first + sum(back)), len(levels)) - _closing(mesh, levels, first, len(levels))
        for kind, distance in enumerate(far):
            found += _closing(mesh, levels, end, kind) - _closing(mesh, levels, max(first, end - distance), kind)
        most = max(most, found)
    return most / unit


def _closing(mesh: MeshShape, levels: list[Level], rank: int, kind: int) -> int:
    """Of the ranks below `rank`, how many make a hop of that kind."""
    wanted = {level.axis: (level, index < kind) for index, level in enumerate(levels[: kind + 1])}

    def fitting(axis: Axis, below: int) -> int:
        """Places along an axis, of the first `below`, that such a rank may have."""
        if axis not in wanted:
            return below
        level, is_last = wanted[axis]
        last = below // level.run * level.step + max(0, below % level.run - (level.run - level.step))
        return last if is_last else below - last

    digits, rest = [], rank
    for axis in mesh.order:
        rest, digit = divmod(rest, mesh.size(axis))
        digits.append(digit)
    if rest:  # all ranks of the mesh
        return prod(fitting(axis, mesh.size(axis)) for axis in mesh.order)
    count, inner = 0, 1
    for axis, digit in zip(mesh.order, digits, strict=True):  # what the axes inside may be, times what this one may be below
        here = fitting(axis, digit + 1) - fitting(axis, digit)
        count = fitting(axis, digit) * inner + here * count
        inner *= fitting(axis, mesh.size(axis))
    return count


@lru_cache(maxsize=1)  # asked once for every tier
def ring_hops(mesh: MeshShape, axes: tuple[Axis, ...], *, run: int = 0, step: int = 1) -> tuple[tuple[int, int], ...]:
    """(sender, receiver) of every hop of every ring along `axes`, each ring in rank order."""
    group = mesh.group(0, axes)
    starts = mesh.group(0, tuple(axis for axis in AXES if axis not in axes))
    runs = [group[first : first + (run or len(group))] for first in range(0, len(group), run or len(group))]
    rings = [members[first::step] for members in runs for first in range(step)]
    hops = [hop for ring in rings if len(ring) > 1 for hop in zip(ring, (*ring[1:], ring[0]), strict=True)]
    return tuple((start + a, start + b) for start in starts for a, b in hops)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The part of a profile that decides paths; hashable, so that paths are worked out once."""

    server_gpus: int
    link_name: str
    link_gb_s: float
    nic_gb_s: float
    tiers: tuple[tuple[str, float], ...]
    """(name, oversubscription) of each tier, innermost first."""
    units: tuple[int, ...]
    """GPUs of the unit whose edge must be crossed to use that tier."""


def key(profile: Profile) -> ProfileKey:
    """The placement facts of a profile."""
    return ProfileKey(
        server_gpus=profile.server.gpus,
        link_name=profile.server.link_name,
        link_gb_s=profile.link_gb_s,
        nic_gb_s=profile.nic_gb_s,
        tiers=tuple((tier.name, tier.oversubscription) for tier in profile.tiers),
        units=(profile.server.gpus, *(tier.gpus for tier in profile.tiers[:-1])),
    )


def place(rank: int, profile: Profile) -> dict[str, int]:
    """Where a rank sits: its server, and its unit in every tier but the last."""
    units = {"server": rank // profile.server.gpus, "card": rank % profile.server.gpus}
    return units | {tier.name: rank // tier.gpus for tier in profile.tiers[:-1]}
