"""Work that may take long, while the loop goes on: agents, clients and signals are not to wait for storage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from recovery.loop import Loop

T = TypeVar("T")


def meanwhile(loop: Loop, work: Callable[[], T], *, unless: Callable[[], bool]) -> T | None:
    """What `work` returns, or raises; it runs on a thread, and the loop handles what arrives until it ends. None if it is not
    worth waiting for any more (`unless`): then the thread is left to itself.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised where it is waited for
            errors.append(error)
        loop.wake()

    threading.Thread(target=run, name="meanwhile", daemon=True).start()
    loop.wait_for(lambda: bool(results or errors) or unless())
    if errors:
        raise errors[0]
    return results[0] if results else None
