"""The worker's half of a save: choose a slot, copy, publish. Everything after that is the keeper's.

Which slot may be overwritten follows from one fact: a rank fills a slot for step s' only after a collective of a
later step than s, and every rank completes its copy of s before it enters that collective. So the newest complete
slot is complete on every rank, and each slot but that one may be filled again, unless storage is still owed its
contents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from ftrain.checkpoint.arena import ArenaSlot, SlotHeader, SlotState, Upload
from ftrain.checkpoint.copy import CopyRun, copy_pairs, copy_runs, run_copy
from ftrain.parallel.arrays import StatePiece
from storage.compress import Compressor
from storage.pack import PackLayout

POLL_S = 0.005


def free_slot(headers: Sequence[SlotHeader]) -> int | None:
    """The slot to fill next: not the newest complete one, none that storage is owed, none held; of the rest the oldest."""
    complete = [header.step for header in headers if header.state is SlotState.COMPLETE]
    newest = max(complete, default=-1)
    candidates = [
        (header.step if header.state is SlotState.COMPLETE else -1, index)
        for index, header in enumerate(headers)
        if header.state is not SlotState.COMPLETE
        or (header.step != newest and header.upload is Upload.NONE and not header.held)
    ]
    return min(candidates)[1] if candidates else None


def is_uploading(headers: Sequence[SlotHeader]) -> bool:
    """Whether storage is still owed one of these slots."""
    return any(header.state is SlotState.COMPLETE and header.upload is Upload.WANTED for header in headers)


class Saver:
    """Copies this rank's pieces of state into its arena slots. Used by one thread; overlapped copies run on one of its own."""

    def __init__(
        self,
        slots: Sequence[tuple[str, ArenaSlot]],
        layout: PackLayout,
        *,
        identity: tuple[int, int, int, int],
        announce: Callable[[str], None],
        taken: Callable[[int, bool], None] = lambda step, upload: None,
        reached: Callable[[str, int], None] = lambda point, step: None,
        overlap: bool = False,
    ) -> None:
        """`identity`: (epoch, attempt, rank, world). When a snapshot is complete, `taken` is told the step and whether it goes
        to storage, and `announce`, last, the slot's name (for the keeper). `reached` is told named points.

        `overlap`: `save` returns at once and the copy runs beside the next forward and backward, which only read the
        weights; whoever changes the state calls `finish` first.
        """
        self._slots = slots
        self._layout = layout
        self._epoch, self._attempt, self._rank, self._world = identity
        self._announce = announce
        self._taken = taken
        self._reached = reached
        self.early = False
        """Whether `announce` is told of a snapshot that goes to storage when its copy begins, too, so that the keeper works
        behind the copy. It shortens the save, and where there is no processor for both it lengthens the copy.
        """
        self.compressor: Compressor | None = None
        """Of what goes to storage."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver") if overlap else None
        self._copying: Future[None] | None = None
        self._filling: int | None = None
        self._filling_step = 0
        self._waited_s = 0.0
        self._payloads = [slot.prepare(layout) for _, slot in slots]
        self._runs: list[list[CopyRun] | None] = [None] * len(slots)

    def forget_after(self, step: int) -> None:
        """Drop snapshots newer than the step this run goes on from: they were not complete on every rank, or were
        rolled back.
        """
        for _, slot in self._slots:
            if slot.header().step > step:
                slot.forget()

    def headers(self) -> list[SlotHeader]:
        """The headers of this rank's slots now."""
        return [slot.header() for _, slot in self._slots]

    def has_free_slot(self) -> bool:
        """Whether a snapshot could start once the copy under way, if there is one, has ended."""
        headers = [
            replace(header, state=SlotState.COMPLETE, step=self._filling_step) if index == self._filling else header
            for index, header in enumerate(self.headers())
        ]
        return free_slot(headers) is not None

    def is_uploading(self) -> bool:
        """Whether an earlier snapshot of this rank is still on its way to storage."""
        return is_uploading(self.headers())

    def wait_until_free(self, *, upload: bool, beat: Callable[[], None] = lambda: None) -> float:
        """Block until a snapshot may start; returns the seconds waited. A slow store is not a hang: `beat` is called
        meanwhile.
        """
        begin = time.monotonic()
        while not self.has_free_slot() or (upload and self.is_uploading()):
            beat()
            time.sleep(POLL_S)
        return time.monotonic() - begin

    def save(self, pieces: Sequence[StatePiece], *, step: int, upload: bool, progress: dict[str, Any]) -> None:
        """Copy `pieces` into a free slot and publish it, or start doing so. `pieces` are live views, the same every time.

        Every rank calls this after the same step, outside any collective. Raises RuntimeError if no slot is free.
        """
        self.finish()
        index = free_slot(self.headers())
        if index is None:
            raise RuntimeError(f"no arena slot is free at step {step}: wait_until_free was not called")
        runs = self._runs[index]
        if runs is None:
            stored = [piece for piece in pieces if piece.array in self._layout.specs]  # weights may be left out
            payload = self._payloads[index]
            runs = self._runs[index] = copy_runs(payload, copy_pairs(payload, self._layout, stored))
        record = msgspec.json.encode(progress)
        if self._pool is None:
            self._fill(index, runs, step, upload, record)
        else:
            self._filling, self._filling_step = index, step
            self._copying = self._pool.submit(self._fill, index, runs, step, upload, record)

    def finish(self) -> None:
        """Wait for the copy under way. Called before the state changes, and before the worker leaves."""
        if self._copying is None:
            return
        begin = time.monotonic()
        copying, self._copying, self._filling = self._copying, None, None
        copying.result()
        self._waited_s += time.monotonic() - begin

    def take_waited(self) -> float:
        """Seconds spent in `finish` since the last call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _fill(self, index: int, runs: list[CopyRun], step: int, upload: bool, record: bytes) -> None:
        name, slot = self._slots[index]
        early = self.early and upload
        slot.compress_with(self.compressor)
        slot.begin(epoch=self._epoch, attempt=self._attempt, step=step, rank=self._rank, world=self._world, upload=early)
        if early:
            self._announce(name)
        half = len(runs) // 2
        _copy(slot, runs[:half])
        self._reached("copy", step)
        _copy(slot, runs[half:])
        slot.complete(record, upload=upload)
        self._taken(step, upload)
        self._announce(name)


def _copy(slot: ArenaSlot, runs: Sequence[CopyRun]) -> None:
    for run in runs:
        run_copy(run.pairs)
        slot.fill(run.filled)
