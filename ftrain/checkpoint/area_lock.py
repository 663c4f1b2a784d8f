"""Who may touch a memory area for copies: whoever reads one that is whole, or the one who fills it.

The keeper fills such an area when another node's keeper offers a copy, whenever that may be: an offer can come an attempt too
late. Workers read it when an attempt begins, where it lies or through the keeper. What is read must not change meanwhile: in a
mixture of two snapshots every chunk has a right crc. Both sides are processes that may be killed at any moment, so the lock is
the kernel's (flock): it goes with its holder. It is held on an opening of the file of its own, because the descriptors that an
agent has handed out are all one opening, and an opening never excludes itself.

Nobody waits for it. An area that is being filled holds nothing that could be read, and a copy that finds no area is given up.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ftrain.checkpoint.names import is_peer


class AreaLock:
    """One process's side of the lock of one area. For one thread at a time."""

    def __init__(self, fd: int) -> None:
        """`fd`: of the area; it may be closed afterwards."""
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)

    def read(self) -> bool:
        """Whether it stays as it is from now on, until `release`."""
        return self._try(fcntl.LOCK_SH)

    def fill(self) -> bool:
        """Whether it may be overwritten from now on, until `release`."""
        return self._try(fcntl.LOCK_EX)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let others have it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release it for good."""
        os.close(self._fd)


@contextmanager
def unchanging(fds: Mapping[str, int]) -> Iterator[frozenset[str]]:
    """The areas among `fds` (by name) that nobody fills, and nobody will inside."""
    locks = {name: AreaLock(fd) for name, fd in fds.items() if is_peer(name)}
    try:
        still = {name for name, lock in locks.items() if lock.read()}
        yield frozenset(still | (fds.keys() - locks.keys()))  # its own slots only a node's own workers fill
    finally:
        for lock in locks.values():
            lock.close()
