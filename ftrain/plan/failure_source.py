"""Where a simulated run's failures come from: drawn from a table of causes, read from a trace, or read from a real ledger.

All three give the same thing, a sequence of failures in time order, so a policy is compared on the failures that another run
really had.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from ftrain.plan.failure_table import FailureTable


@dataclass(frozen=True, slots=True)
class Failure:
    """One interruption; `t` in seconds from the start of the run."""

    t: float
    class_: str
    component: str
    name: str
    node: str = ""
    needs_human: bool = False


def drawn(table: FailureTable, *, rate: float, nodes: int, seconds: float, seed: int) -> Iterator[Failure]:
    """A Poisson process at `rate` unplanned interruptions per 1,000 node-days, causes in the table's shares."""
    random = Random(seed)
    per_second = nodes * rate / 1000 / 86400
    edges = list(accumulate(cause.count for cause in table.causes))
    manual = table.manual / (table.planned + table.unplanned)
    t = random.expovariate(per_second)
    while t < seconds:
        cause = table.causes[bisect_left(edges, random.random() * edges[-1])]
        node = f"n{random.randrange(nodes)}"
        yield Failure(t, cause.class_, cause.component, cause.name, node, random.random() < manual)
        t += random.expovariate(per_second)


def stragglers(*, rate: float, nodes: int, seconds: float, seed: int) -> Iterator[Failure]:
    """Slow machines: `rate` per 1,000 node-days; a stream of its own, so that it leaves the failures as they are."""
    random = Random(f"stragglers {seed}")
    t = random.expovariate(nodes * rate / 1000 / 86400) if rate else seconds
    while t < seconds:
        yield Failure(t, "straggler", "host", "Slow machine", f"n{random.randrange(nodes)}")
        t += random.expovariate(nodes * rate / 1000 / 86400)


def read(path: str) -> list[Failure]:
    """A trace: one JSON object a line with t_s, class, component, name, node; or a ledger of this project."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"failure trace {path}: cannot be read ({error.strerror})") from error
    found: list[Failure] = []
    start: float | None = None
    for number, line in enumerate(lines, 1):
        record = _object(line, path, number)
        start = float(record["t"]) if start is None and "event" in record and "t" in record else start
        failure = _failure(record, start or 0.0)
        if failure is not None:
            found.append(failure)
    return sorted(found, key=lambda failure: failure.t)


def _object(line: str, path: str, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"failure trace {path}, line {number}: not JSON ({error.msg})") from error
    if not isinstance(record, dict):
        raise ValueError(f"failure trace {path}, line {number}: wanted an object")
    return record


def _failure(record: dict[str, Any], start: float) -> Failure | None:
    """A trace's line, or a ledger's classified interruption; other events are not failures."""
    if "event" not in record:
        return Failure(
            float(record.get("t_s", 0)),
            str(record.get("class", "unknown")),
            str(record.get("component", "unknown")),
            str(record.get("name", record.get("class", "unknown"))),
            str(record.get("node", "")),
        )
    verdict = record.get("verdict")
    if record["event"] != "InterruptionClassified" or not isinstance(verdict, dict) or verdict.get("planned"):
        return None
    class_ = str(verdict.get("class", "unknown"))
    return Failure(
        float(record["t"]) - start, class_, str(verdict.get("component", "unknown")), class_, str(verdict.get("node", ""))
    )
