"""A snapshot on its way out of the arena: sealed and digested by one thread while another writes what is sealed already.

The sealing never waits for the writing, however slow the store is: a snapshot must be fit for a restore from memory soon
after it was taken. The writing waits for the sealing, block by block; a disk and a core are about equally fast, so a save
takes the time of the slower one instead of the sum.

The snapshot may still be on its way into the arena: what the worker's copy has passed is sealed and written behind it. The
last block waits for the end of the copy, so nothing is ever stored of a snapshot that did not become whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from ftrain.checkpoint.arena import ArenaSlot, SlotState
from storage.compress import Compressor
from storage.deflate import Deflated
from storage.manifest import PackManifest
from storage.objects import Bytes
from storage.sealing import sealing

BLOCK_NBYTES = 32 * 2**20  # past the page cache a disk wants large writes: with 4 MiB it took 1.3 times as long as with these

PAUSE_S = 0.001  # between two looks at how far a copy has come
STALL_S = 2.0  # a copy that has not moved for so long is left alone until its end is announced: its worker may be dead


class SnapshotLostError(Exception):
    """The snapshot did not become whole, or not yet: its worker died, or fills the slot with another one."""


class SlotStream:
    """The payload, in blocks, of a slot that is complete or being filled. May be read again, so that a stream that broke can be
    sent again.

    Sealing begins at once. Leave the `with` block before the slot may go: it waits for the sealing to end.
    """

    def __init__(
        self,
        slot: ArenaSlot,
        *,
        digests: dict[str, int] | None = None,
        each: Callable[[], None] = lambda: None,
        compressor: Compressor | None = None,
    ) -> None:
        """`digests`: known from an earlier pass over the same snapshot. `each` is called after every block. With `compressor`
        the blocks are those of a compressed pack, which `described` describes when they have been read.
        """
        self._slot, self._each = slot, each
        self._header, self._layout, self._payload = slot.header(), slot.table().layout(), slot.payload()
        self._known, self._digests = bool(digests), digests or dict.fromkeys(self._layout.specs, 0)
        self._deflated = Deflated(self._payload, self._layout, compressor, ready=self._wait) if compressor else None
        self._whole = self._header.state is SlotState.COMPLETE
        self._sealed = self._known and self._header.sealed
        self._final = self._layout.nbytes if self._sealed else 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._seal, name="sealer", daemon=True)

    def __enter__(self) -> Self:
        if not self._sealed:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def __iter__(self) -> Iterator[Bytes]:
        for block in self._deflated or self._plain():
            yield block
            self._each()

    def _plain(self) -> Iterator[memoryview]:
        view, nbytes = self._payload.data, self._layout.nbytes
        for start in range(0, nbytes, BLOCK_NBYTES):
            stop = min(start + BLOCK_NBYTES, nbytes)
            self._wait(stop)
            yield view[start:stop]

    def described(self, plain: PackManifest) -> PackManifest:
        """What the blocks that were read are, given what the slot holds."""
        return self._deflated.described(plain) if self._deflated else plain

    @property
    def lost(self) -> bool:
        """Whether it broke off because the snapshot did not become whole."""
        return isinstance(self._error, SnapshotLostError)

    def digests(self) -> dict[str, int]:
        """This slot's share of each array's layout-free digest, modulo 2**64. Waits for the sealing to end."""
        self._wait(self._layout.nbytes)
        return self._digests

    def _wait(self, stop: int) -> None:
        def reached() -> bool:
            return self._sealed if stop == self._layout.nbytes else self._final >= stop

        with self._changed:
            self._changed.wait_for(lambda: reached() or self._error is not None)
        if not reached():
            assert self._error is not None
            raise self._error

    def _await_copy(self, stop: int) -> None:
        """Wait until the worker has copied so many bytes; all of them: until it has said that the snapshot is complete.

        Raises SnapshotLostError if it does not.
        """
        seen, since = (0, 0), time.monotonic()
        while not self._whole:
            filled = self._slot.filled()  # before the header: what a later snapshot has filled is never taken for this one's
            header = self._slot.header()
            if header.snapshot != self._header.snapshot or header.state is SlotState.EMPTY:
                raise SnapshotLostError(f"the slot holds another snapshot now than that of step {self._header.step}")
            self._whole = header.state is SlotState.COMPLETE
            if self._whole or stop <= filled[0] < self._layout.nbytes:
                return
            if filled != seen:
                seen, since = filled, time.monotonic()
            elif time.monotonic() - since > STALL_S:
                raise SnapshotLostError(f"the copy of step {self._header.step} has stopped at byte {filled[0]}")
            time.sleep(PAUSE_S)

    def _seal(self) -> None:
        try:
            for final in sealing(self._payload, self._layout, None if self._known else self._digests, self._await_copy):
                with self._changed:
                    self._final = final
                    self._changed.notify_all()
            self._await_copy(self._layout.nbytes)
            self._slot.mark_sealed(self._header)
            with self._changed:
                self._sealed = True
                self._changed.notify_all()
        except BaseException as error:  # a thread's error has no other listener: whoever waits for the bytes gets it
            with self._changed:
                self._error = error
                self._changed.notify_all()
