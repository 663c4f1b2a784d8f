"""The certificate: what was compared, how far apart it was, and by name everything that was too far."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

HEAD = ("layout", "mode", "loss", "norm", "grad", "master", "exp_avg", "exp_avg_sq", "of bound", "beyond own", "verdict")


class Failure(Struct, frozen=True, kw_only=True):
    """One thing that is not as in one process."""

    layout: str
    mode: str
    step: int
    what: str  # grad, master, exp_avg, exp_avg_sq, loss, norm, copies, weights, data, digest, ring, planning, run
    parameter: str  # empty: of no single one
    error: float | None = None  # None: not a finite number, or nothing that is measured
    bound: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        where = " ".join(x for x in (self.layout, self.mode, f"step {self.step}") if x)
        of = f" of {self.parameter}" if self.parameter else ""
        if self.bound is None:
            return f"{where}: {self.what}{of}: {self.reason}"
        error = "not finite" if self.error is None else f"{self.error:.3g}"
        return f"{where}: {self.what}{of}: error {error}, bound {self.bound:.3g}" + (f" ({self.reason})" * bool(self.reason))


class Worst(Struct, frozen=True, kw_only=True):
    """The largest error of one kind in units of its bound, and where it was."""

    what: str
    parameter: str
    step: int
    error: float | None
    bound: float
    beyond_own: bool = False  # more than 4 x this very array's error in one process

    @property
    def share(self) -> float:
        """Of the bound."""
        return math.inf if self.error is None else self.error / self.bound


class Row(Struct, frozen=True, kw_only=True):
    """One layout in one mode."""

    layout: str
    mode: str
    worst: list[Worst] = []
    compared: int = 0  # arrays and scalars
    beyond_own: int = 0  # of those: more than 4 x their own error in one process; no failure
    failures: int = 0
    flips: int = 0  # choices of experts that would have been others than in one process, whose choices were taken instead
    routed: int = 0  # of so many; 0: every layout chose for itself

    def cells(self) -> list[str]:
        """A line of the table, as `HEAD` says."""
        by_kind = {worst.what: worst for worst in self.worst}
        errors = [_number(by_kind[kind].error) if kind in by_kind else "-" for kind in HEAD[2:8]]
        share = max((worst.share for worst in self.worst), default=math.inf)
        return [
            self.layout,
            self.mode,
            *errors,
            f"{share:.0%}" if math.isfinite(share) else "-",
            f"{self.beyond_own} of {self.compared}",
            self.verdict,
        ]

    @property
    def verdict(self) -> str:
        """In one word."""
        return "equal" if not self.failures else f"{self.failures} failures"


class Certificate(Struct, frozen=True, kw_only=True):
    """All of it."""

    version: str
    config_fingerprint: str
    environment: dict[str, str]
    steps: int
    modes: list[str]
    rows: list[Row]
    ring: list[str]  # layouts, in the order in which each loaded what the one before had saved
    pairs: int  # of layouts whose read plans were checked
    failures: list[Failure]

    @property
    def holds(self) -> bool:
        """Whether every layout trains as one process does."""
        return not self.failures


def text(certificate: Certificate) -> str:
    """The certificate as a table, with the failures below it."""
    rows = [list(HEAD), *(row.cells() for row in certificate.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        f"{row.layout} {row.mode}: {row.flips} of {row.routed} positions would have gone to other experts"
        for row in certificate.rows
        if row.routed
    ]
    lines += [f"{certificate.steps} steps; ring of {len(certificate.ring)} saves and loads; {certificate.pairs} pairs planned"]
    lines += [f"FAILED  {failure}" for failure in certificate.failures]
    lines += ["every layout is one process" if certificate.holds else f"{len(certificate.failures)} failures"]
    return "\n".join(lines)


def worst_of(found: Sequence[Worst]) -> list[Worst]:
    """The worst of each kind."""
    best: dict[str, Worst] = {}
    for one in found:
        if one.what not in best or one.share > best[one.what].share:
            best[one.what] = one
    return list(best.values())


def finite(value: float) -> float | None:
    """None for what JSON cannot say."""
    return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.1e}"
