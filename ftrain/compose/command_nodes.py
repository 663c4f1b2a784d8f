"""Which nodes the processes of a command are on: all that were asked for, or fewer if that is allowed and must be."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from ftrain.compose.command_launch import CommandLaunch
from recovery.events import LayoutChosen
from recovery.placement import choose
from recovery.places import WHOLE_NODE, Place


class CommandNodes:
    """The nodes of one run on several machines. Pure but for the clock in its events."""

    def __init__(self, launch: CommandLaunch) -> None:
        """Nothing has run yet."""
        self._launch = launch
        self._program = " ".join(launch.argv[:3]) + " ..." * (len(launch.argv) > 3)
        self.chosen: tuple[str, ...] = ()
        """Of the newest attempt, in the order of their ranks."""
        self.count = max(1, launch.nnodes)
        """Nodes that the next attempt needs."""

    @property
    def ranks(self) -> int:
        """Of the newest attempt; before the first one, of the one to come."""
        return (len(self.chosen) or self.count) * self._launch.per_node

    def layout(self) -> str:
        """In words."""
        words = [f"{self.count} nodes"] if self._launch.nnodes else []
        return " x ".join([*words, *([str(self._launch.nproc)] if self._launch.nproc else []), self._program])

    def choose(self, places: Sequence[Place], why: str) -> list[LayoutChosen]:
        """The nodes of the attempts to come, on `places`; nothing to tell if all may stay. Raises ValueError, and changes
        nothing, if they are too few."""
        there, wanted = self._whole(places), self._launch.nnodes
        least = self._launch.min_nodes or wanted
        if len(there) < least:
            allowed = "--min-nodes" if self._launch.min_nodes else "--nnodes; --min-nodes would allow fewer"
            raise ValueError(f"{len(there)} nodes are left, and it takes {least} ({allowed})")
        before, was = self.count, self.layout()
        nodes = choose(self.chosen, there, min(wanted, len(there)))
        self.count = len(nodes)
        if self.count == before and nodes == (self.chosen or nodes):
            return []
        costs = "a restart from what the script saved last"
        ranks = self.count * self._launch.nproc
        return [LayoutChosen(t=time.time(), ranks=ranks, layout=self.layout(), was=was, reason=why, costs=costs)]

    def moves(self, places: Sequence[Place]) -> bool:
        """Whether ranks that run would have to move, or could be more, on `places`."""
        there = self._whole(places)
        return not set(self.chosen) <= set(there) or min(self._launch.nnodes, len(there)) > len(self.chosen)

    def settle(self, places: Sequence[Place]) -> list[LayoutChosen]:
        """The nodes of the attempt that is being started, more than the last one had if there are more; nodes with a place too
        few only where there is no other."""
        if not self._launch.nnodes:
            return []
        before, told = self.count, list[LayoutChosen]()
        with contextlib.suppress(ValueError):
            told = self.choose(places, "the nodes that there are")
        whole = self._whole(places)
        partly = [node for node in dict.fromkeys(place.node for place in places) if node not in whole]
        self.chosen = choose(self.chosen, [*whole, *partly] if len(whole) < self.count else whole, self.count)
        return told if self.count != before else []

    def _whole(self, places: Sequence[Place]) -> list[str]:
        """Nodes that have room for all processes of a node."""
        nodes = [place.node for place in places]
        return [node for node in dict.fromkeys(nodes) if nodes.count(node) >= self._launch.nproc]

    def place_of(self, rank: int) -> Place | None:
        """Where a rank runs, on several machines. The node as a whole: with one process less it is of no use."""
        if not self._launch.nnodes:
            return None
        node = rank // self._launch.nproc
        return Place(node=self.chosen[node], slot=WHOLE_NODE) if node < len(self.chosen) else None

    def adopt(self, nodes: Sequence[str], *, running: bool) -> None:
        """What the ledger knows of an earlier attempt; `running`: its processes live, so it is as large as it is."""
        if not self._launch.nnodes:
            return
        self.chosen = tuple(nodes)
        self.count = len(nodes) if running else self.count
