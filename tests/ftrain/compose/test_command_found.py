"""A script's checkpoint that was committed when its rank was dead already: who loads it says that it is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ftrain.compose.command import CommandDelegate
from ftrain.compose.command_launch import CommandLaunch
from ftrain.compose.endwatch import EndWatch
from ftrain.supervised import StateLoaded, StateStored, Told
from recovery.events import CheckpointCommitted, Event, Ready
from recovery.notice import Lookout


class Desk:
    """Takes what ranks say to the delegate, and what comes of it back to it, as the coordinator does."""

    def __init__(self, folder: Path, patterns: Sequence[str] = ()) -> None:
        plain = {"url": str(folder), "argv": ["true"], "cwd": "/", "nproc": 2, "patterns": patterns}
        launch = msgspec.convert(plain, CommandLaunch)
        self.delegate = CommandDelegate(launch, folder, EndWatch(Lookout((), poll_s=60.0, clock=lambda: 0.0), margin_s=0.0))
        self.attempt = -1

    def begin(self, attempt: int) -> None:
        self.attempt = attempt
        self.delegate._begin_attempt(attempt)

    def say(self, rank: int, told: Told) -> list[Event]:
        found = list(self.delegate.on_worker(rank, self.attempt, msgspec.json.encode(told)))
        for event in found:
            self.delegate.on_event(event)
        return found


def test_what_a_dead_attempt_has_committed_is_told_once_by_who_loads_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.begin(0)
    (ready,) = desk.say(0, StateLoaded(step=7, t=1.0, stored=((7, 0, 5),)))  # of a run before this one
    assert isinstance(ready, Ready)
    desk.say(0, StateStored(step=10, t=2.0, nbytes=50))
    desk.begin(1)
    stored = ((7, 0, 5), (10, 0, 50), (15, 0, 60), (20, 0, 70))
    *committed, ready = desk.say(0, StateLoaded(step=20, t=3.0, stored=stored))
    assert all(isinstance(event, CheckpointCommitted) for event in committed)
    assert [(event.attempt, event.step, event.nbytes) for event in committed] == [(0, 15, 60), (0, 20, 70)]
    assert isinstance(ready, Ready)
    assert desk.say(1, StateLoaded(step=20, t=3.0)) == []
    desk.begin(2)
    for step in (20, 10):  # known, and going back
        (ready,) = desk.say(0, StateLoaded(step=step, t=4.0, stored=stored[: 1 + step // 10]))
        assert isinstance(ready, Ready)
        desk.begin(desk.attempt + 1)
