"""How often things break: a table of causes from a real run, turned into rates.

A table is data with its source. Its totals and shares are computed from the counts and must reconcile: the most quoted one
of the field prints shares that add up to 94.9 %, and a tool that refuses such a table would have caught it.
Rates are quoted per 1,000 node-days, so that a table from one cluster speaks about another.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import msgspec
from msgspec import Struct

from ftrain.plan.figure import Figure, Section, Table, decimal, number, percent, why

FOLDER = Path(__file__).parent / "failures"


class Cause(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row."""

    name: str
    category: str
    count: int
    class_: str = msgspec.field(name="class")
    """The classifier's word for it, so that a simulated failure meets the real policy."""
    component: str


class FailureTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Interruptions that a run reported."""

    name: str
    title: str
    source: str
    gpus: int
    gpus_per_node: int
    days: float
    planned: int
    manual: int = 0
    """Of all interruptions, those that needed a person."""
    causes: tuple[Cause, ...]

    @property
    def unplanned(self) -> int:
        """Interruptions nobody asked for."""
        return sum(cause.count for cause in self.causes)

    @property
    def nodes(self) -> int:
        """Servers of the run."""
        return self.gpus // self.gpus_per_node

    @property
    def per_1000_node_days(self) -> float:
        """Unplanned interruptions per 1,000 node-days."""
        return 1000 * self.unplanned / (self.nodes * self.days)

    def by_category(self) -> dict[str, int]:
        """Counts of each category, in the order of the table."""
        counts: dict[str, int] = {}
        for cause in self.causes:
            counts[cause.category] = counts.get(cause.category, 0) + cause.count
        return counts


def names() -> tuple[str, ...]:
    """The tables that ship."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def load(name: str) -> FailureTable:
    """A table that ships, by name, or your own, by path."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise ValueError(f"no failure table {name!r}: give one of {', '.join(names())}, or the path of a .toml file")
    try:
        return msgspec.toml.decode(path.read_bytes(), type=FailureTable)
    except msgspec.ValidationError as error:
        raise ValueError(f"failure table {path}: {error}") from error


def mtbf_s(rate_per_1000_node_days: float, nodes: int) -> float:
    """Mean time between failures of a job, seconds."""
    return 86400 / (nodes * rate_per_1000_node_days / 1000)


HARDWARE = ("GPU", "Host", "Unplanned maintenance")


def section(table: FailureTable) -> Section:
    """The table with its own arithmetic done."""
    hours = Fraction(table.days).limit_denominator(10**6) * 24
    total, unplanned = table.planned + table.unplanned, table.unplanned
    hardware = sum(count for category, count in table.by_category().items() if category in HARDWARE)
    figures: tuple[Figure, ...] = (
        number("interruptions", "interruptions", value=total,
               why=why("planned + unplanned", table.source, planned=table.planned, unplanned=unplanned)),
        number("unplanned", "unplanned", value=unplanned, why=why("sum of the causes", table.source)),
        number("mtbi_all_h", "time between interruptions", value=hours / total, unit="h", digits=2,
               why=why("days x 24 / interruptions", "derived", days=table.days)),
        number("mtbi_unplanned_h", "time between unplanned ones", value=hours / unplanned, unit="h", digits=2,
               why=why("days x 24 / unplanned", "derived", days=table.days)),
        number("per_1000_node_days", "unplanned per 1,000 node-days", value=table.per_1000_node_days, digits=2,
               why=why("1000 x unplanned / (nodes x days)", "derived", nodes=table.nodes, days=table.days)),
        percent("hardware_share", "hardware (GPU, host, unplanned maintenance)", value=Fraction(hardware, unplanned),
                why=why("counts / unplanned; the paper says about 78 %", "derived", counts=hardware)),
    )  # fmt: skip
    rows = tuple(
        (c.name, c.category, c.count, f"{decimal(Fraction(100 * c.count, unplanned), digits=1)} %") for c in table.causes
    )
    causes = Table(
        key="causes",
        title="Its causes",
        columns=("cause", "category", "count", "share"),
        rows=(*rows, ("total", "", unplanned, "100.0 %")),
        formulas={"share": "count / unplanned: computed, not copied"},
        source=table.source,
    )
    whose = "not this job's: what carries over is the rate per 1,000 node-days"
    return Section(title=f"Failures of the reported run: {table.title}", figures=figures, tables=(causes,), notes=(whose,))
