"""Closed ledger segments go to storage behind the coordinator's back.

The coordinator is one thread that must answer within milliseconds, and storage may be down for minutes: so the copy to storage
is made by a thread of its own, that tries again for ever with growing pauses. Nothing waits for it but the end of the run, and
that only for a bounded time; what is not uploaded then stays on disk and is uploaded by the next coordinator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol


class ByteSink(Protocol):
    """Where closed segments go. Whatever a method raises counts as 'not now'."""

    def put(self, name: str, data: bytes) -> None:
        """Store `data` under `name`: whole or not at all, replacing."""

    def get(self, name: str) -> bytes:
        """The bytes of `name`. Called from several threads."""

    def names(self) -> Iterable[str]:
        """All stored names, in any order."""


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Doubling pauses up to a longest one, for ever."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


class Uploader:
    """Puts segments into a sink, in order, from its own daemon thread. `submit` and `drain` may be called from one thread."""

    def __init__(
        self, sink: ByteSink, read: Callable[[str], bytes], *, first_pause_s: float = 1.0, longest_pause_s: float = 30.0
    ):
        self._sink = sink
        self._read = read
        self._pause_bounds = (first_pause_s, longest_pause_s)
        self._changed = threading.Condition()
        self._pending: list[str] = []
        self._stopping = False
        self._error = ""
        self._known: set[str] | None = None  # what earlier coordinators uploaded, asked once
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> tuple[str, ...]:
        """Names that are not in the sink yet, oldest first."""
        with self._changed:
            return tuple(self._pending)

    @property
    def last_error(self) -> str:
        """Why the last upload failed; empty after a success."""
        with self._changed:
            return self._error

    def submit(self, names: Iterable[str]) -> None:
        """Add names to the queue; the thread starts with the first."""
        with self._changed:
            self._pending.extend(name for name in names if name not in self._pending)
            if self._pending and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ledger-uploader", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is uploaded, stop the thread, and say whether all was."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._pending, timeout_s)
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None and done:
            self._thread.join(timeout_s)
        return done

    def _run(self) -> None:
        waits = pauses(*self._pause_bounds)
        while (name := self._next()) is not None:
            error = self._try(name)
            with self._changed:
                self._error = error
                if error:
                    self._changed.wait_for(lambda: self._stopping, next(waits))
                else:
                    waits = pauses(*self._pause_bounds)
                    self._pending.remove(name)
                    self._changed.notify_all()

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or bool(self._pending))
            return None if self._stopping else self._pending[0]

    def _try(self, name: str) -> str:
        try:
            if self._known is None:
                self._known = set(self._sink.names())
            if name not in self._known:
                self._sink.put(name, self._read(name))
        except Exception as error:  # the sink is foreign code, and no error of it may end a run: kept, shown, tried again
            return f"{type(error).__name__}: {error}"
        return ""
