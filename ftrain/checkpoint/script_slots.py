"""The memory that a script's saves are copied into: two slots of shared memory, allocated once and used in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch

from ftrain.checkpoint.arena import ArenaSlot, slot_name, slot_nbytes
from ftrain.checkpoint.copy import CopyPair, copy_pairs, run_copy
from ftrain.checkpoint.saver import free_slot
from ftrain.checkpoint.script_messages import KeeperStart
from ftrain.device import pin
from ftrain.parallel.arrays import StatePiece
from recovery.memory import check_fits, memfd, room
from storage.pack import PackLayout

SLOTS = 2
POLL_S = 0.002


class ScriptSlots:
    """Slots of one layout. The keeper maps the same memory and says in it when a slot may be filled again."""

    def __init__(self, layout: PackLayout, start: KeeperStart, *, generation: int) -> None:
        """Allocate them. Raises MemoryLimitError before the kernel would have to kill somebody."""
        nbytes = slot_nbytes(layout)
        check_fits(SLOTS * nbytes, room())
        self.generation = generation
        self._start, self._layout = start, layout
        self.fds = {name: memfd(name, nbytes) for name in (slot_name(start.rank, i, generation) for i in range(SLOTS))}
        self._slots = [ArenaSlot(fd, populate=True) for fd in self.fds.values()]
        self._payloads = [slot.prepare(layout) for slot in self._slots]
        self._pinned = False
        self._pairs: list[tuple[tuple[int, ...], list[CopyPair]] | None] = [None] * SLOTS

    @property
    def names(self) -> tuple[str, ...]:
        """Of the slots."""
        return tuple(self.fds)

    def has_free(self) -> bool:
        """Whether a save could begin now."""
        return free_slot([slot.header() for slot in self._slots]) is not None

    def wait_free(self, timeout_s: float) -> bool:
        """Wait until one could, at most so long."""
        deadline = time.monotonic() + timeout_s
        while not self.has_free():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def fill(self, pieces: Sequence[StatePiece], step: int) -> str:
        """Copy the pieces into a free slot and publish it; returns its name."""
        index = free_slot([slot.header() for slot in self._slots])
        assert index is not None, "wait_free comes first"
        slot, start = self._slots[index], self._start
        pairs = self._pairs_of(index, pieces)
        slot.begin(epoch=start.epoch, attempt=0, step=step, rank=start.rank, world=start.world)
        run_copy(pairs)
        slot.complete(b"{}", upload=True)
        return self.names[index]

    def _pairs_of(self, index: int, pieces: Sequence[StatePiece]) -> list[CopyPair]:
        """The views to copy between: as the last time, unless a tensor lies elsewhere now."""
        where = tuple(piece.tensor.data_ptr() for piece in pieces)
        known = self._pairs[index]
        if known is None or known[0] != where:
            device = next((piece.tensor.device for piece in pieces if piece.tensor.device.type != "cpu"), torch.device("cpu"))
            if not self._pinned:
                self._pinned = True
                for payload in self._payloads:
                    pin(payload, device)
            known = self._pairs[index] = (where, _pairs(self._payloads[index], self._layout, pieces))
        return known[1]

    def close(self) -> None:
        """Give the memory back; the keeper's own mapping holds what it still needs."""
        self._pairs, self._payloads = [None] * SLOTS, []
        for slot in self._slots:
            slot.close()
        for fd in self.fds.values():
            os.close(fd)
        self._slots, self.fds = [], {}


def _pairs(payload: object, layout: PackLayout, pieces: Sequence[StatePiece]) -> list[CopyPair]:
    return copy_pairs(payload, layout, pieces)  # type: ignore[arg-type]
