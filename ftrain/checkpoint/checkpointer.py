"""`ftrain.Checkpointer`: the face of all this for somebody else's training loop.

    checkpointer = ftrain.Checkpointer("runs/mine")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(checkpointer.load(state) + 1, steps + 1):
        ...
        if step % 100 == 0:
            checkpointer.save(step, state)
    checkpointer.close()

`save` costs the copy of this rank's share into memory that is used again and again, and with `overlap=True` not even that; a
process of its own does the rest. `load` finds the newest checkpoint that is whole, whoever wrote it under whatever layout, and
proves that what is live now is what was saved.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ftrain.checkpoint.beside import Beside, Overlap
from ftrain.checkpoint.known import Known
from ftrain.checkpoint.pieces import Holding, Pieces, holdings_of, plan
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.record import encoded, merged
from ftrain.checkpoint.script_link import Keepers, SaveError
from ftrain.checkpoint.script_load import check_state, load_newest, stored_until, take_epoch
from ftrain.checkpoint.script_messages import CommitDone
from ftrain.checkpoint.script_options import checked_options
from ftrain.checkpoint.script_save import ALONE, BUSY, Save, Vote, checked_step
from ftrain.checkpoint.script_slots import ScriptSlots
from ftrain.checkpoint.state import Flat, flatten
from ftrain.supervised import StateStored, reporter
from storage.objects import ObjectStore, open_store

log = logging.getLogger("ftrain.checkpoint")


class Checkpointer:
    """Checkpoints of one run. Made by all ranks together, after the process group; one thread. To be read: `committed`, the
    newest step that is known to be in storage (rank 0; elsewhere what was loaded), and `passed_over`, (step, why) of newer
    checkpoints that the last `load` could not use.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
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

        Raises ValueError for an argument that is not allowed, naming it.
        """
        given = checked_options(
            url,
            when_busy=when_busy,
            on_error=on_error,
            keep=(keep_last, keep_every),
            upload_mib_s=upload_mib_s,
            compression=compression,
            overlap=overlap,
        )
        self.url, self._skips, self._raises = given.url, given.skips, given.raises
        self._ranks = Ranks()
        self._store: ObjectStore = open_store(self.url)
        self._start = given.keeper_start(self._ranks.rank, self._ranks.world)
        self._keepers = Keepers(self._start)
        self._failed, self._refused = list[str](), ""  # not raised yet; said last (rank 0 hears of its share and of the whole)
        self._slots: ScriptSlots | None = None
        self._pieces: Pieces | None = None  # of the state that the slots are for
        self._known, self._generation = Known(), 0  # the latter of the slots
        self._beside, self._closed = Beside(given.overlap, self.wait_copied), False
        self._newest, self._saved_any, self._careful = 0, False, False
        self.committed: int | None = None
        self.passed_over: tuple[tuple[int, str], ...] = ()

    # -- load ------------------------------------------------------------------------------------------------------------

    def load(self, state: Mapping[str, Any], *, step: int | None = None, strict: bool = True) -> int:
        """Fill `state` in place from the newest checkpoint (or that of `step`); returns its step, 0 if there is none.

        Every rank calls it, with a state of the same structure in whatever layout it has now. Damaged checkpoints are passed
        over. Raises StateError if the state does not fit (then nothing was changed; `strict=False` loads what does), or is one
        that `save` would refuse, also where there is nothing to load; NoCheckpoint if there are checkpoints and none can be
        read. Later steps than the loaded one cease to exist: this run goes on from here. What this object has saved is waited
        for first.
        """
        self._check_open()
        check_state(state, self._ranks)
        self._known.look()
        self._beside.watch(state, self._known)
        if self._saved_any:
            self.wait()
        loaded, without = load_newest(self._store, state, self._ranks, step=step, strict=strict)
        self.passed_over = tuple(sorted(without.items(), reverse=True))
        self._take_epoch(loaded)
        self.committed, self._newest, self._saved_any = loaded, loaded or 0, False
        found = reporter()
        if found is not None:
            again = found.attempt > 0 and self._ranks.rank == 0
            found.loaded(self._newest, stored_until(self._store, self._newest) if again else ())
        return self._newest

    def _take_epoch(self, starts_from: int | None) -> None:
        """From here on this run's history is what these ranks write."""
        self._keepers.close()
        if self._slots is not None:  # they belong to the epoch before
            self._slots.close()
            self._slots, self._pieces, self._generation = None, None, self._generation + 1
        epoch, attempt = take_epoch(self._store, self._ranks, starts_from)
        self._start = msgspec.structs.replace(self._start, epoch=epoch, attempt=attempt)
        self._keepers = Keepers(self._start)

    # -- save ------------------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> float:
        """Copy this rank's share of `state`, and have it stored; returns the seconds that this took from the training loop.

        With `overlap` the copy may go on after that (`wait_copied`). Every rank calls it after the same step, with the state of
        `load`. `step` is the number of finished steps and grows. The checkpoint exists when all ranks' shares are stored;
        `wait` waits for that. What is wrong on one rank is raised on all, and none has begun then: SaveError if an earlier save
        has failed (with `on_error="raise"`) or nobody is left to store this one, ValueError for a step that cannot come now,
        StateError (a SaveError on the other ranks) for a state that cannot be saved. With `overlap` the others do not wait to
        hear of it: that save fails on them as one that could not be stored does.
        """
        begin = time.monotonic()
        self._check_open()
        if self._start.epoch < 0:
            raise SaveError("call load(state) first: it says from where this run goes on, also when there is nothing to load")
        self.wait_copied()
        save = self._begin(step, state)
        try:
            if self._settle(save):
                self._publish(save)
        finally:
            self._give_back(save)  # if it was filled, and not published
        seconds = time.monotonic() - begin
        found = reporter()
        if found is not None:
            found.saved(seconds)
        return seconds

    def _begin(self, step: int, state: Mapping[str, Any]) -> Save:
        """This rank's part in a save. Whatever is wrong with it: the others must not wait for this rank."""
        save = Save(before=self._newest)
        try:
            save.step = checked_step(step, self._newest if self._saved_any else -1)
            self._known.look()
            save.later = self._beside.watch(state, self._known)
            self._hear()
            self._refused = "" if self._refused.startswith(f"step {step} ") else self._refused  # it may fail once more
            self._keepers.link()
            save.flat = flatten(state, self._ranks.rank, self._known)
            save.record = encoded(save.flat.record)
            save.fits = self._pieces is not None and self._pieces.fits(save.flat)
        except Exception as error:
            save.problem = error
        return save

    def _settle(self, save: Save) -> bool:
        """Whether the save takes place, as all ranks see it; if it does, a slot is filled, or begun to be.

        What they must agree about is one collective, and the copy runs beside it: mostly all is well.
        """
        free = self._slots is not None and self._slots.has_free()
        failed = save.problem is not None or (self._raises and bool(self._failed))
        if save.fits and free and not failed and save.later is not None and not self._careful:
            self._fill(save)
            if save.slot and save.overlaps:
                return True  # the thread that copies asks the others
        busy = self._skips and self._slots is not None and not free
        votes = self._ranks.largest(Vote(failed, not save.fits, busy, 0, save.step, -save.step))
        if save.fits and free and not (save.slot or save.broken):
            self._fill(save)
        vote, save.agreed = Vote(*votes()), True
        if not vote.clear:
            self._give_back(save)
        if vote.failed:
            self._agree(save.problem)
        if vote.steps_differ:
            raise ValueError(vote.steps_differ)
        if vote.changed and vote.ahead:
            self._careful = True
            self._refuse(save.step, ALONE)
            return False
        if vote.changed:
            self._replan(save.flat)
        elif vote.busy:
            log.warning(BUSY, save.step)
            return False
        if not (save.slot or save.broken):
            self._wait_free()
            self._fill(save)
        return True

    def _asked(self, save: Save) -> bool:
        """On the thread that copies: whether the save takes place, of which this rank has no doubt. Nobody is planned anew for
        then: what was not put off may have changed by now. A save that does not take place is a failed one, on all ranks.
        """
        vote = Vote(*self._ranks.largest(Vote(0, 0, 0, 1, save.step, -save.step))())
        if vote.failed:
            self._refuse(save.step, self._ranks.agreed(None) or "")
        elif vote.steps_differ:
            self._refuse(save.step, vote.steps_differ)
        elif vote.changed:
            self._careful = True
            self._refuse(save.step, ALONE)
        elif vote.busy:
            log.warning(BUSY, save.step)
        return vote.clear

    def _refuse(self, step: int, why: str) -> None:
        text = f"step {step} is not saved: {why}"
        if text == self._refused:
            return
        self._refused = text
        log.error("%s", text)
        self._failed += [text] if self._raises else []

    def _wait_free(self) -> None:
        assert self._slots is not None
        while not self._slots.wait_free(1.0):
            self._hear()
            self._keepers.link()

    def _fill(self, save: Save) -> None:
        assert self._slots is not None
        assert self._pieces is not None
        try:
            put_off = self._pieces.put_off(save.flat, save.later)
            save.slot = self._slots.fill(self._pieces.of(save.flat), save.step, put_off.parts, put_off.watched)
            save.overlaps = True in put_off.parts
        except Exception as error:
            save.broken = error

    def _give_back(self, save: Save) -> None:
        if save.slot and self._slots is not None:
            self._slots.give_back()
        save.slot, save.broken = "", None

    def _publish(self, save: Save) -> None:
        """Have it stored, and if something is to be copied yet, begin with that. What is said about an overlapped copy is said
        by the thread that copies: until `wait_copied` nobody else speaks to the keeper.
        """
        assert self._slots is not None
        self._newest, self._saved_any = save.step, True
        link, step, record = self._keepers.link(), save.step, save.record
        if save.broken is not None:
            name = self._slots.names[0]
            link.saved(name, step, record)
            link.copied(name, step, f"the copy failed: {type(save.broken).__name__}: {save.broken}")
            raise save.broken
        name, save.slot = save.slot, ""

        def announce() -> bool:
            if save.agreed or self._asked(save):
                link.saved(name, step, record)
                return True
            self._newest = save.before  # so it can be saved yet
            return False

        if save.overlaps:
            self._slots.go_on(announce, lambda problem: link.copied(name, step, problem))
        else:
            link.saved(name, step, record)

    def wait_copied(self) -> float:
        """With `overlap`: wait until the copy that the last save began is over; from then on the state may be changed. Returns
        the seconds that it waited. Nothing to wait for: it returns at once.
        """
        if self._slots is None or not self._slots.copying:
            return 0.0
        begin = time.monotonic()
        self._slots.finish()  # what went wrong comes back as the keeper's answer to this save, where all ranks are told
        seconds = time.monotonic() - begin
        found = reporter()
        if found is not None:
            found.saved(seconds)
        return seconds

    def _replan(self, flat: Flat) -> None:
        """Share the state out anew. A collective; what goes wrong on one rank is raised on all."""
        held, problem = list[Holding](), None
        try:
            held = holdings_of(flat)
        except Exception as error:
            problem = error
        self._raise_together(problem)
        records = [msgspec.json.decode(each) for each in self._ranks.gather(msgspec.json.encode(flat.record))]
        merged(records)  # raises StateError, the same on all ranks, if they differ where they may not
        made = plan(flat, held, self._ranks)
        self._let_go_slots()
        try:
            self._slots = ScriptSlots(made.layout, self._start, generation=self._generation)
            self._keepers.adopt(self._slots.fds)
        except Exception as error:
            problem = error
        self._raise_together(problem)
        self._pieces = Pieces(made)
        self._careful = self._careful or self._ranks.alone or any(leaf.varies for leaf in flat.leaves)

    def _let_go_slots(self) -> None:
        """When the keeper has nothing left to do with them."""
        self._pieces = None
        if self._slots is not None:
            self._keepers.forget(self._slots.names)
            self._slots.close()
            self._slots, self._generation = None, self._generation + 1

    # -- what came of it -------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take in what the keeper has said; what failed is remembered, if it is to be raised."""
        for message in self._keepers.news():
            if message.error:
                self._refuse(message.step, message.error)
            elif isinstance(message, CommitDone):
                self.committed = message.step
            self._tell_supervisor(message)

    def _raise_together(self, problem: Exception | None) -> None:
        """Raise on all ranks if there is a problem on one of them: a rank that left alone would leave the others in a
        collective. A collective itself.
        """
        if self._ranks.largest([problem is not None])()[0]:
            self._agree(problem)

    def _agree(self, problem: Exception | None) -> None:
        """Raise this rank's problem, or SaveError with another one's, or with what has failed earlier on one of them. A
        collective.
        """
        failed, self._failed = self._failed, []
        said = self._ranks.agreed("; ".join([*failed, *([str(problem)] if problem is not None else [])]) or None)
        if problem is not None:
            raise problem
        if said is not None:
            raise SaveError(said)

    def _tell_supervisor(self, message: object) -> None:
        found = reporter()
        if found is not None and isinstance(message, CommitDone):
            done = message
            found.send(StateStored(step=done.step, t=time.time(), nbytes=done.nbytes, seconds=done.seconds, error=done.error))

    def wait(self) -> int | None:
        """Wait until everything saved is in storage, on all ranks; returns the newest committed step.

        Raises SaveError on all ranks if something could not be stored (with `on_error="raise"`), or if there is nobody left who
        could tell.
        """
        self.wait_copied()
        problem = None
        try:
            self._keepers.wait()
        except SaveError as error:
            problem = error
        self._hear()
        self._agree(problem)
        self.committed = msgspec.msgpack.decode(self._ranks.first_says(msgspec.msgpack.encode(self.committed)))
        return self.committed

    def _check_open(self) -> None:
        if self._closed:
            raise SaveError("this Checkpointer is closed: close() comes after the last save; for another run make another one")

    def close(self) -> None:
        """Wait for what is on its way, then give everything back. All ranks call it, before the process group is destroyed."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._beside.close()
            self._keepers.close()
            if self._slots is not None:
                self._slots.close()
            self._slots, self._pieces, self._known = None, None, Known()
            self._ranks.close()
            self._store.close()
