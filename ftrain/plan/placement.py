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


@lru_cache(maxsize=512)
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

    Units are runs of `unit` ranks. One axis whose stride and span fit the units has a closed form; anything else is counted.
    `run` and `step`: of parts of the groups, as `path` has them.
    """
    axes = tuple(axis for axis in mesh.order if axis in axes and mesh.size(axis) > 1)
    if not axes:
        return 0.0
    if run and mesh.size(axes[0]) % run == 0:  # the neighbours differ along the innermost axis alone
        axes = axes[:1]
    if len(axes) == 1:
        stride = prod(mesh.size(axis) for axis in mesh.order[: mesh.order.index(axes[0])])
        span = stride * (run or mesh.size(axes[0]))
        stride *= step
        if stride >= span:
            return 0.0
        if unit % span == 0:
            return 0.0
        if (span % unit == 0 or span == mesh.world) and (unit % stride == 0 or stride % unit == 0):
            return min(1.0, stride / unit)
    crossing = Counter(a // unit for a, b in ring_hops(mesh, axes, run=run, step=step) if a // unit != b // unit)
    return max(crossing.values(), default=0) / unit


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
