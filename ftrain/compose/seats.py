"""Which of the places that there are a layout's ranks take, so that tensor parallel groups stay within a node.

The ranks of such a group talk in every layer: across nodes they would make every step as slow as the network. So where a node
has places left that make no whole group (one of eight was drained, and tp = 2), one of them stays empty. A layout whose groups
are larger than any node crosses nodes by wish, and is seated as it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ftrain.config import Parallel
from recovery.places import Place


def in_whole_groups(places: Sequence[Place], parallel: Parallel) -> list[Place]:
    """The places in order, without those of a node that are too few for one more group."""
    size = _group(places, parallel)
    room = {node: count - count % size for node, count in Counter(place.node for place in places).items()}
    taken: list[Place] = []
    for place in places:
        if room[place.node]:
            room[place.node] -= 1
            taken.append(place)
    return taken


def seated(places: Sequence[Place], parallel: Parallel, before: Sequence[Place]) -> tuple[Place, ...]:
    """A place for each rank. Ranks that have one of `before` keep it if they can.

    `places` hold at least as many whole groups as the layout has.
    """
    fresh = tuple(in_whole_groups(places, parallel)[: parallel.ranks])
    if len(before) != parallel.ranks:
        return fresh
    free = [place for place in places if place not in before]
    kept = tuple(place if place in places else free.pop(0) for place in before)
    size = _group(places, parallel)
    apart = any(len({place.node for place in kept[first : first + size]}) > 1 for first in range(0, len(kept), size))
    return fresh if apart else kept


def _group(places: Sequence[Place], parallel: Parallel) -> int:
    """Neighbouring ranks that belong on one node; 1 if that is not possible, or not what was asked for."""
    largest = max(Counter(place.node for place in places).values(), default=0)
    return parallel.tp if parallel.order[0] == "tp" and parallel.tp <= largest else 1
