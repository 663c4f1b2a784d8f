"""What a worker says, and whom it wakes to have it heard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from recovery.heartbeat import CONTROL_SIZE, RECORD_SIZE
from recovery.memory import memfd
from recovery.messages import Fork, FromWorkerProcess, Payload, ToWorkerProcess, WorkerHello, WorkerToKeeper
from recovery.wire import Channel, channel, socket_pair
from recovery.worker import RING_S, WorkerContext


@pytest.fixture
def pair() -> Iterator[tuple[WorkerContext, Channel[Any]]]:
    """A worker's context and the other end of its channel."""
    ours, theirs = socket_pair()
    fds = {"heartbeat": memfd("h", RECORD_SIZE), "control": memfd("c", CONTROL_SIZE)}
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


def test_what_can_wait_is_in_the_kernels_hands_at_once_and_wakes_nobody(pair, monkeypatch) -> None:
    context, other = pair
    now = 100.0
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
