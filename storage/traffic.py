"""How much of a process is on its way to and from remote stores at once, and how fast it may upload: one mechanism for all.

A save, a load, a verification and a copy may run in one process at the same time, each with its own threads. What they hold
together is what the memory limit sees, and what they send together is what training feels on a shared link or core. So neither
limit belongs to a caller: each request asks this module, whoever makes it.

A request holds its bytes only while it is on its way, and never while it waits for something else, so that no two can wait for
each other. The first one always passes, even if it alone is larger than the cap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from storage.objects import Bytes
from storage.perprocess import PerProcess

__all__ = ["DEFAULT_IN_FLIGHT_BYTES", "Traffic", "configure", "traffic"]

DEFAULT_IN_FLIGHT_BYTES = 64 << 20

PACED_BYTES = 4 << 20
"""Under a rate limit larger blocks are cut: a second's worth at once is a burst that training feels."""


@dataclass(slots=True)
class _State:
    """What changes; a forked child begins with its own."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    held: int = 0
    most_held: int = 0
    num_requests: int = 0
    next_upload: float = 0.0


class Traffic:
    """A cap on the bytes of requests on their way, and a rate that uploads keep to. Safe to use from several threads."""

    def __init__(
        self,
        *,
        in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES,
        upload_bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`upload_bytes_per_s` 0: no limit."""
        self.in_flight_bytes = in_flight_bytes
        self.upload_bytes_per_s = upload_bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._state = PerProcess(_State)

    @property
    def most_held(self) -> int:
        """The most bytes that were on their way at once so far."""
        return self._state.get().most_held

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Be one of the requests on their way: waits until `nbytes` fit under the cap, or until no other is."""
        release = self.acquire(nbytes)
        try:
            yield
        finally:
            release()

    def acquire(self, nbytes: int) -> Callable[[], None]:
        """As `hold`, for a request whose end another thread sees; returns what is to be called there, once."""
        state = self._state.get()
        with state.changed:
            state.changed.wait_for(lambda: not state.num_requests or state.held + nbytes <= self.in_flight_bytes)
            state.num_requests += 1
            state.held += nbytes
            state.most_held = max(state.most_held, state.held)

        def release() -> None:
            with state.changed:
                state.num_requests -= 1
                state.held -= nbytes
                state.changed.notify_all()

        return release

    def pace(self, nbytes: int) -> None:
        """Sleep until `nbytes` more may be sent."""
        rate = self.upload_bytes_per_s
        if not rate:
            return
        state = self._state.get()
        with state.changed:
            now = self._clock()
            begin = max(now, state.next_upload)
            state.next_upload = begin + nbytes / rate
        if begin > now:
            self._sleep(begin - now)

    def paced(self, blocks: Iterable[Bytes]) -> Iterable[Bytes]:
        """The same blocks, each held back until it may be sent. What can be read again stays so where there is no limit."""
        return self._pacing(blocks) if self.upload_bytes_per_s else blocks

    def _pacing(self, blocks: Iterable[Bytes]) -> Iterator[Bytes]:
        for block in blocks:
            view = memoryview(block).cast("B")
            for start in range(0, max(len(view), 1), PACED_BYTES):
                piece = view[start : start + PACED_BYTES]
                self.pace(len(piece))
                yield piece


traffic = Traffic()
"""This process's."""


def configure(*, in_flight_bytes: int | None = None, upload_bytes_per_s: float | None = None) -> None:
    """Set this process's limits. Takes effect with the next request."""
    if in_flight_bytes is not None:
        if in_flight_bytes < 1:
            raise ValueError(f"the cap on bytes in flight is at least 1, got {in_flight_bytes}")
        traffic.in_flight_bytes = in_flight_bytes
    if upload_bytes_per_s is not None:
        traffic.upload_bytes_per_s = upload_bytes_per_s
