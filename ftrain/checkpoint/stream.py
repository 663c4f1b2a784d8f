"""A snapshot on its way out of the arena: sealed and digested by one thread while another writes what is sealed already.

The sealing never waits for the writing, however slow the store is: a snapshot must be fit for a restore from memory soon
after it was taken. The writing waits for the sealing, block by block; a disk and a core are about equally fast, so a save
takes the time of the slower one instead of the sum.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from ftrain.checkpoint.arena import ArenaSlot
from storage.sealing import sealing

BLOCK_NBYTES = 32 * 2**20  # past the page cache a disk wants large writes: with 4 MiB it took 1.3 times as long as with these


class SlotStream:
    """A complete slot's payload in blocks. May be read again, so that a stream that broke can be sent again.

    Sealing begins at once. Leave the `with` block before the slot may go: it waits for the sealing to end.
    """

    def __init__(
        self, slot: ArenaSlot, *, digests: dict[str, int] | None = None, each: Callable[[], None] = lambda: None
    ) -> None:
        """`digests`: known from an earlier pass over the same snapshot. `each` is called after every block."""
        self._slot, self._each = slot, each
        self._header, self._layout, self._payload = slot.header(), slot.table().layout(), slot.payload()
        self._known, self._digests = bool(digests), digests or dict.fromkeys(self._layout.specs, 0)
        self._done = self._known and self._header.sealed
        self._final = self._layout.nbytes if self._done else 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._seal, name="sealer", daemon=True)

    def __enter__(self) -> Self:
        if not self._done:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[memoryview]:
        view, nbytes = self._payload.data, self._layout.nbytes
        for start in range(0, nbytes, BLOCK_NBYTES):
            stop = min(start + BLOCK_NBYTES, nbytes)
            self._wait(stop)
            yield view[start:stop]
            self._each()

    def digests(self) -> dict[str, int]:
        """This slot's share of each array's layout-free digest, modulo 2**64. Waits for the sealing to end."""
        self._wait(self._layout.nbytes)
        return self._digests

    def _wait(self, stop: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._final >= stop or self._error is not None)
        if self._error is not None:
            raise self._error

    def _seal(self) -> None:
        try:
            for final in sealing(self._payload, self._layout, None if self._known else self._digests):
                with self._changed:
                    self._final = final
                    self._changed.notify_all()
            self._slot.mark_sealed(self._header)
        except BaseException as error:  # a thread's error has no other listener: whoever waits for the bytes gets it
            with self._changed:
                self._error = error
                self._changed.notify_all()
