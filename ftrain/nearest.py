"""The legal values next to one that is none: what an error suggests, in a time that a person does not notice.

Whoever mistypes a number may have typed any that 64 bits hold, so nothing here may count up to it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from math import isqrt

SLIP = 0.75
"""Share of letters in common, above which two names are one that was mistyped."""


def nearest(value: int, *, multiple_of: int) -> str:
    """A hint with the legal values below and above: multiples, at least one of them."""
    below = value // multiple_of * multiple_of
    return nearest_of(sorted({below, below + multiple_of} - {0}))


def nearest_divisor(value: int, whole: int) -> str:
    """A hint with the divisors of `whole` below and above."""
    return nearest_of(around(value, divisors(whole)))


def divisors(whole: int) -> list[int]:
    """The divisors of a positive whole number, ascending. Of one above a trillion only those that a million tries find: they
    are for hints, and nobody waits an hour for a hint.
    """
    small = [n for n in range(1, min(isqrt(whole), 1_000_000) + 1) if whole % n == 0]
    return sorted({*small, *(whole // n for n in small)})


def multiple_or_divisor(value: int, whole: int) -> str:
    """A hint with the multiples and divisors of `whole` below and above."""
    legal = {*divisors(whole)}
    legal |= {max(1, value // whole) * whole, (value // whole + 1) * whole}
    return nearest_of(around(value, sorted(legal)))


def around(value: int, legal: list[int]) -> list[int]:
    """The legal values (ascending) next to a value: the one below it, or itself, and the one above."""
    below = [n for n in legal if n <= value][-1:]
    return below + [n for n in legal if n > value][:1]


def nearest_of(values: list[int]) -> str:
    """The words that name them."""
    return "nearest: " + " or ".join(str(value) for value in values)


def nearest_words(word: str, known: Iterable[str]) -> list[str]:
    """The known names that hold the word; else those that it comes near, as a whole or in a part between hyphens."""
    names = list(known)
    if holding := [name for name in names if word and word in name]:
        return holding
    parts = {part: name for name in names for part in (name, *name.split("-"))}
    close = difflib.get_close_matches(word, parts, n=1)
    return [name for name in names if close and (name == close[0] or close[0] in name.split("-"))]


def slip(word: str, known: Iterable[str]) -> str:
    """The known name that `word` is a slip of the finger for; empty if it is another word with some letters in common."""
    bare, typed = {name.lstrip("-"): name for name in known}, word.lstrip("-")
    swapped = [name for name in bare if sorted(name) == sorted(typed)]
    close = swapped or difflib.get_close_matches(typed, bare, n=1, cutoff=SLIP)
    return bare[close[0]] if close else ""
