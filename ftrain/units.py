"""Bytes, times and counts as people write them, because a report with 1468006400 in it is not read.

One place owns the wording, so that the planner, the reports and the messages of the loader say the same thing the same way.
Bytes use binary units (KiB, MiB), as the code counts them; counts use decimal ones (K, M, B).
"""

from __future__ import annotations

from recovery.durations import format_duration

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNTS = ("", "K", "M", "B", "T")


def format_bytes(size_bytes: float) -> str:
    """`1536` as `1.50 KiB`; plain bytes without decimals."""
    value, unit = _scaled(size_bytes, 1024, len(_BYTES))
    return f"{value:.0f} B" if unit == 0 else f"{_digits(value)} {_BYTES[unit]}"


def format_count(count: float) -> str:
    """`820000` as `820K`, `405853388800` as `406B`; small counts as they are."""
    value, unit = _scaled(count, 1000, len(_COUNTS))
    return f"{value:g}" if unit == 0 else f"{_digits(value)}{_COUNTS[unit]}"


def format_seconds(seconds: float) -> str:
    """A measured time: `0.0042` as `4.2 ms`, from a second on as `format_duration` has it."""
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 0.9995 else format_duration(seconds)


def format_share(part: float, whole: float) -> str:
    """`3` of `4` as `75.0 %`; nothing of nothing as `0.0 %`."""
    return f"{100 * part / whole if whole else 0.0:.1f} %"


def plural(count: float, noun: str) -> str:
    """`1` as `1 rank`, `16384` as `16,384 ranks`; nouns that take more than an s are those of this project."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,g} {noun}{'' if count == 1 else ending}" if count < 1e6 else f"{count:,.0f} {noun}{ending}"


def _scaled(value: float, base: int, units: int) -> tuple[float, int]:
    """The value in the largest unit in which it does not round to the next one's start."""
    unit = 0
    while abs(value) >= base - 0.5 and unit < units - 1:
        value /= base
        unit += 1
    return value, unit


def _digits(value: float) -> str:
    """Three significant digits, never more than the whole part needs."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
