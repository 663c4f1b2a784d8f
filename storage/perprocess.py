"""A value that each process makes for itself on first use.

Event loops, thread pools and connections do not survive a fork: the child inherits the objects but none of their threads, and
its first call hangs. Worse, when the child collects what it inherited, it takes the parent's sockets out of the poll set that
both share, and then the parent hangs. So whatever holds one keeps it here: a child forgets the inherited value without ever
collecting it, and makes its own.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["PerProcess"]

T = TypeVar("T")


class PerProcess(Generic[T]):
    """`make()` at most once per process."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._value: T | None = None
        _all.add(self)

    def get(self) -> T:
        """This process's value."""
        value = self._value
        if value is None:
            with self._lock:
                value = self._value = self._make() if self._value is None else self._value
        return value

    def take(self) -> T | None:
        """The value if this process has one; it is made anew at the next `get`."""
        with self._lock:
            value, self._value = self._value, None
        return value

    def forget(self) -> None:
        """In a forked child: leave the parent's value alone, and the lock, which another thread of the parent may have held."""
        if self._value is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._value))  # one reference that is never given back
        self._lock, self._value = threading.Lock(), None


_all: "weakref.WeakSet[PerProcess[Any]]" = weakref.WeakSet()


def _forget_all() -> None:
    for each in _all:
        each.forget()


os.register_at_fork(after_in_child=_forget_all)
