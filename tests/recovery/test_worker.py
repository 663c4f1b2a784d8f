"""What a worker says, and whom it wakes to have it heard."""

from __future__ import annotations

import array
import fcntl
import os
import termios
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.heartbeat import CONTROL_SIZE, RECORD_SIZE, ControlWriter
from recovery.memory import memfd
from recovery.messages import Fork, FromWorkerProcess, Payload, ToWorkerProcess, WorkerHello, WorkerToKeeper
from recovery.wire import Channel, channel, socket_pair, wait_readable
from recovery.worker import EAGER_S, RING_S, WorkerContext


@pytest.fixture
def pair() -> Iterator[tuple[WorkerContext, Channel[Any]]]:
    """A worker's context and the other end of its channel."""
    ours, theirs = socket_pair()
    fds = {"heartbeat": memfd("h", RECORD_SIZE), "control": memfd("c", CONTROL_SIZE)}
    fds["page"] = os.dup(fds["control"])
    bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    fork = Fork(
        attempt=0, epoch=1, rank=0, index=0, entry="", args={}, env={}, fd_names=(), agent_pid=1, error_file="/nowhere/error"
    )
    mine, other = channel(ours, ToWorkerProcess), channel(theirs, FromWorkerProcess)
    yield WorkerContext(fork, mine, {**fds, "bell": bell}), other
    mine.close()
    other.close()
    os.close(bell)


def rings(context: WorkerContext) -> int:
    """How often the bell was rung since the last call."""
    assert context.bell is not None
    try:
        return os.eventfd_read(context.bell)
    except BlockingIOError:
        return 0


def said(other: Channel[Any]) -> list[object]:
    """What has arrived."""
    return [frame.message for frame in other.read()]


def test_the_first_steps_of_an_attempt_are_heard_at_once(pair, monkeypatch) -> None:
    context, other = pair
    now = context._began
    monkeypatch.setattr("recovery.worker.time.monotonic", lambda: now)
    context.hello()
    for number in range(10):
        context.send_soon(b"%d" % number)
        assert (rings(context) > 0, len(said(other)) > 0) == (True, True)
    now += EAGER_S
    context.send_soon(b"one rings, after half a second")
    context.send_soon(b"the next one waits")
    assert (rings(context), len(said(other))) == (1, 2)


def test_what_can_wait_is_in_the_kernels_hands_at_once_and_wakes_nobody(pair, monkeypatch) -> None:
    context, other = pair
    now = context._began + EAGER_S
    monkeypatch.setattr("recovery.worker.time.monotonic", lambda: now)
    context.hello()
    assert (rings(context), said(other)) == (1, [WorkerHello(pid=os.getpid(), rings=True)])
    for number in range(10):
        context.send_soon(b"%d" % number)
    assert (rings(context), said(other)) == (0, [Payload(payload=b"%d" % number) for number in range(10)])
    now += RING_S
    context.send_soon(b"again")
    context.send_soon(b"and again")
    assert (rings(context), len(said(other))) == (1, 2)


def test_who_reads_anyway_is_not_woken_for_what_can_wait(pair, monkeypatch) -> None:
    context, other = pair
    now = context._began + EAGER_S
    monkeypatch.setattr("recovery.worker.time.monotonic", lambda: now)
    page = ControlWriter(context.fds.pop("page"))
    page.set(stop=True, save=3)
    page.looked(now - RING_S / 2)
    assert (context.control.stop, context.control.save, context.control.looked) == (True, 3, now - RING_S / 2)
    context.send_soon(b"1")
    context.send_keeper(b"2", soon=True)
    assert (rings(context), len(said(other))) == (0, 2)
    page.looked(now - RING_S)
    context.send_keeper(b"3", soon=True)
    assert rings(context) == 1
    page.looked(now + 1000.0)  # a clock that was set for one of the two processes only
    now += RING_S
    context.send_soon(b"4")
    assert rings(context) == 1


def test_what_cannot_wait_wakes_and_takes_along_what_could(pair) -> None:
    context, other = pair
    context.send_later(b"1")
    assert (rings(context), said(other)) == (0, [])
    context.send_keeper(b"2")
    context.send(b"3")
    assert rings(context) == 2
    assert said(other) == [Payload(payload=b"1"), WorkerToKeeper(payload=b"2"), Payload(payload=b"3")]


def test_a_worker_that_was_given_no_bell_does_not_promise_to_ring(pair) -> None:
    context, other = pair
    context.bell = None
    context.hello()
    context.send_soon(b"1")
    assert said(other) == [WorkerHello(pid=os.getpid()), Payload(payload=b"1")]


def test_who_waits_for_room_rings_whenever_there_is_none(pair) -> None:
    context, other = pair
    assert context.bell is not None
    sender = threading.Thread(target=context.send_soon, args=(bytes(8 << 20),), daemon=True)
    sender.start()
    found: list[object] = []
    while not found:  # one who reads only when it rings
        assert wait_readable(context.bell, 20.0)
        rings(context)
        found = said(other)
    sender.join()
    assert found == [Payload(payload=bytes(8 << 20))]


def waiting(other: Channel[Any]) -> int:
    """Bytes that have arrived and are not read."""
    count = array.array("i", [0])
    fcntl.ioctl(other.fileno(), termios.FIONREAD, count)
    return count[0]


def test_the_rest_of_what_had_no_room_is_rung_for(pair) -> None:
    context, other = pair
    assert context.bell is not None
    sender = threading.Thread(target=context.send_soon, args=(bytes(8 << 20),), daemon=True)
    sender.start()
    while sender.is_alive():  # one who reads what is there when it rings, and nothing that comes meanwhile
        if wait_readable(context.bell, 0.1):
            rings(context)
            if count := waiting(other):
                other.sock.recv(count)
    assert rings(context) or not waiting(other)
