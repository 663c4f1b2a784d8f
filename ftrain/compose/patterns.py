"""Progress out of a script's own output: the lines that name a step, read from the ranks' logs as they grow.

For scripts that cannot be changed at all. A pattern is a regular expression with a group `step`, and if it likes `loss` and
`tokens`; without a group `step` the first that has no name is the step. The logs are read where the supervisor runs.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("step", "loss", "tokens")
MAX_READ = 1 << 20
MAX_LINE = 64 << 10


class PatternError(ValueError):
    """A pattern that cannot work, and why."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one line says."""

    step: int
    loss: float | None = None
    tokens: int = 0


def compiled(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """The patterns, checked. Raises PatternError."""
    found = []
    for text in patterns:
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise PatternError(f"--progress-pattern '{text}' is no regular expression: {error}") from error
        if strange := [name for name in pattern.groupindex if name not in NAMES]:
            raise PatternError(f"--progress-pattern '{text}' names a group {strange[0]}; allowed: {', '.join(NAMES)}")
        if not _step_group(pattern):
            raise PatternError(f"--progress-pattern '{text}' has no group for the step: for example 'step (?P<step>\\d+)'")
        found.append(pattern)
    return found


def _step_group(pattern: re.Pattern[str]) -> int:
    """The number of the group that is the step; 0 if there is none."""
    named = pattern.groupindex
    nameless = (number for number in range(1, pattern.groups + 1) if number not in named.values())
    return named.get("step") or next(nameless, 0)


def seen_in(line: str, patterns: Sequence[re.Pattern[str]]) -> Seen | None:
    """What the line says of progress, by the first pattern that fits it; None if it says nothing."""
    for pattern in patterns:
        match = pattern.search(line)
        if match is None:
            continue
        named = match.groupdict()
        step = _number(match.group(_step_group(pattern)))
        if step is None:
            continue
        loss, tokens = _number(named.get("loss")), _number(named.get("tokens"))
        return Seen(int(step), loss, int(tokens or 0))
    return None


def _number(text: str | None) -> float | None:
    with contextlib.suppress(ValueError):
        value = float((text or "").replace(",", "").replace("_", ""))
        return value if math.isfinite(value) else None
    return None


@dataclass(slots=True)
class LogTail:
    """One log, read on from where the last look ended."""

    path: Path
    position: int = 0
    rest: bytes = b""
    grown: float = field(default_factory=time.monotonic)
    """Last time that something new was found."""

    def lines(self) -> list[str]:
        """Whole lines written since the last call; at most a MiB at a time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                data = file.read(MAX_READ)
        except OSError:
            return []
        if not data:
            return []
        self.position += len(data)
        self.grown = time.monotonic()
        *whole, rest = (self.rest + data).split(b"\n")
        self.rest = rest[-MAX_LINE:]
        return [line.decode(errors="replace") for line in whole]
