"""The part of a run's delegate that decides how an attempt begins: its layout, its places, its state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.args import Launch, WorkerArgs
from ftrain.compose.copies import Copies
from ftrain.compose.launch import relaunch
from ftrain.compose.layouts import Layouts
from ftrain.compose.nodes import num_nodes, shared_dir
from ftrain.compose.phasing import Phasing, at_boundary, began
from ftrain.compose.places import Places
from ftrain.compose.retries import Start, retry
from ftrain.compose.skips import Range, Told, ranges
from ftrain.config import Config
from recovery.delegate import Delegate, Links
from recovery.events import Event
from recovery.places import Place
from recovery.rendezvous import control_folder
from storage.retention import RetentionPolicy
from storage.run import RunStore


class ElasticDelegate(Delegate):
    """Answers what the supervisor asks about layouts; the base of the run's delegate, which starts what was chosen."""

    def __init__(
        self, launch: Launch, config: Config, run: RunStore, folder: Path, policies: Sequence[RetentionPolicy]
    ) -> None:
        self._launch, self._config, self._run = launch, config, run
        self._url, self._local = config.run.url, str(folder)
        self._committed: int | None = None
        self._places = Places(config, run, policies)
        self._layouts = Layouts(config)
        self._phasing = Phasing()
        self._skips: tuple[Range, ...] = ()  # decided on while it ran
        self._given = Told()
        self._copies = Copies(lambda payload: self.links.to_keeper(payload))

    @property
    @abstractmethod
    def links(self) -> Links:
        """What may be done to the run."""

    def num_nodes(self) -> int:
        """Nodes for the ranks of the layout as it is."""
        return num_nodes(self._layouts.now, self._layouts.needed)

    def place_of(self, rank: int) -> Place | None:
        """Where a rank sits."""
        return self._layouts.place_of(rank)

    def choose_layout(self, places: Sequence[Place], why: str) -> Sequence[Event]:
        """The planner's choice for what is left."""
        return self._layouts.choose(places, why)

    def resize(self, args: Mapping[str, Any], places: Sequence[Place]) -> Sequence[Event]:
        """A person's choice; the next coordinator must know it too."""
        told = self._layouts.resize(args, places)
        relaunch(Path(self._local), self._launch, self._layouts.whole)
        return told

    def makes_way(self) -> bool:
        """Whether the workers have left for another phase: they said so, or said it to a coordinator that died."""
        return self._phasing.left or at_boundary(self._layouts.whole, self._layouts.phase, self._phasing.cursor)

    def _enter_phase(self, memory: int | None, differently: Sequence[str]) -> list[Event]:
        """That of the state which the next workers will find, as far as that is known; what the ledger is told of it.

        `memory`: the step that the memory tier has; `differently`: as of `_start`.
        """
        start = self._start(differently)
        copied = self._copies.reachable({place.node for place in self.links.places()}) if memory is None else None
        step = (self._places.newest(memory, self._origin[1], copied=copied)[1] if start.nearer else start.step) or 0
        number, before = self._phasing.of(step), self._phasing.recorded
        self._phasing.left, self._phasing.recorded = False, number
        self._phasing.seam = step if number != before else None
        self._layouts.enter(number)
        return [began(self._layouts.whole, before, number, step, self._layouts.wish_text)] if number != before else []

    @property
    def _origin(self) -> tuple[str, int | None]:
        """Whose checkpoint the next attempt may load, and which: this run's, or before there is one, that of `--from`."""
        if self._committed is None and self._launch.origin_url:
            return self._launch.origin_url, self._launch.origin_step
        return self._url, self._committed

    def _start(self, differently: Sequence[str]) -> Start:
        """From which state the next attempt begins, if it is to differ from the last one."""
        url, step = self._origin
        start = retry(differently, self._run.checkpoints, step, own=url == self._url)
        if self._layouts.spread and self._phasing.seam is not None and self._phasing.seam == self._committed:
            return replace(start, nearer=False)  # of several nodes' memory nobody proves the digests, of storage all do
        return start

    @property
    def _skipped(self) -> list[Range]:
        """All ranges of data that are passed over."""
        return ranges(self._config, self._skips)

    def _worker_args(self, own: list[str], older: list[str], start: Start) -> WorkerArgs:
        """What is the same for all ranks."""
        self._given.tell(self._skipped)
        return WorkerArgs(
            config=msgspec.to_builtins(self._layouts.now),
            restore_url=self._origin[0],
            local_dir=self._local,
            storage_step=start.step,
            stored_step=self._committed or 0,
            local_step=self._places.local_step if start.nearer else None,
            own_slots=own,
            source_slots=own + older if start.nearer else own,
            nearer=start.nearer,
            evidence=start.evidence,
            skips=self._skipped,
            layout=self._layouts.text,
            whole=msgspec.to_builtins(self._layouts.recorded) if self._layouts.whole.phases else {},
            phase=self._layouts.phase,
            control=str(control_folder(shared_dir(self._config, Path(self._local)))) if self._layouts.copied else "",
        )
