"""Static against dynamic context parallelism, on a histogram of sequence lengths, at equal *valid* tokens.

Static CP cuts every sequence over all c members, short ones as well: each then pays an exchange and its padding. Dynamic CP
(NVIDIA, January 2026) gives a sequence only as many members as its true length needs, and runs several short ones side by
side. Both do the same valid tokens here, so the times may be compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftrain.plan import cost
from ftrain.plan.figure import Answer, Section, Table, number, percent, why
from ftrain.plan.setup import Setup

SOURCE = "Dynamic context parallelism, NVIDIA, January 2026; the cost model is ftrain.plan.dynamic_cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One CP group."""

    members: int
    capacity: int
    """Tokens that one member can hold."""
    linear: float
    """Operations of a token outside attention's core."""
    quadratic: float
    """Operations of a token per token of its sequence."""
    exchange: float
    """Operations that a member could have done while it passes on one token's keys and values."""


MOST_SEQUENCES = 100_000


def histogram(text: str) -> list[tuple[int, int]]:
    """`4096:6,131072:2`: six sequences of 4,096 tokens and two of 131,072."""
    found = []
    for part in text.split(","):
        length, _, count = part.partition(":")
        try:
            found.append((int(length), int(count or 1)))
        except ValueError as error:
            raise ValueError(f"--lengths {text}: wanted LENGTH:COUNT,LENGTH:COUNT") from error
    if any(length < 1 or count < 1 for length, count in found):
        raise ValueError(f"--lengths {text}: lengths and counts start at 1")
    if (total := sum(count for _, count in found)) > MOST_SEQUENCES:
        raise ValueError(f"--lengths: {total:,} sequences are laid out one by one: wanted at most {MOST_SEQUENCES:,} in all")
    return found


def cluster(setup: Setup) -> Cluster:
    """The setup's CP group, in operations of one TP rank."""
    model, mesh, profile = setup.config.model, setup.mesh, setup.profile
    linear = model.layers * cost.layer_flops(setup) / mesh.tp
    quadratic = model.layers * 6 * setup.queries / mesh.tp
    rate = profile.peak_flops * profile.assumed.kernel_share
    inside = mesh.tp * mesh.cp <= profile.server.gpus
    link = (profile.link_gb_s if inside else profile.nic_gb_s) * profile.assumed.link_share * 1e9
    exchange = model.layers * 3 * 2 * setup.local_keys * setup.width / link * rate
    capacity = -(-setup.config.data.seq_len // mesh.cp)
    return Cluster(members=mesh.cp, capacity=capacity, linear=linear, quadratic=quadratic, exchange=exchange)


def members_needed(length: int, group: Cluster) -> int:
    """The smallest power of two of members whose memory holds the sequence, at most all of them."""
    members = 1
    while members < group.members and length > members * group.capacity:
        members *= 2
    return min(members, group.members)


def work(length: int, members: int, group: Cluster) -> float:
    """Operations (and waiting, as operations) of each member for one sequence, padded to head and tail pieces."""
    pieces = 2 * members if members > 1 else 1
    padded = -(-length // pieces) * pieces
    compute = padded * (group.linear + group.quadratic * padded) / members
    return compute + (members - 1) * padded / members * group.exchange


def static(lengths: list[tuple[int, int]], group: Cluster) -> float:
    """One sequence after the other, each over all members."""
    return sum(count * work(length, group.members, group) for length, count in lengths)


def dynamic(lengths: list[tuple[int, int]], group: Cluster) -> float:
    """Longest first, each onto the members that are free first."""
    free = [0.0] * group.members
    for length, count in sorted(lengths, reverse=True):
        needed = members_needed(length, group)
        for _ in range(count):
            free.sort()
            end = free[needed - 1] + work(length, needed, group)
            free[:needed] = [end] * needed
    return max(free)


def answer(setup: Setup, text: str) -> Answer:
    """The whole answer."""
    if setup.mesh.cp == 1:
        raise ValueError("--lengths compares context parallel layouts: give --set parallel.cp=2 or more")
    lengths, group = histogram(text), cluster(setup)
    longest = max(length for length, _ in lengths)
    if longest > setup.config.data.seq_len:
        raise ValueError(f"--lengths: {longest} tokens are more than data.seq_len = {setup.config.data.seq_len}")
    valid = sum(length * count for length, count in lengths)
    one, two = static(lengths, group), dynamic(lengths, group)
    rows = tuple((length, count, group.members, members_needed(length, group)) for length, count in lengths)
    section = Section(
        title=f"A group of {group.members}",
        figures=(
            number("valid_tokens", "valid tokens, the same for both", value=valid,
                   why=why("sum of length x count", "histogram")),
            number("speedup", "static over dynamic time", value=one / two, unit="x", digits=3,
                   why=why("time of all sequences, one layout over the other", SOURCE)),
            percent("saved", "time saved by dynamic sizes", value=1 - two / one, why=why("1 - dynamic / static", SOURCE)),
        ),
        tables=(Table(key="members", title="Members that a sequence gets", columns=("length", "count", "static", "dynamic"),
                      rows=rows, source=SOURCE,
                      formulas={"dynamic": "smallest power of two with length <= members x seq_len / cp"}),),
    )  # fmt: skip
    return Answer(
        command="simulate", title="Static against dynamic context parallelism, at equal valid tokens", sections=(section,)
    )
