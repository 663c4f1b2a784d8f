"""Bytes, counts and times as people write them."""

from __future__ import annotations

import pytest

from ftrain.units import format_bytes, format_count, format_seconds, format_share, plural
from recovery.durations import format_duration


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (2**20 - 1, "1.00 MiB"), (2**30 * 123, "123 GiB")],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (999_999, "1.00M"),
        (857_472, "857K"),
        (405_853_388_800, "406B"),
        (2e16, "20000T"),
    ],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0042, "4.2 ms"),
        (0.9996, "1.0 s"),
        (59.96, "1m 00s"),
        (75, "1m 15s"),
        (3599.6, "1h 00m"),
        (7260, "2h 01m"),
        (90_000, "1d 01h"),
        (-3, "-3.0 s"),
        (float("inf"), "unknown"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.055, "0.06 s"),
        (0.9951, "1.0 s"),
        (1.234, "1.2 s"),
        (59.96, "1m 00s"),
        (7260, "2h 01m"),
        (-0.5, "-0.50 s"),
        (float("nan"), "unknown"),
    ],
)
def test_durations_are_never_told_in_milliseconds(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_shares() -> None:
    assert format_share(3, 4) == "75.0 %"
    assert format_share(0, 0) == "0.0 %"


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (16384, "rank", "16,384 ranks"),
        (1_234_567, "step", "1,234,567 steps"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "process", "2 processes"),
        (1.0, "day", "1 day"),
        (0.5, "day", "0.5 days"),
    ],
)
def test_one_is_singular(count: float, noun: str, text: str) -> None:
    assert plural(count, noun) == text
