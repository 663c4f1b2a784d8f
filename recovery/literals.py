"""Which expressions can match a line at all, found by looking at four letters instead of running all of them.

A verdict is part of the time a run stands still, and the tails of many ranks are tens of thousands of lines against hundreds of
expressions. Nearly every expression needs some fixed text ("oom-kill", "Xid"); a line without it needs no test. So each
expression is reduced to literals of which one must occur, each literal to one group of four letters, and a line is looked up by
its own groups. The standard library's parser does the analysis; an expression it cannot reduce is simply always tried.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, Generic, TypeVar

GRAM = 4
T = TypeVar("T")


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The compiled expression, compiled once."""
    return re.compile(pattern)


def required_literals(pattern: str) -> frozenset[str] | None:
    """Lower-case texts of which at least one is in whatever the pattern matches; None if there is no such set."""
    parser: Any = importlib.import_module("re._parser")
    try:
        parsed = parser.parse(pattern)
    except re.error:
        return None
    return _of_sequence(list(parsed))


def _of_sequence(nodes: Iterable[tuple[Any, Any]]) -> frozenset[str] | None:
    """The best of what the parts of a sequence require: a run of letters, or what one part requires."""
    best: frozenset[str] | None = None
    run = ""
    for op, value in nodes:
        name = str(op)
        if name == "LITERAL":
            run += chr(value).lower()
            continue
        best, run = _better(best, _as_set(run)), ""
        if name == "SUBPATTERN":
            best = _better(best, _of_sequence(list(value[3])))
        elif name == "BRANCH":
            best = _better(best, _of_branches(value[1]))
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and value[0] > 0:
            best = _better(best, _of_sequence(list(value[2])))
    return _better(best, _as_set(run))


def _of_branches(branches: Iterable[Iterable[tuple[Any, Any]]]) -> frozenset[str] | None:
    found = [_of_sequence(list(branch)) for branch in branches]
    if any(literals is None for literals in found):
        return None
    return frozenset(literal for literals in found if literals is not None for literal in literals)


def _as_set(run: str) -> frozenset[str] | None:
    return frozenset([run]) if len(run) >= GRAM else None


def _better(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    """The set whose shortest text is longer: it lets fewer lines through."""
    if one is None or other is None:
        return one or other
    return one if min(map(len, one)) >= min(map(len, other)) else other


class Index(Generic[T]):
    """Things found by expressions: `find` gives those that have an expression which matches, in the order they were added."""

    def __init__(self, entries: Iterable[tuple[T, Iterable[str]]]):
        self._things: list[T] = []
        self._always: list[tuple[int, str]] = []
        self._by_gram: dict[str, list[tuple[str, int, str]]] = {}
        for thing, patterns in entries:
            self._things.append(thing)
            for pattern in patterns:
                self._add(len(self._things) - 1, pattern)

    def find(self, text: str) -> list[T]:
        """What matches the text."""
        lower = text.lower()
        grams = {lower[at : at + GRAM] for at in range(len(lower) - GRAM + 1)}
        tries = {*self._always}
        for gram in grams.intersection(self._by_gram):
            tries.update((number, pattern) for literal, number, pattern in self._by_gram[gram] if literal in lower)
        hits: set[int] = set()
        for number, pattern in tries:
            if number not in hits and compiled(pattern).search(text):
                hits.add(number)
        return [self._things[number] for number in sorted(hits)]

    def _add(self, number: int, pattern: str) -> None:
        literals = required_literals(pattern)
        if literals is None:
            self._always.append((number, pattern))
            return
        for literal in literals:
            self._by_gram.setdefault(literal[:GRAM], []).append((literal, number, pattern))
