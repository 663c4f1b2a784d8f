"""What is asked for together: so much that waiting is shared, so little that memory is bounded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def flights(
    items: Iterable[T], most: int, *, size: Callable[[T], int], of: Callable[[T], Hashable] | None = None
) -> Iterator[list[T]]:
    """Consecutive items with together at most `most` bytes, or a single larger one; with `of`, all of one object."""
    flight, nbytes = list[T](), 0
    for item in items:
        added = size(item)
        if flight and (nbytes + added > most or (of is not None and of(item) != of(flight[0]))):
            yield flight
            flight, nbytes = [], 0
        flight.append(item)
        nbytes += added
    if flight:
        yield flight
