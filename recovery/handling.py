"""What the coordinator's story does again and again: wait for something, ask the agents, end the workers.

Every wait handles whatever arrives meanwhile, and ends with AgentLostError when an agent with workers of the attempt dies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from recovery import events
from recovery.attempt import AgentLostError, Attempt
from recovery.desk import Desk
from recovery.loop import Loop
from recovery.messages import StopWorkers
from recovery.spec import CoordinatorSpec

log = logging.getLogger("recovery.coordinator")


class Handling:
    """Waits and commands. Main thread only."""

    def __init__(self, loop: Loop, desk: Desk, spec: CoordinatorSpec) -> None:
        """Of one coordinator."""
        self._loop, self._desk, self._spec = loop, desk, spec

    def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait; whether the condition holds at the end."""
        agent = self._desk.agent
        self._loop.wait_for(lambda: condition() or not agent.alive, timeout_s)
        if not agent.alive:
            raise AgentLostError
        return condition()

    def gathered(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """The same for agents that are to come; as long as others of an attempt that may still step can, not in vain: their
        leases may be longer than our patience, and those who have come must not be taken for too few.
        """
        agent = self._desk.agent
        return self.until(condition, patience_s) or (self.until(lambda: condition() or not agent.expecting) and condition())

    def until_tick(self, condition: Callable[[], bool]) -> bool:
        """Wait until it is time to look around; whether the condition holds by then."""
        looked = self._desk.ticks
        return self.until(lambda: condition() or self._desk.ticks != looked) and condition()

    def ask(self, message: object, answers: tuple[type, ...], timeout_s: float) -> object | None:
        """Send a command and wait for one of its answers; None if there is none in time."""
        found = self._desk.answers
        for kind in answers:
            found.pop(kind, None)
        self._desk.agent.send(message)
        self.until(lambda: any(kind in found for kind in answers), timeout_s)
        return next((found[kind] for kind in answers if kind in found), None)

    @property
    def attempt(self) -> Attempt:
        """The attempt that runs; there must be one."""
        assert self._desk.attempt is not None
        return self._desk.attempt

    def stop_workers(self, reason: str) -> None:
        """SIGKILL, and wait until none is left. If one survives even that, its node is broken, and the agent goes."""
        attempt = self.attempt
        if attempt.all_ended:
            return
        self._desk.agent.send(StopWorkers(reason=reason, grace_s=0.0))
        if not self.until(lambda: attempt.all_ended, self._spec.teardown_s):
            log.error("workers survive SIGKILL: %s", [it.pid for it in attempt.workers.values() if not it.ended])
            self._desk.agent.kill()
            self.until(lambda: False, self._spec.teardown_s)

    def end_attempt(self) -> None:
        """On record, and forgotten."""
        attempt, self._desk.attempt = self.attempt, None
        journal = self._desk.journal
        journal.append(events.AttemptEnded(t=time.time(), attempt=attempt.number, step=journal.state.step))
