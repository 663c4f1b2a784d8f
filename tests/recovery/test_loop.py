"""What the event loop of agent and coordinator does so that a supervised step costs few wake-ups."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.loop import Loop, Port
from recovery.messages import Ack, Ping, ToAgent
from recovery.wire import Channel, channel, socket_pair


class Counted:
    """A socket that counts how often it is asked to send."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner, self.sends = inner, 0

    def sendmsg(self, *words: Any) -> int:
        self.sends += 1
        return self._inner.sendmsg(*words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def pair(loop: Loop) -> Iterator[tuple[Port, Counted, Channel[Any]]]:
    """A port of `loop`, its socket, and the other end."""
    ours, theirs = socket_pair()
    made, counted = channel(ours, ToAgent), Counted(ours)
    made.sock = counted  # type: ignore[assignment]
    port, other = Port(loop, made, lambda frame: None, lambda: None), channel(theirs, ToAgent)
    yield port, counted, other
    port.close()
    other.close()


@contextlib.contextmanager
def one_moment() -> Iterator[None]:
    """What is done within is done at the same time, by the clock of the loop, however busy the machine is."""
    now = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recovery.loop.time.monotonic", lambda: now)
        yield


def test_what_recurs_waits_for_company_and_is_called_alone_if_none_comes(loop: Loop) -> None:
    called = list[str]()
    with one_moment():
        loop.every(0.2, lambda: called.append("recurring"))
        loop.after(0.25, lambda: called.append("timer"))
    loop.run_once()
    assert sorted(called) == ["recurring", "timer"]  # in one round
    loop.run_once()
    assert called[2:] == ["recurring"]


def test_what_is_due_equally_often_is_called_in_one_round(loop: Loop) -> None:
    called = list[int]()
    with one_moment():
        for number in range(3):
            loop.every(0.1, lambda number=number: called.append(number))  # type: ignore[misc]
    loop.run_once()
    assert called == [0, 1, 2]


def test_the_frames_of_one_round_leave_in_one_system_call(loop: Loop, pair: tuple[Port, Counted, Channel[Any]]) -> None:
    port, counted, other = pair
    for number in range(5):
        port.send(Ack(seq=number))
    assert counted.sends == 0
    loop.run_once(0.0)
    assert counted.sends == 1
    assert [frame.message for frame in other.read()] == [Ack(seq=number) for number in range(5)]


def test_frames_with_descriptors_keep_their_place(loop: Loop, pair: tuple[Port, Counted, Channel[Any]]) -> None:
    port, _, other = pair
    with socket.socket() as carried:
        port.send(Ack(seq=1))
        port.send(Ping(), (carried.fileno(),))
        port.send(Ack(seq=2))
        loop.run_once(0.0)
    found: list[Any] = []
    while len(found) < 3:
        found += other.read()
    assert [(type(frame.message), len(frame.fds)) for frame in found] == [(Ack, 0), (Ping, 1), (Ack, 0)]
    for frame in found:
        for fd in frame.fds:
            os.close(fd)


def test_what_is_queued_is_sent_before_a_port_is_closed(loop: Loop, pair: tuple[Port, Counted, Channel[Any]]) -> None:
    port, _, other = pair
    port.send(Ack(seq=7))
    port.close()
    assert [frame.message for frame in other.read()] == [Ack(seq=7)]
    assert other.read() == []
    assert other.closed


def test_last_words_come_before_the_end_also_when_it_is_noticed_by_writing(loop: Loop) -> None:
    ours, theirs = socket_pair()
    told = list[Any]()
    port = Port(loop, channel(ours, ToAgent), lambda frame: told.append(frame.message), lambda: told.append("the end"))
    other = channel(theirs, ToAgent)
    other.send(Ack(seq=7))
    other.close()
    port.send(Ping())
    loop.run_once(0.0)
    assert told == [Ack(seq=7), "the end"]


def test_more_than_the_socket_takes_is_sent_as_it_is_read(loop: Loop, pair: tuple[Port, Counted, Channel[Any]]) -> None:
    port, _, other = pair
    for number in range(50_000):
        port.send(Ack(seq=number))
    found: list[int] = []
    while len(found) < 50_000:
        loop.run_once(0.0)
        found += [frame.message.seq for frame in other.read()]
    assert found == list(range(50_000))
