"""What the kernel says of a process that says nothing itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from recovery.hang import process_line

TICKS = os.sysconf("SC_CLK_TCK")


class Sample(Struct, frozen=True, kw_only=True):
    """A process at a moment: the letter of its state, and the seconds of CPU it has used."""

    state: str
    cpu_s: float


def sample(pid: int) -> Sample | None:
    """The process now; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Sample(state=fields[0], cpu_s=(int(fields[11]) + int(fields[12])) / TICKS)


def samples(pids: Mapping[int, int]) -> dict[int, Sample]:
    """Rank -> its process now."""
    return {rank: found for rank, pid in pids.items() if (found := sample(pid)) is not None}


def activity(pids: Mapping[int, int], before: Mapping[int, Sample], over_s: float) -> tuple[str, ...]:
    """A line of evidence for each rank: its state now, and what it used since `before`."""
    return tuple(
        process_line(rank, pids[rank], now.state, now.cpu_s - before[rank].cpu_s, over_s)
        for rank, now in samples(pids).items()
        if rank in before
    )
