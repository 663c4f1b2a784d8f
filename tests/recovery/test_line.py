"""The coordinator's end of an agent's connection: what is acknowledged when, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from recovery import line
from recovery.line import OWED_BYTES, Line
from recovery.loop import Loop, Port
from recovery.messages import (
    Ack,
    AgentHello,
    FromKeeper,
    FromWorker,
    Lasting,
    Numbered,
    Ping,
    Spawned,
    ToAgent,
    ToCoordinator,
    Welcome,
)
from recovery.wire import Channel, channel, socket_pair

HELLO = AgentHello(node="n1", pid=7, boot_id="b", epoch=0)


class Called:
    """A line, the agent's end of its newest connection, and what was heard on it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.heard: list[Any] = []
        self.line = Line(self.loop, self.heard.append, lambda: None)
        self.agent = self.call()

    def call(self) -> Channel[Any]:
        """The agent connects (again)."""
        ours, theirs = socket_pair()
        port = Port(self.loop, channel(ours, ToCoordinator), lambda frame: None, lambda: None)
        self.line.take(port, HELLO, 1)
        self.agent = channel(theirs, ToAgent)
        self.loop.run_once(0.0)
        assert self.said() == [Welcome(epoch=1)]
        return self.agent

    def tell(self, *messages: tuple[int, Lasting]) -> list[Any]:
        """What the agent is told when these arrive together."""
        for seq, message in messages:
            self.agent.queue(Numbered(seq=seq, message=message))
        while self.agent.wants_write:
            self.agent.flush()
            self.loop.run_once(0.0)
        self.loop.run_once(0.0)  # what was left for the end of a round leaves before the next wait
        return self.said()

    def said(self) -> list[Any]:
        """To the agent, since the last call."""
        return [frame.message for frame in self.agent.read()]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[Called]:
    monkeypatch.setattr(line, "OWED_S", 1000.0)
    made = Called()
    yield made
    made.line.hang_up()
    made.agent.close()
    made.loop.close()


def report(size: int = 1) -> FromWorker:
    return FromWorker(rank=0, attempt=0, payload=bytes(size))


def test_a_report_that_comes_long_after_the_last_acknowledgement_is_acknowledged_at_once(
    called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called.tell((1, report())) == []
    monkeypatch.setattr(line, "OWED_S", 0.0)
    assert called.tell((2, report())) == [Ack(seq=2)]
    monkeypatch.setattr(line, "OWED_S", 1000.0)
    assert called.tell((3, report())) == []


def test_reports_are_acknowledged_together(called: Called) -> None:
    assert called.tell((1, report())) == []
    assert called.tell((2, report())) == []
    assert len(called.heard) == 2
    called.line.acknowledge()
    called.loop.run_once(0.0)
    assert called.said() == [Ack(seq=2)]
    called.line.acknowledge()
    called.loop.run_once(0.0)
    assert called.said() == [], "the agent knows"


def test_what_is_sent_takes_the_acknowledgement_along(called: Called) -> None:
    called.tell((1, report()))
    called.line.send(Ping())
    called.loop.run_once(0.0)
    assert called.said() == [Ack(seq=1), Ping()]


def test_anything_but_a_report_is_acknowledged_at_once_and_with_it_all_before(called: Called) -> None:
    assert called.tell((1, report()), (2, Spawned(attempt=0, rank=0, pid=9)), (3, report())) == [Ack(seq=3)]
    assert called.tell((4, FromKeeper(payload=b"stored"))) == [Ack(seq=4)]


def test_an_agent_never_keeps_much_for_want_of_an_acknowledgement(called: Called) -> None:
    half = OWED_BYTES // 2
    assert called.tell((1, report(half))) == []
    assert called.tell((2, report(half))) == [Ack(seq=2)]
    assert called.tell((3, report(half))) == []


def test_an_acknowledgement_that_a_lost_connection_swallowed_is_said_again(called: Called) -> None:
    called.tell((1, report()))
    called.line.acknowledge()
    called.loop.run_once(0.0)
    called.agent.close()
    called.call()
    assert called.tell((1, report())) == []
    assert len(called.heard) == 1, "told twice, heard once"
    called.line.acknowledge()
    called.loop.run_once(0.0)
    assert called.said() == [Ack(seq=1)]
