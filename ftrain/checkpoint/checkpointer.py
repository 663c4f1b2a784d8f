"""`ftrain.Checkpointer`: the face of all this for somebody else's training loop.

    checkpointer = ftrain.Checkpointer("runs/mine")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(checkpointer.load(state) + 1, steps + 1):
        ...
        if step % 100 == 0:
            checkpointer.save(step, state)
    checkpointer.close()

`save` costs the copy of this rank's share into memory that is used again and again, and with `overlap=True` not even that; a
process of its own does the rest. `load`
finds the newest checkpoint that is whole, whoever wrote it under whatever layout, and proves that what is live now is what was
saved.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ftrain.checkpoint.beside import Beside, Later, Overlap
from ftrain.checkpoint.pieces import Plan, holdings_of, plan, signature
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.record import merged
from ftrain.checkpoint.script_link import KeeperLink
from ftrain.checkpoint.script_load import load_newest
from ftrain.checkpoint.script_messages import CommitDone, KeeperStart
from ftrain.checkpoint.script_slots import ScriptSlots
from ftrain.checkpoint.state import Flat, flatten
from ftrain.supervised import StateStored, reporter
from storage.compress import compressor_named
from storage.objects import ObjectStore, open_store
from storage.run import RunStore

log = logging.getLogger("ftrain.checkpoint")

RUN = "FTRAIN_RUN"
LEVEL = 5  # of compression: a higher one takes longer and saves nothing on numbers
LIVES = 3  # keepers in a row that may die without having finished anything


class SaveError(RuntimeError):
    """A checkpoint could not be stored; training could go on."""


class Checkpointer:
    """Checkpoints of one run. Made by all ranks together, after the process group; one thread."""

    def __init__(
        self,
        url: str | None = None,
        *,
        when_busy: Literal["wait", "skip"] = "wait",
        on_error: Literal["log", "raise"] = "log",
        keep_last: int = 0,
        keep_every: int = 0,
        upload_mib_s: float = 0.0,
        compression: Literal["none", "lz4", "zstd"] = "none",
        overlap: Overlap = False,
    ) -> None:
        """`url`: a folder or an object store's URL (default: the run of `ftrain supervise`).

        `when_busy`: what a save does while two earlier ones are still on their way. `on_error`: whether a save that failed
        raises at the next call. `keep_last`, `keep_every` (steps): what is kept; with neither, everything is.
        `upload_mib_s`: limit of a rank's upload. `compression`: without loss, for a slow link (guides/s3.md).

        `overlap`: `save` returns before the copy of what only the state's optimizers change (their parameters and their state),
        and their next step waits for it; whoever else changes these calls `wait_copied` first, or that save fails. "manual":
        before the copy of everything, and only `wait_copied` (and an optimizer of the state, if there is one) waits.
        """
        given = url if url is not None else os.environ.get(RUN, "")
        if not given:
            raise ValueError(f"where to? Checkpointer(url), or the variable {RUN}, which `ftrain supervise` sets")
        self.url = given if "://" in given else str(Path(given).expanduser().absolute())
        self._when_busy, self._on_error = when_busy, on_error
        self._ranks = Ranks()
        self._store: ObjectStore = open_store(self.url)
        self._start = KeeperStart(
            url=self.url,
            rank=self._ranks.rank,
            world=self._ranks.world,
            epoch=-1,
            upload_mib_s=upload_mib_s,
            compressor=compressor_named(compression, LEVEL),
            keep_last=keep_last,
            keep_every=keep_every,
        )
        self._keeper: KeeperLink | None = None
        self._failed: list[str] = []  # what has not been raised yet
        self._deaths = 0  # of keepers, since one of them has finished something
        self._slots: ScriptSlots | None = None
        self._plan: Plan | None = None
        self._beside, self._closed = Beside(overlap, self.wait_copied), False
        self._copying: tuple[str, int] | None = None  # slot and step
        self._thread = threading.get_ident()
        self._newest, self._saved_any = 0, False
        self.committed: int | None = None
        """The newest step that is known to be in storage (rank 0; elsewhere what was loaded)."""
        self.passed_over: tuple[tuple[int, str], ...] = ()
        """Newer checkpoints that the last load could not use, and why."""

    # -- load ------------------------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any], *, step: int | None = None, strict: bool = True) -> int:
        """Fill `state` in place from the newest checkpoint (or that of `step`); returns its step, 0 if there is none.

        Every rank calls it, with a state of the same structure in whatever layout it has now. Damaged checkpoints are passed
        over. Raises StateError if the state does not fit (then nothing was changed; `strict=False` loads what does),
        NoCheckpoint if there are checkpoints and none can be read. Later steps than the loaded one cease to exist: this run
        goes on from here. What this object has saved is waited for first.
        """
        self._beside.watch(state)
        if self._saved_any:
            self.wait()
        loaded, without = load_newest(self._store, state, self._ranks, step=step, strict=strict)
        self.passed_over = tuple(sorted(without.items(), reverse=True))
        self._take_epoch(loaded)
        self.committed, self._newest, self._saved_any = loaded, loaded or 0, False
        found = reporter()
        if found is not None:
            found.loaded(loaded or 0)
        return loaded or 0

    def _take_epoch(self, starts_from: int | None) -> None:
        """From here on this run's history is what these ranks write."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        if self._slots is not None:  # they belong to the epoch before
            self._slots.close()
            self._slots, self._plan = None, None
        said, problem = b"", None
        if self._ranks.rank == 0:
            try:
                epoch = RunStore(self._store).take_epoch(
                    owner={"pid": os.getpid(), "host": os.uname().nodename}, starts_from=starts_from
                )
                said = msgspec.msgpack.encode(epoch)
            except Exception as error:
                problem = error
        told = self._ranks.first_says(said)
        if problem is not None:
            raise problem
        if not told:
            raise SaveError("rank 0 could not take over the run; its own error says why")
        self._start = msgspec.structs.replace(self._start, epoch=msgspec.msgpack.decode(told, type=int))

    # -- save ------------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> float:
        """Copy this rank's share of `state`, and have it stored; returns the seconds that this took from the training loop.

        With `overlap` the copy may go on after that (`wait_copied`). Every rank calls it after the same step, with the state of
        `load`. `step` is the number of finished steps and grows. The checkpoint exists when all ranks' shares are stored;
        `wait` waits for that. Raises SaveError on all ranks if an earlier save has failed on one of them (with
        `on_error="raise"`), StateError if `overlap` has nobody who could wait.
        """
        begin = time.monotonic()
        if self._start.epoch < 0:
            raise SaveError("call load(state) first: it says from where this run goes on, also when there is nothing to load")
        if step <= self._newest and self._saved_any:
            raise ValueError(f"step {step} comes after step {self._newest}: steps grow, and `load` is what goes back")
        later = self._beside.watch(state)
        self.wait_copied()
        self._hear()
        self._keep_alive()
        if self._on_error == "raise":
            self._agree()
        flat = flatten(state, self._ranks.rank)
        slots = self._ready_for(flat)
        busy = not slots.has_free()
        if self._when_busy == "skip" and self._ranks.any(busy):
            log.warning("step %d is not saved: two earlier saves are still on their way", step)
            return time.monotonic() - begin
        while not slots.wait_free(1.0):
            self._hear()
            self._keep_alive()
        self._copy(slots, flat, step, later)
        seconds = time.monotonic() - begin
        found = reporter()
        if found is not None:
            found.saved(seconds)
        return seconds

    def _copy(self, slots: ScriptSlots, flat: Flat, step: int, later: Later | None) -> None:
        """Fill a slot, or begin to, and say so."""
        assert self._plan is not None
        self._newest, self._saved_any, self._thread = step, True, threading.get_ident()
        holdings = self._plan.holdings(flat)
        parts = [holdings[index].leaf.tensor for index, _ in self._plan.parts]
        put_off = [tensor if later is not None and later(tensor) else None for tensor in parts]
        name = slots.fill(self._plan.pieces(holdings), step, put_off)
        self._copying = (name, step) if any(tensor is not None for tensor in put_off) else None
        self._link().saved(name, step, msgspec.json.encode(flat.record))
        slots.go_on()  # last, so that the copy's thread does not take turns with this one

    def wait_copied(self) -> float:
        """With `overlap`: wait until the copy that the last save began is over; from then on the state may be changed. Returns
        the seconds that it waited. Nothing to wait for: it returns at once.
        """
        begin = time.monotonic()
        if self._copying is None or self._slots is None:
            return 0.0
        error = self._slots.finish()  # it comes back as the keeper's answer to this save, where all ranks are told
        if threading.get_ident() == self._thread:  # backward may step optimizers on other threads; the channel is for one
            (name, step), self._copying = self._copying, None
            if self._keeper is not None:
                self._keeper.copied(name, step, error)
        seconds = time.monotonic() - begin
        found = reporter()
        if found is not None:
            found.saved(seconds)
        return seconds

    def _ready_for(self, flat: Flat) -> ScriptSlots:
        """Memory for this state; planned anew, by all ranks together, when its structure has changed on one of them."""
        changed = self._plan is None or self._plan.signature != signature(flat)
        if self._ranks.any(changed):
            self._replan(flat)
        assert self._slots is not None
        return self._slots

    def _replan(self, flat: Flat) -> None:
        records = [msgspec.json.decode(each) for each in self._ranks.gather(msgspec.json.encode(flat.record))]
        merged(records)  # raises StateError, the same on all ranks, if they differ where they may not
        self._plan = plan(flat, holdings_of(flat), self._ranks)
        if self._slots is not None:
            self._wait_parts()
            if self._keeper is not None:
                self._keeper.forget(self._slots.names)
            self._slots.close()
        generation = self._slots.generation + 1 if self._slots is not None else 0
        self._slots = ScriptSlots(self._plan.layout, self._start, generation=generation)
        if self._keeper is not None:  # one that is yet to be started gets them then
            self._keeper.adopt(self._slots.fds)

    def _link(self) -> KeeperLink:
        """The keeper, started when it is first needed, and again if it died: the slots know what is still owed."""
        self._keep_alive()
        if self._keeper is None:
            self._keeper = KeeperLink(self._start)
            if self._slots is not None:
                self._keeper.adopt(self._slots.fds)
        return self._keeper

    def _keep_alive(self) -> None:
        """Replace a keeper that died. Raises SaveError if that has not helped several times in a row."""
        if self._keeper is None or self._keeper.alive:
            return
        self._deaths += 1
        if self._deaths > LIVES:
            raise SaveError(f"{LIVES} keeper processes in a row died (status {self._keeper.status}); their words are in stderr")
        log.warning("the keeper process died (status %s); another one is started", self._keeper.status)
        dead, self._keeper = self._keeper, KeeperLink(self._start)
        self._keeper.take_over(dead, self._slots.fds if self._slots is not None else {})

    # -- what came of it -------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take in what the keeper has said; what failed is remembered, if it is to be raised."""
        if self._keeper is None:
            return
        for message in self._keeper.news():
            self._deaths = 0
            if message.error:
                text = f"step {message.step} is not saved: {message.error}"
                log.error("%s", text)
                self._failed += [text] if self._on_error == "raise" else []
            elif isinstance(message, CommitDone):
                self.committed = message.step
            self._tell_supervisor(message)

    def _agree(self, problem: str = "") -> None:
        """Raise SaveError on all ranks if something has failed on one of them: a rank that left alone would leave the others in
        a collective. A collective itself.
        """
        failed, self._failed = [*self._failed, *([problem] if problem else [])], []
        said = self._ranks.agreed("; ".join(failed) or None)
        if said is not None:
            raise SaveError(said)

    def _tell_supervisor(self, message: object) -> None:
        found = reporter()
        if found is not None and isinstance(message, CommitDone):
            done = message
            found.send(StateStored(step=done.step, t=time.time(), nbytes=done.nbytes, seconds=done.seconds, error=done.error))

    def _wait_parts(self) -> None:
        while self._keeper is not None and self._keeper.owes_parts:
            self._keep_alive()
            self._keeper.listen(1.0)
        self._hear()

    def wait(self) -> int | None:
        """Wait until everything saved is in storage, on all ranks; returns the newest committed step.

        Raises SaveError on all ranks if something could not be stored (with `on_error="raise"`), or if there is nobody left who
        could tell.
        """
        self.wait_copied()
        problem = ""
        try:
            while self._keeper is not None and self._keeper.owes:
                self._keep_alive()
                self._keeper.listen(1.0)
        except SaveError as error:
            problem = str(error)
        self._hear()
        self._agree(problem)
        self.committed = msgspec.msgpack.decode(self._ranks.first_says(msgspec.msgpack.encode(self.committed)))
        return self.committed

    def close(self) -> None:
        """Wait for what is on its way, then give everything back. All ranks call it, before the process group is destroyed."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._beside.close()
            if self._keeper is not None:
                self._keeper.close()
                self._keeper = None
            if self._slots is not None:
                self._slots.close()
                self._slots = None
            self._ranks.close()
            self._store.close()
