"""What the planner answers with: figures that know how they came about.

A number nobody can check is an opinion. So no function of this package returns a bare number to the outside: it returns a
`Figure` with its formula, the values put into it, and where the formula comes from. The command line prints the figures;
`--explain` prints the rest; `--json` always has both. Exact arithmetic (int, Fraction) goes in where the documents print
exact digits, and floats only where something was measured or estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Number = int | float | Fraction
Value = Number | str | bool

_DECIMAL: tuple[tuple[int, str], ...] = ((10**15, "PB"), (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_LARGE = 10**24

_TIMES: tuple[tuple[float, str], ...] = (
    (31_557_600.0, "years"),
    (86_400.0, "days"),
    (3600.0, "h"),
    (60.0, "min"),
    (1.0, "s"),
    (1e-3, "ms"),
)


@dataclass(frozen=True, slots=True)
class Why:
    """How a number came about."""

    formula: str
    source: str
    inputs: Mapping[str, Value] = field(default_factory=dict)


def why(formula: str, source: str, **inputs: Value) -> Why:
    """The reason for a number; the values put in are named as in the formula."""
    return Why(formula, source, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of an answer."""

    key: str
    """Stable name within its answer; scripts read it."""
    label: str
    """What a person reads before the number."""
    value: Value
    text: str
    """The value as printed, with its unit."""
    why: Why

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: fractions become numbers."""
        inputs = {name: plain(value) for name, value in self.why.inputs.items()}
        return {
            "label": self.label,
            "value": plain(self.value),
            "text": self.text,
            "formula": self.why.formula,
            "inputs": inputs,
            "source": self.why.source,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of figures that share their formulas: one formula per column."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    formulas: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: a list of records."""
        rows = [dict(zip(self.columns, map(plain, row), strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "formulas": dict(self.formulas), "source": self.source}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One question of an answer, answered by figures, tables, drawings in text, and sentences."""

    title: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    drawing: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command found. `refusals` say why the plan cannot run as asked; `warnings` what to look at."""

    command: str
    title: str
    sections: tuple[Section, ...]
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def figures(self) -> Iterator[Figure]:
        """All figures, in the order printed."""
        return (figure for section in self.sections for figure in section.figures)

    def figure(self, key: str) -> Figure:
        """The figure of that key; KeyError names those there are."""
        found = {figure.key: figure for figure in self.figures()}
        if key not in found:
            raise KeyError(f"no figure {key!r}; there are {', '.join(found)}")
        return found[key]

    def table(self, key: str) -> Table:
        """The table of that key."""
        return {table.key: table for section in self.sections for table in section.tables}[key]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        notes = [note for section in self.sections for note in section.notes]
        drawings = [section.drawing for section in self.sections if section.drawing]
        return {
            "command": self.command,
            "title": self.title,
            "sections": [section.title for section in self.sections],
            "figures": {figure.key: figure.as_dict() for figure in self.figures()},
            "tables": {table.key: table.as_dict() for section in self.sections for table in section.tables},
            "drawings": drawings,
            "notes": notes,
            "warnings": list(self.warnings),
            "refusals": list(self.refusals),
        }


def plain(value: Value) -> int | float | str | bool:
    """A value JSON knows; whole fractions become integers."""
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value


def decimal(value: Number, *, digits: int | None = None) -> str:
    """All digits of an exact decimal (7.8125), or `digits` of them after the point; thousands are set off by commas."""
    if value >= _LARGE or value <= -_LARGE:
        return _scientific(value)
    if digits is None and isinstance(value, int | Fraction):
        digits = _exact_digits(Fraction(value))
    return f"{_round(value, 6 if digits is None else digits):,}"


def _scientific(value: Number) -> str:
    """A number that nobody reads digit by digit; it may be larger than any float."""
    from decimal import Decimal

    exact = Decimal(value) if isinstance(value, float) else Decimal(value.numerator) / Decimal(value.denominator)
    return f"{exact:.5g}"


def _exact_digits(value: Fraction) -> int:
    """Digits after the point that print a fraction exactly, at most 12; 3 for one that never ends."""
    rest = value.denominator
    twos = fives = 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return min(12, max(twos, fives)) if rest == 1 else 3


def _round(value: Number, digits: int) -> Any:
    from decimal import ROUND_HALF_EVEN, Decimal, localcontext

    with localcontext() as context:
        context.prec = 60
        exact = Decimal(value.numerator) / Decimal(value.denominator) if isinstance(value, int | Fraction) else Decimal(value)
        return exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_EVEN)


def number(key: str, label: str, *, value: Number, why: Why, unit: str = "", digits: int | None = None) -> Figure:
    """A figure in its own unit."""
    text = decimal(value, digits=digits)
    if text == "1" and len(unit) > 2 and "/" not in unit:
        unit = unit.removesuffix("s")  # 1 card
    return Figure(key=key, label=label, value=value, text=f"{text} {unit}".rstrip(), why=why)


def nbytes(key: str, label: str, *, value: Number, why: Why, digits: int | None = None) -> Figure:
    """A figure in bytes, printed in decimal units (GB = 1e9), as the documents and the vendors do."""
    return Figure(key=key, label=label, value=value, text=size(value, digits=digits), why=why)


def percent(key: str, label: str, *, value: Number, why: Why, digits: int = 1) -> Figure:
    """A share, kept as a fraction and printed in per cent."""
    return Figure(key=key, label=label, value=value, text=f"{decimal(value * 100, digits=digits)} %", why=why)


def duration(key: str, label: str, *, value: float, why: Why) -> Figure:
    """A figure in seconds."""
    return Figure(key=key, label=label, value=value, text=seconds(value), why=why)


def in_days(key: str, label: str, *, value: float, why: Why) -> Figure:
    """A figure in days, printed in a unit that fits."""
    return Figure(key=key, label=label, value=value, text=days(value), why=why)


def in_years(key: str, label: str, *, value: float, why: Why) -> Figure:
    """A figure in years: whole ones where they are many, else printed in a unit that fits."""
    text = f"{decimal(value, digits=0)} years" if value >= 10 else seconds(value * _TIMES[0][0])
    return Figure(key=key, label=label, value=value, text=text, why=why)


def said(key: str, label: str, *, text: str, why: Why) -> Figure:
    """A figure that is a word."""
    return Figure(key=key, label=label, value=text, text=text, why=why)


def size(value: Number, *, digits: int | None = None) -> str:
    """Bytes in decimal units: 140625000000 is 140.625 GB."""
    for scale, unit in _DECIMAL:
        if value >= scale or value <= -scale:
            return f"{decimal(value / scale if isinstance(value, float) else Fraction(value) / scale, digits=digits)} {unit}"
    return f"{decimal(value, digits=digits)} B"


def seconds(value: float) -> str:
    """A time in the unit people use for it, three digits."""
    if not value:
        return "0 s"
    for scale, unit in _TIMES:
        if value >= scale:
            return f"{significant(value / scale)} {unit}"
    return f"{significant(value * 1e6)} us"


def days(value: float) -> str:
    """A time given in days; in hours, minutes or seconds where it is less than one: a laptop's run is not 0.0 days."""
    return f"{decimal(value, digits=1)} days" if value >= 1 else seconds(value * 86_400)


def significant(value: float, digits: int = 3) -> str:
    """At least that many digits that count, without an exponent: 0.397, 44.1, 3,010."""
    from math import floor, log10

    places = digits - 1 - floor(log10(abs(value))) if value else 0
    return f"{value:,.{max(0, places)}f}"


def product(values: Sequence[int]) -> str:
    """`8 x 8 x 80`, for formulas."""
    return " x ".join(str(value) for value in values)
