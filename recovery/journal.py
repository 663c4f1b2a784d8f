"""The coordinator's pen: every event goes to the ledger first, then into the state the decisions are made from.

A full local disk must not end a healthy training run: what cannot be written is kept in memory, in order, and tried again with
each further event and each tick, and the log says so. Only then may something have been done that is not yet on disk.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from recovery.events import CheckpointCommitted, Event, Ready
from recovery.state import RunState, apply

log = logging.getLogger(__name__)

COPIED_AT = (CheckpointCommitted, Ready)
"""After these the ledger's copy in storage is brought up to date: it is never older than the newest checkpoint there."""


class EventWriter(Protocol):
    """What the coordinator needs of a ledger (recovery.ledger.Ledger is one)."""

    def append(self, *together: Event) -> None:
        """Record the events, all or none; a decision is durable on return."""

    def rotate(self) -> None:
        """Close what was written so far, so that it can be copied to storage."""

    def close(self) -> bool:
        """Close, and wait a bounded time for the copy to storage."""


class Journal:
    """Ledger and state in step. One thread."""

    def __init__(self, ledger: EventWriter, state: RunState, on_event: Callable[[Event], None] | None = None) -> None:
        """Go on from `state`, the fold of everything already in the ledger. `on_event` sees each event after it is written."""
        self.state = state
        self._ledger = ledger
        self._on_event = on_event
        self._unwritten: deque[tuple[Event, ...]] = deque()

    def append(self, *together: Event) -> None:
        """Record an event, or several of which nobody may ever see only the first."""
        self._unwritten.append(together)
        if self.write() and any(isinstance(event, COPIED_AT) for event in together):
            self._ledger.rotate()
        for event in together:
            self.state = apply(self.state, event)
            if self._on_event is not None:
                self._on_event(event)

    def extend(self, events: Iterable[Event]) -> None:
        """Record several, one by one."""
        for event in events:
            self.append(event)

    def close(self) -> None:
        """The last act of a run."""
        if self.write():
            self._ledger.close()

    def write(self) -> bool:
        """Write what is not written yet; whether nothing is left."""
        try:
            while self._unwritten:
                self._ledger.append(*self._unwritten[0])
                self._unwritten.popleft()
        except OSError as error:
            waiting = sum(map(len, self._unwritten))
            log.error("the ledger cannot be written, %d events wait in memory: %s", waiting, error)
        return not self._unwritten
