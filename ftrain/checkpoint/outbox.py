"""Lets the threads of a keeper send through a channel that only its main thread may touch."""

from __future__ import annotations

import os
import queue
import select
from typing import Any

from recovery.wire import Channel, Frame


class Outbox:
    """A queue in front of a channel. `put` from any thread, everything else from the one that owns the channel."""

    def __init__(self, link: Channel[Any]) -> None:
        self._link = link
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)

    def put(self, message: object) -> None:
        """Queue a message; any thread."""
        self._queue.put(message)
        os.eventfd_write(self._wake, 1)

    def wait(self) -> list[Frame[Any]]:
        """Send what is queued, wait until the peer says something or a thread has a message; return what the peer said."""
        wants = select.POLLIN | (select.POLLOUT if self._link.wants_write else 0)
        self._poll.register(self._link.fileno(), wants)
        ready = {fd for fd, _ in self._poll.poll()}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while not self._queue.empty():
            self._link.send(self._queue.get())
        self._link.flush()
        return self._link.read()
