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
    """Of one slot: the views to copy between at once, and those that may be later. Valid for these very pieces."""

    pieces: Sequence[StatePiece | None]
    put_off: Sequence[bool]
    groups: dict[tuple[int, ...], list[CopyPair]]
    """Of what is copied at once, by the parts that are in it."""
    now: list[list[CopyPair]]
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
        self._copying: Future[None] | None = None
        self._due: Callable[[], str] | None = None
        self._filled = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the slots."""
        return tuple(self.fds)

    @property
    def copying(self) -> bool:
        """Whether nobody has waited yet for the end of a copy that was put off."""
        return self._copying is not None

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

    def fill(
        self, pieces: Sequence[StatePiece], step: int, put_off: Sequence[bool], watched: Sequence[tuple[str, torch.Tensor]]
    ) -> str:
        """Copy the pieces into a free slot and publish it; returns its name. Those `put_off` are copied between `go_on` and
        `finish`, and the slot completes itself. `watched`: the tensors that they are of, whose changes are counted.
        """
        index = free_slot([slot.header() for slot in self._slots])
        assert index is not None, "wait_free comes first"
        assert self._copying is None, "finish comes first"
        self._filled = index
        slot, start = self._slots[index], self._start
        copies = self._copies_of(index, pieces, put_off)
        slot.compress_with(start.compressor)
        slot.begin(
            epoch=start.epoch, attempt=start.attempt, step=step, rank=start.rank, world=start.world, upload=bool(copies.later)
        )
        try:
            for pairs in copies.now:
                run_copy(pairs)
            if copies.later:
                done = enqueued(_device_of(pieces))
                versions = [_version(tensor) for _, tensor in watched]
                self._due = partial(_copy_later, slot, copies.later, done, watched, versions)
            else:
                slot.complete(b"{}", upload=True)
        except BaseException:  # an interrupt, too: nobody will come back to it
            slot.forget()
            raise
        return self.names[index]

    def go_on(self, announce: Callable[[], bool], over: Callable[[str], None]) -> None:
        """Begin with what was put off. On the copy's thread `announce` is called before, and says whether the slot is wanted at
        all; `over` when all is copied, with what went wrong, if anything: then the slot means nothing.
        """
        assert self._due is not None, "fill comes first"
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="ftrain-copy")
        self._copying, self._due = self._pool.submit(self._beside, self._due, announce, over), None

    def _beside(self, copy: Callable[[], str], announce: Callable[[], bool], over: Callable[[str], None]) -> None:
        if announce():
            over(copy())
        else:
            self.give_back()

    def give_back(self) -> None:
        """What was filled is not wanted after all."""
        self._due = None
        self._slots[self._filled].forget()

    def finish(self) -> None:
        """Wait for what is still being copied.

        Safe from several threads: none of them returns before the copy is over.
        """
        copying = self._copying
        if copying is not None:
            try:
                copying.result()
            finally:
                self._copying = None

    def _copies_of(self, index: int, pieces: Sequence[StatePiece], put_off: Sequence[bool]) -> Copies:
        """The views to copy between: as the last time, but of pieces that are other ones."""
        known = self._copies[index]
        if known is not None and known.pieces is pieces and known.put_off is put_off:
            return known
        if not self._pinned:
            self._pinned = True
            for payload in self._payloads:
                pin(payload, _device_of(pieces))
        if known is None or list(known.put_off) != list(put_off):
            known = Copies([None] * len(pieces), put_off, {}, [], [])
        moved = {part for part, (piece, before) in enumerate(zip(pieces, known.pieces, strict=True)) if piece is not before}
        groups = {
            parts: known.groups[parts]
            if parts in known.groups and moved.isdisjoint(parts)
            else self._pairs(index, pieces, parts)
            for parts in _groups(pieces, put_off)
        }
        host = [pair for parts, pairs in groups.items() if _on_host(pieces[parts[0]]) for pair in pairs]
        others = [pairs for parts, pairs in groups.items() if not _on_host(pieces[parts[0]])]
        later = known.later
        if any(put_off[part] for part in moved):
            later = copy_runs(self._payloads[index], self._pairs(index, pieces, [p for p, off in enumerate(put_off) if off]))
        copies = self._copies[index] = Copies(pieces, put_off, groups, [host, *others], later)
        return copies

    def _pairs(self, index: int, pieces: Sequence[StatePiece], chosen: Sequence[int]) -> list[CopyPair]:
        parts = tuple(self._layout.parts[part] for part in chosen)
        layout = PackLayout(self._layout.specs, parts, self._layout.nbytes)
        return copy_pairs(self._payloads[index], layout, [pieces[part] for part in chosen])

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


def _groups(pieces: Sequence[StatePiece], put_off: Sequence[bool]) -> list[tuple[int, ...]]:
    """The parts that are copied at once, each for itself, so that one of them may be another tensor each time. Those that cross
    a bus are one group: they share a staging buffer.
    """
    at_once = [part for part, off in enumerate(put_off) if not off]
    host: list[tuple[int, ...]] = [(part,) for part in at_once if _on_host(pieces[part])]
    others = tuple(part for part in at_once if not _on_host(pieces[part]))
    return [*host, others] if others else host


def _on_host(piece: StatePiece) -> bool:
    return piece.tensor.device.type == "cpu"


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
    watched: Sequence[tuple[str, torch.Tensor]],
    versions: Sequence[int],
) -> str:
    """Copy and complete; returns what went wrong: an exception would keep this frame, and with it the slot's memory.

    `versions`: how often each of the `watched` tensors had been changed at the call. Whoever changes one without waiting would
    leave some of it old and some of it new; that is no snapshot.
    """
    try:
        enqueued_is_done()
        for run in runs:
            run_copy(run.pairs)
            slot.fill(run.filled)
        before = zip(watched, versions, strict=True)
        changed = sorted({name for (name, tensor), version in before if _version(tensor) != version})
        if changed:
            slot.forget()
            return f"changed while it was copied: {', '.join(changed[:3])}; call wait_copied() first"
        slot.complete(b"{}", upload=True)
    except Exception as error:
        slot.forget()
        return f"the copy failed: {type(error).__name__}: {error}"
    return ""
