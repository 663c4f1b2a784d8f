"""Who is let in, as a pure matter of hellos and epochs: no process, no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recovery.fleet import MARGIN_S, Fleet
from recovery.loop import Loop, Port
from recovery.messages import (
    AgentHello,
    Exited,
    Numbered,
    SetControl,
    StartAttempt,
    ToAgent,
    ToCoordinator,
    Welcome,
    WorkerInfo,
    WorkerSpec,
)
from recovery.spec import FleetSpec
from recovery.wire import channel, socket_pair


class Line:
    """A connection that notes what is said on it."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.closed = False
        self.channel = None
        self.hang_up: Callable[[], None] = lambda: None

    def take_over(self, on_frame: object, on_close: Callable[[], None]) -> None:
        """Nothing will come."""
        self.hang_up = on_close

    def send(self, message: object) -> None:
        self.said.append(message)

    def close(self) -> None:
        self.closed = True


def test_an_agent_that_started_an_attempt_after_a_roll_back_is_let_in_again(tmp_path: Path) -> None:
    loop = Loop()
    fleet = Fleet(loop, FleetSpec(control=tmp_path, host="127.0.0.1"), 60.0, lambda *told: None, lambda *died: None)
    fleet.begin(3)
    first, again, later = Line(), Line(), Line()
    fleet.offered(first, AgentHello(node="n1", pid=7, boot_id="b", epoch=0))  # type: ignore[arg-type]
    fleet.place({0: "n1"})
    start = StartAttempt(attempt=5, epoch=4, workers=(WorkerSpec(rank=0, entry="toy:main", args={}),))
    fleet.send(start)
    assert first.said[1:] == [start]
    fleet.offered(again, AgentHello(node="n1", pid=7, boot_id="b", epoch=4, attempt=5))  # type: ignore[arg-type]
    assert (again.closed, again.said) == (False, [Welcome(epoch=4)])
    fleet.offered(later, AgentHello(node="n1", pid=7, boot_id="b", epoch=5))  # type: ignore[arg-type]
    assert later.closed
    loop.close()


def test_who_calls_again_is_told_what_is_asked_of_the_workers_and_the_delegate_hears_of_it(tmp_path: Path) -> None:
    """What was said while nobody listened is said again: a stop, a save, and whatever the delegate makes of a return."""
    loop = Loop()
    fleet = Fleet(loop, FleetSpec(control=tmp_path, host="127.0.0.1"), 60.0, lambda *told: None, lambda *died: None)
    joined, returned = list[str](), list[str]()
    fleet.joined, fleet.returned = joined.append, returned.append
    fleet.begin(0)
    first, again = Line(), Line()
    hello = AgentHello(node="n1", pid=7, boot_id="b", epoch=0)
    fleet.offered(first, hello)  # type: ignore[arg-type]
    fleet.send(SetControl(stop=False, save=1))
    first.hang_up()
    fleet.send(SetControl(stop=False, save=2))
    fleet.offered(again, hello)  # type: ignore[arg-type]
    assert first.said == [Welcome(epoch=0), SetControl(stop=False, save=1)]
    assert again.said == [Welcome(epoch=0), SetControl(stop=False, save=2)]
    assert (joined, returned) == (["n1"], ["n1"])
    loop.close()


def test_the_rest_of_an_attempt_that_may_still_step_is_waited_for_until_its_lease_must_be_over(tmp_path: Path) -> None:
    loop = Loop()
    fleet = Fleet(loop, FleetSpec(control=tmp_path, host="127.0.0.1"), 60.0, lambda *told: None, lambda *died: None)
    fleet.expect(attempt=4, ranks=2)
    fleet.begin(1)
    fleet.offered(Line(), AgentHello(node="n3", pid=9, boot_id="b", epoch=0))  # type: ignore[arg-type]
    assert (fleet.expecting, fleet.ready(1), fleet.ready(2)) == (False, True, False), "a spare knows of no attempt"
    ranks = (WorkerInfo(rank=0, pid=8),)
    fleet.offered(Line(), AgentHello(node="n1", pid=7, boot_id="b", epoch=0, attempt=4, workers=ranks))  # type: ignore[arg-type]
    assert (fleet.expecting, fleet.ready(2)) == (True, False), "two nodes are there, but not those that have its ranks"
    fleet._began -= 60.0 + 2 * MARGIN_S
    assert (fleet.expecting, fleet.ready(2)) == (False, True), "what is left of it is taken over"
    loop.close()


def test_who_has_spoken_while_the_coordinator_stood_still_is_not_silent(tmp_path: Path) -> None:
    """A coordinator that was stopped, or kept waiting for a processor, finds all of them unheard of, and their words unread."""
    loop, told = Loop(), list[Any]()
    fleet = Fleet(loop, FleetSpec(control=tmp_path, host="127.0.0.1"), 60.0, lambda *it: told.append(it), lambda *died: None)
    fleet.begin(0)
    ours, theirs = socket_pair()
    agent = channel(theirs, ToAgent)
    hello = AgentHello(node="n1", pid=7, boot_id="b", epoch=0)
    fleet.offered(Port(loop, channel(ours, ToCoordinator), lambda frame: None, lambda: None), hello)
    died = Exited(kind="worker", rank=0, attempt=1, pid=9, status=-9, t=0.0)
    agent.send(Numbered(seq=1, message=died))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recovery.fleet.SILENT_SHARE", 0.0)
        fleet.ping()
    assert told == [(died, "n1")]
    assert fleet.available() == ("n1",)
    agent.close()
    fleet.close()
    loop.close()
