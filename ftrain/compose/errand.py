"""Storage work before an attempt can be planned: off the coordinator's thread, and tried again while storage is away.

The coordinator answers deaths, clients and leases within milliseconds; storage may take minutes, or be down for an hour just
when the run must go back. Then the work waits as the policy waits for anything outside (`outage_wait_s`, doubled), and only
when that patience is at an end the run ends with storage's code.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ftrain.config import Config
from storage.errors import Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")


def outage_waits(config: Config) -> tuple[float, float, int]:
    """How long a run waits for something outside: the first pause, the longest, and how many."""
    return config.recovery.outage_wait_s, config.recovery.outage_max_s, config.recovery.outage_restarts


def patiently(work: Callable[[], T], waits: tuple[float, float, int], pause: Callable[[float], object] = time.sleep) -> T:
    """What `work` returns, tried again while storage is away. `waits`: the first pause, the longest, and how many of them."""
    pause_s, longest_s, left = waits
    while True:
        try:
            return work()
        except Unavailable as error:
            if left <= 0:
                raise
            left -= 1
            log.warning("storage is away; tried again in %g s: %s", pause_s, error)
            pause(pause_s)
            pause_s = min(2 * pause_s, longest_s)


class Errand(Generic[T]):
    """One piece of work on a thread of its own. `done` and `result` belong to the coordinator's thread."""

    def __init__(self, work: Callable[[], T], *, wake: Callable[[], None], waits: tuple[float, float, int]) -> None:
        """Begins at once; the work may be repeated. `waits`: the first pause, the longest, and how many of them.

        `wake` is called from the thread at the end.
        """
        self._work, self._wake, self._waits = work, wake, waits
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="errand", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether there is a result. Raises what the work failed by, for good."""
        if self._error is not None:
            raise self._error
        return bool(self._result)

    @property
    def result(self) -> T:
        """What the work returned; only once it is done."""
        return self._result[0]

    def close(self) -> None:
        """Try no more."""
        self._closing.set()

    def _run(self) -> None:
        try:
            self._result.append(patiently(self._work, self._waits, self._closing.wait))
        except BaseException as error:  # a thread's error has no other listener
            self._error = error
        self._wake()
