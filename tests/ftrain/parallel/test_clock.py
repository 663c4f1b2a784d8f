"""The line of marks of a step, with a timer that goes when it is told to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ftrain.parallel.clock import CHECKPOINT, COMPUTE, LINK, OTHER, Clock, HostTimer, Wait, spent


@dataclass
class Hand:
    """A clock whose hand the test moves."""

    t: float = 0.0
    origin: float = 0.0

    def now(self) -> float:
        return self.t

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def test_every_second_is_in_one_activity() -> None:
    hand = Hand()
    clock = Clock(timer=hand)
    group = clock.group((0, 1), "dp")
    clock.begin()
    hand.t = 1  # other
    with clock.during(COMPUTE):
        hand.t = 3  # compute
        before = clock.enter(Wait(group, group.ticket()))
        hand.t = 7  # the first collective
        clock.enter(before)
        hand.t = 8  # compute again
        with clock.during(CHECKPOINT, hold=True):
            clock.enter(LINK)  # counts as the checkpoint's
            hand.t = 18
    hand.t = 20
    found = spent(clock.take(), hand)
    assert found.seconds == {OTHER: 3, COMPUTE: 3, CHECKPOINT: 10}
    assert found.waits == {group: [0, 4]}
    assert found.total == 20


def test_collectives_are_told_apart_by_their_number_however_they_are_waited_for() -> None:
    """Issued first, second, third; waited for third, first; the second in the next step, in which one more is issued."""
    hand = Hand()
    clock = Clock(timer=hand)
    group = clock.group((0, 1), "dp")

    def wait(ticket: int, seconds: float) -> None:
        before = clock.enter(Wait(group, ticket))
        hand.t += seconds
        clock.enter(before)

    clock.begin()
    tickets = [group.ticket() for _ in range(3)]
    wait(tickets[2], 5)
    wait(tickets[0], 7)
    assert spent(clock.take(), hand).waits == {group: [0, 7, 0, 5]}
    clock.begin()
    last = group.ticket()
    wait(tickets[1], 2)
    wait(last, 1)
    assert spent(clock.take(), hand).waits == {group: [2, 1]}


def test_without_a_step_nothing_is_marked() -> None:
    clock = Clock()
    for _ in range(10):
        with clock.during(COMPUTE):
            pass
    assert not clock.take().marks


def test_the_host_timer_counts_seconds() -> None:
    timer = HostTimer()
    begin = timer.now()
    assert 0 <= timer.seconds(begin, timer.now()) < 60
    assert timer.seconds(timer.origin, begin) == pytest.approx(begin)
