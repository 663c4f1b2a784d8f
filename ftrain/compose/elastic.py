"""The part of a run's delegate that deals with places and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ftrain.compose.args import Launch
from ftrain.compose.launch import relaunch
from ftrain.compose.layouts import Layouts
from ftrain.compose.nodes import num_nodes
from ftrain.config import Config
from recovery.delegate import Delegate
from recovery.events import Event
from recovery.places import Place


class ElasticDelegate(Delegate):
    """Answers what the supervisor asks about layouts; a base of the run's delegate, which starts what was chosen."""

    def __init__(self, launch: Launch, config: Config, folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self._layouts = Layouts(config)

    def num_nodes(self) -> int:
        """Nodes for the ranks of the layout as it is."""
        return num_nodes(self._layouts.now, self._layouts.ranks)

    def place_of(self, rank: int) -> Place | None:
        """Where a rank sits."""
        return self._layouts.place_of(rank)

    def choose_layout(self, places: Sequence[Place], why: str) -> Sequence[Event]:
        """The planner's choice for what is left."""
        return self._layouts.choose(places, why)

    def resize(self, args: Mapping[str, Any], places: Sequence[Place]) -> Sequence[Event]:
        """A person's choice; the next coordinator must know it too."""
        told = self._layouts.resize(args, places)
        relaunch(self._folder, self._launch, self._layouts.wish)
        return told
