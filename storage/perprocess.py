"""A value that each process makes for itself on first use.

Event loops, thread pools and connections do not survive a fork: the child inherits the objects but none of their threads, and
the first call hangs. So whatever holds one keeps it here, and a forked child quietly makes its own.
"""

import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")


class PerProcess(Generic[T]):
    """`make()` at most once per process; the lock is replaced in a child, where its holder may not exist."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._value: T | None = None

    def get(self) -> T:
        """This process's value."""
        if self._pid != os.getpid():
            self._pid, self._lock, self._value = os.getpid(), threading.Lock(), None
        value = self._value
        if value is None:
            with self._lock:
                value = self._value = self._make() if self._value is None else self._value
        return value

    def take(self) -> T | None:
        """The value if this process has one; it is made anew at the next `get`."""
        value = self._value if self._pid == os.getpid() else None
        self._value = None
        return value
