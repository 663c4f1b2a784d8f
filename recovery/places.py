"""Where ranks can run: the places of each node, which of them are taken away, and which are left. Pure.

A *place* holds one rank: a GPU, or on a CPU machine a share of the cores. A run wants so many of them; a node has so many;
some may be taken away, by a person (`ftrain drain`), by a verdict that blames the rank on it, or with their node. What remains
decides which layouts are possible, so it is part of what a new coordinator must know: `PlaceLost` and `PlaceReturned` stand in
the ledger, and `RunState.out` is their fold. A place that was blamed comes back by itself when its quarantine is over; one that
a person took away comes back only by a person.

One node or many: a capacity is a mapping node -> places. Whoever knows of a node that came or went changes the mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

WHOLE_NODE = -1
MOST_DIGITS = 18


class Place(Struct, frozen=True, kw_only=True, order=True):
    """One place. `slot` counts from 0 on its node; WHOLE_NODE means all places of the node."""

    node: str
    slot: int

    def __str__(self) -> str:
        """As people write it: `node/3`, or the node alone."""
        return self.node if self.slot == WHOLE_NODE else f"{self.node}/{self.slot}"

    def described(self) -> str:
        """For sentences: which it is, and what."""
        return f"node {self}" if self.slot == WHOLE_NODE else f"place {self}"

    def covers(self, other: Place) -> bool:
        """Whether losing this one takes `other` away."""
        return self.node == other.node and self.slot in (WHOLE_NODE, other.slot)


class Out(Struct, frozen=True, kw_only=True):
    """A place that is taken away: why, and until when (unix time; None: until a person gives it back)."""

    place: Place
    reason: str
    until: float | None = None


Capacity = Mapping[str, int]
"""Node -> number of its places."""


def usable(capacity: Capacity, out: Iterable[Out]) -> tuple[Place, ...]:
    """The places that may hold a rank now: nodes in the capacity's order, places ascending."""
    gone = [entry.place for entry in out]
    every = (Place(node=node, slot=slot) for node, count in capacity.items() for slot in range(count))
    return tuple(place for place in every if not any(entry.covers(place) for entry in gone))


def parse(text: str, capacity: Capacity) -> Place:
    """The place that a person means: `3` on the only node, `node/3`, or a node. ValueError in words if there is none."""
    node, slash, slot = text.rpartition("/")
    if not slash and text.isdecimal() and len(capacity) == 1:
        node, slash, slot = next(iter(capacity)), "/", text
    if not slash and text in capacity:
        return Place(node=text, slot=WHOLE_NODE)
    if not slash or node not in capacity or not slot.isdecimal() or len(slot) > MOST_DIGITS or int(slot) >= capacity[node]:
        known = ", ".join(f"{name}/0 to {name}/{count - 1}" for name, count in capacity.items())
        raise ValueError(f"no place {text!r}; there are {known}, or a whole node by its name")
    return Place(node=node, slot=int(slot))


def expired(out: Iterable[Out], now_t: float) -> tuple[Out, ...]:
    """The entries whose time is over."""
    return tuple(entry for entry in out if entry.until is not None and entry.until <= now_t)
