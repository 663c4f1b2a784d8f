"""Which nodes an attempt runs on, and which rank on which of them. Pure.

Ranks fill one node after the other, so that the innermost axes of the mesh (tensor parallelism first) stay within a node. A
node that was used before keeps its ranks: their snapshots are in its memory. Only what is missing is taken from the spares.
"""

from __future__ import annotations

from collections.abc import Sequence

from recovery.places import WHOLE_NODE, Out


def choose(previous: Sequence[str], available: Sequence[str], needed: int) -> tuple[str, ...]:
    """The nodes of the next attempt, in the order of their ranks: those of the last one where they were, spares in the gaps.

    ValueError if there are not enough.
    """
    if len(available) < needed:
        raise ValueError(f"{needed} nodes are needed, {len(available)} are there")
    kept = [node if node in available else "" for node in previous[:needed]]
    kept += [""] * (needed - len(kept))
    spares = iter(node for node in available if node not in kept)
    return tuple(node or next(spares) for node in kept)


def assign(nodes: Sequence[str], ranks: int, ranks_per_node: int) -> dict[int, str]:
    """Rank -> node. ValueError if the nodes have no room for so many ranks."""
    if ranks > len(nodes) * ranks_per_node:
        raise ValueError(f"{ranks} ranks do not fit on {len(nodes)} nodes of {ranks_per_node}")
    return {rank: nodes[rank // ranks_per_node] for rank in range(ranks)}


def left_out(out: Sequence[Out]) -> tuple[str, ...]:
    """Nodes that must not be used now as a whole."""
    return tuple(entry.place.node for entry in out if entry.place.slot == WHOLE_NODE)
