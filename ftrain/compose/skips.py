"""Data that are passed over: which ranges of updates, and from where a run must go on so that they are.

A range names updates. Before its first one the data cursor moves on by what the updates of the range would have read; all
else stays as it is (steps, learning rate, batch sizes). So a range is a pure function of the update number, a checkpoint
remembers which ranges lie behind it (`skipped` in its progress record), and a run that is killed any number of times reads
what an unbroken one with the same ranges does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ftrain.config import Config
from storage.catalog import CheckpointInfo

Range = tuple[int, int]
"""First and last update whose data are passed over."""


def ranges(config: Config, decided: Iterable[Range]) -> list[Range]:
    """Those that the config declares, and those that were decided on while it ran."""
    return [*((skip.first, skip.last) for skip in config.data.skip), *decided]


def missed(declared: Sequence[Range], step: int, progress: Mapping[str, Any]) -> int | None:
    """The first update that a range was to change and that the state of `step` has done without it; None: none.

    `declared`: all of them, those that were decided on included: of two equal ones the second passes over what comes next.
    """
    behind = [(first, last) for first, last, _ in progress.get("skipped", ())]
    late = []
    for entry in declared:
        if entry in behind:
            behind.remove(entry)
        elif entry[0] <= step:
            late.append(entry[0])
    return min(late, default=None)


class Told:
    """What those workers were told whose state is in memory: it may be older than what the config says now."""

    def __init__(self) -> None:
        self._ranges: tuple[Range, ...] | None = None  # None: no worker that we know of

    def tell(self, told: Iterable[Range] | None) -> None:
        """An attempt is started, or an earlier coordinator's is found."""
        self._ranges = tuple(told) if told is not None else None

    def missed(self, declared: Sequence[Range], step: int) -> int | None:
        """The first update that was to read other data and that they have done, having come to `step`; None: none."""
        if self._ranges is None:
            return None
        return missed(declared, step, {"skipped": [(first, last, 0) for first, last in self._ranges]})


def before_skip(update: int) -> str:
    """Why a run goes back to before this update, as a taint says it."""
    return f"data.skip passes over the data of update {update}, which this state has seen"


def newest_before(infos: Iterable[CheckpointInfo], update: int) -> int | None:
    """The newest valid checkpoint whose state has not done `update` yet; None: the run begins anew."""
    return max((info.step for info in infos if info.state == "valid" and info.step < update), default=None)
