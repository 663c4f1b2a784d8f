"""The memory that a script's saves are copied into: two slots of shared memory, allocated once and used in turns.

What may be copied later is copied by a thread of its own; until `finish` nobody may change it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from ftrain.checkpoint.arena import ArenaSlot, slot_name, slot_nbytes
from ftrain.checkpoint.copy import CopyPair, CopyRun, copy_pairs, copy_runs, run_copy
from ftrain.checkpoint.saver import free_slot
from ftrain.checkpoint.script_messages import KeeperStart
from ftrain.device import enqueued, pin
from ftrain.parallel.arrays import StatePiece
from recovery.memory import check_fits, memfd, room
from storage.pack import PackLayout

SLOTS = 2
POLL_S = 0.002


class Copies(NamedTuple):
    """Of one slot: what is copied at once, and what may be later. Valid while the tensors lie where they did."""

    where: tuple[tuple[int, bool], ...]
    now: list[CopyPair]
    later: list[CopyRun]


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
        self._copies: list[Copies | None] = [None] * SLOTS
        self._pool: ThreadPoolExecutor | None = None  # of an overlapped copy, at most one at a time
        self._copying: Future[str] | None = None
        self._due: Callable[[], str] | None = None

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

    def fill(self, pieces: Sequence[StatePiece], step: int, put_off: Sequence[torch.Tensor | None]) -> str:
        """Copy the pieces into a free slot and publish it; returns its name. What is `put_off` (of each piece the tensor that
        it is of, or None) is copied between `go_on` and `finish`, and the slot completes itself.
        """
        index = free_slot([slot.header() for slot in self._slots])
        assert index is not None, "wait_free comes first"
        assert self._copying is None or self._copying.done(), "finish comes first"
        self._copying = None
        slot, start = self._slots[index], self._start
        copies = self._copies_of(index, pieces, [tensor is not None for tensor in put_off])
        slot.begin(epoch=start.epoch, attempt=0, step=step, rank=start.rank, world=start.world, upload=bool(copies.later))
        run_copy(copies.now)
        if copies.later:
            done = enqueued(_device_of(pieces))
            named = zip(pieces, put_off, strict=True)
            versions = [(piece.array, tensor, _version(tensor)) for piece, tensor in named if tensor is not None]
            self._due = partial(_copy_later, slot, copies.later, done, versions)
        else:
            slot.complete(b"{}", upload=True)
        return self.names[index]

    def go_on(self) -> None:
        """Begin with what was put off, if anything was."""
        if self._due is not None:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="ftrain-copy")
            self._copying, self._due = self._pool.submit(self._due), None

    def finish(self) -> str:
        """Wait for what is still being copied. Returns what went wrong with it, if anything; the slot means nothing then.

        Safe from several threads: none of them returns before the copy is over, and all of them are told the same.
        """
        return "" if self._copying is None else self._copying.result()

    def _copies_of(self, index: int, pieces: Sequence[StatePiece], put_off: Sequence[bool]) -> Copies:
        """The views to copy between: as the last time, unless a tensor lies elsewhere now."""
        where = tuple((piece.tensor.data_ptr(), off) for piece, off in zip(pieces, put_off, strict=True))
        known = self._copies[index]
        if known is None or known.where != where:
            if not self._pinned:
                self._pinned = True
                for payload in self._payloads:
                    pin(payload, _device_of(pieces))
            known = self._copies[index] = Copies(
                where,
                self._pairs(index, pieces, [not off for off in put_off]),
                copy_runs(self._payloads[index], self._pairs(index, pieces, put_off)),
            )
        return known

    def _pairs(self, index: int, pieces: Sequence[StatePiece], chosen: Sequence[bool]) -> list[CopyPair]:
        parts = tuple(part for part, wanted in zip(self._layout.parts, chosen, strict=True) if wanted)
        layout = PackLayout(self._layout.specs, parts, self._layout.nbytes)
        return copy_pairs(
            self._payloads[index], layout, [piece for piece, wanted in zip(pieces, chosen, strict=True) if wanted]
        )

    def close(self) -> None:
        """Give the memory back; the keeper's own mapping holds what it still needs."""
        if self._pool is not None:
            self._pool.shutdown()
        self._copies, self._payloads, self._due = [None] * SLOTS, [], None
        for slot in self._slots:
            slot.close()
        for fd in self.fds.values():
            os.close(fd)
        self._slots, self.fds = [], {}


def _device_of(pieces: Sequence[StatePiece]) -> torch.device:
    """The accelerator that the state is on, or the CPU."""
    return next((piece.tensor.device for piece in pieces if piece.tensor.device.type != "cpu"), torch.device("cpu"))


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor, or what shares its memory, was changed in place, as PyTorch counts it. Of a DTensor the whole counts:
    its local part does not notice.
    """
    return 0 if tensor.is_inference() else tensor._version


def _copy_later(
    slot: ArenaSlot,
    runs: Sequence[CopyRun],
    enqueued_is_done: Callable[[], None],
    versions: Sequence[tuple[str, torch.Tensor, int]],
) -> str:
    """Copy and complete; returns what went wrong: an exception would keep this frame, and with it the slot's memory.

    `versions`: of what is copied the name, the tensor, and how often it had been changed at the call. Whoever changes it
    without waiting would leave some of it old and some of it new; that is no snapshot.
    """
    try:
        enqueued_is_done()
        for run in runs:
            run_copy(run.pairs)
            slot.fill(run.filled)
        changed = sorted({name for name, tensor, before in versions if _version(tensor) != before})
        if changed:
            slot.forget()
            return f"changed while it was copied: {', '.join(changed[:3])}; call wait_copied() first"
        slot.complete(b"{}", upload=True)
    except Exception as error:
        slot.forget()
        return f"the copy failed: {type(error).__name__}: {error}"
    return ""
