"""A bell: one descriptor by which any of many processes can ask another to look, once for however often it was rung."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from recovery.loop import Loop


class Bell:
    """The end of whoever is to look; the others write to the eventfd that is `fileno`."""

    def __init__(self, loop: Loop, call: Callable[[], None]) -> None:
        """`call` is made from the loop."""
        self._loop, self._call = loop, call
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        loop.add(self._fd, self._rung)

    def fileno(self) -> int:
        """Its descriptor, to be handed on."""
        return self._fd

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._call()

    def close(self) -> None:
        """Nobody looks any more."""
        self._loop.remove(self._fd)
        os.close(self._fd)
