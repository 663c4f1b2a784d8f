"""The step after which the ranks of a script on several nodes leave, when they are asked to.

Ranks wait for each other in their collectives, so all must leave after the same step. On one machine they agree through shared
memory and a file (ftrain.supervised); between machines nothing is that fast, and `ftrain.progress` waits for nobody. So the
coordinator chooses a step that no rank can have finished by the time the word has reached all of them: `AHEAD_S` of the fastest
pace seen of late. A rank that hears of it too late leaves at once, and the others are ended when their time to stop is over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from ftrain.supervised import LeaveAfter, Leaving, StepTold

AHEAD_S = 2.0
AT_LEAST = 2  # ranks that wait for each other are at most one step apart
FASTEST_S = 1e-3
AGAIN_S = 1.0  # the word may be lost with a connection


class Leave:
    """Of one attempt at a time. Used by the coordinator's thread; times are unix seconds."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        """`send(rank, payload)` to the script."""
        self._send = send
        self.begin(())

    def begin(self, ranks: Iterable[int]) -> None:
        """A new attempt, of these ranks."""
        self._ranks = tuple(ranks)
        self._newest, self._paces = 0, deque[float](maxlen=8)
        self._asked = False
        self._left: dict[int, int] = {}
        self._next = 0.0
        self.step: int | None = None
        """The last one of all ranks, once it is chosen."""

    def on_step(self, told: StepTold) -> None:
        """Any rank has finished a step."""
        self._newest = max(self._newest, told.step)
        self._paces.append(max(told.t_end - told.t_begin, FASTEST_S))

    def on_leaving(self, rank: int, told: Leaving) -> None:
        """A rank was told that the step it has just finished is the last."""
        self._left[rank] = told.step

    def ask(self) -> None:
        """The ranks are to leave."""
        self._asked = True

    def tick(self, now: float) -> None:
        """Choose the step as soon as somebody has finished one, and tell everybody, again and again."""
        if not self._asked or not self._paces:
            return
        if self.step is None:
            self.step = self._newest + max(AT_LEAST, math.ceil(AHEAD_S / min(self._paces)))
        if now >= self._next:
            self._next = now + AGAIN_S
            payload = msgspec.json.encode(LeaveAfter(step=self.step))
            for rank in self._ranks:
                self._send(rank, payload)

    def left(self, step: int) -> bool:
        """Whether ranks that ended after `step` did so because they were asked: it was no step later than the one at which they
        were told. One that went on regardless has reached its own end."""
        return bool(self._left) and max(self._left.values()) >= step
