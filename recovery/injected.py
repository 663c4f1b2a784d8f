"""What a process says of a fault before it does it to itself, as its run's config asks: nobody need look for another cause.

For the reader of a report only. The class of an interruption rests on what would be there without these words, or a drill would
prove nothing of how failures are recognised.
"""

from __future__ import annotations

import re

from recovery.evidence import Evidence
from recovery.verdict import EvidenceLine

SAID = "injected by this run's config"
_LINE = re.compile(rf"\[rank(?P<rank>\d+)\]: {SAID}: \S+ (?P<kind>\w+)")


def announcement(number: int, kind: str, point: str, step: int) -> str:
    """The words: which of the config's faults, what it does, at which named point, in which step."""
    return f"{SAID}: faults.{number} {kind} at {point!r}, step {step}"


def announced(case: Evidence, rank: int | None, kind: str = "") -> tuple[EvidenceLine, ...]:
    """Where a rank's log says so; any rank's where None, of any kind where empty."""
    found = ((index, line, match) for index, line in enumerate(case.log) if (match := _LINE.match(line)))
    return tuple(
        EvidenceLine(where="log", line=index, text=line)
        for index, line, match in found
        if (rank is None or int(match["rank"]) == rank) and kind in ("", match["kind"])
    )
