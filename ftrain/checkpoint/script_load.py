"""The newest checkpoint that all ranks of a script can load, and the proof that they have.

Ranks go through the same candidates together: what is damaged for one of them is damaged for all, and the next older one is
tried. Trouble with the store itself is nobody's damage; it is raised, on every rank, so that none waits for another.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ftrain.checkpoint.bind import binder_of
from ftrain.checkpoint.pieces import holdings_of
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.record import StateError, encoded
from ftrain.checkpoint.script_link import SaveError
from ftrain.checkpoint.script_messages import RECORD
from ftrain.checkpoint.state import flatten
from ftrain.supervised import Commit, reporter
from storage.catalog import CheckpointState
from storage.checkpoint import Checkpoint
from storage.errors import CoverageError, Damaged, FormatError, NoCheckpoint, ObjectMissing, StorageError
from storage.objects import ObjectStore
from storage.run import RunStore

log = logging.getLogger("ftrain.checkpoint")

MOST_TOLD = 64

BAD = (Damaged, FormatError, CoverageError, ObjectMissing, NoCheckpoint)


def check_state(state: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise StateError, on all ranks, if `save` would refuse the state on one of them. A collective; copies nothing.

    Objects that have a `state_dict` (loaders, schedules) are taken at their word: asking them before anything is loaded may
    start a loader's processes, or draw from a random generator. Nor are the ranks' values compared: the first save does that.
    """
    problem = None
    try:
        if not isinstance(state, dict):
            raise StateError(f"the state is a {type(state).__name__}: it is filled in place, so it must be a dict")
        flat = flatten(state, ranks.rank, asks=False)
        encoded(flat.record)
        holdings_of(flat)
    except Exception as error:
        problem = error
    said = ranks.agreed(str(problem) if problem is not None else None)
    if problem is not None and not isinstance(problem, StateError):
        raise problem  # a module's own, say
    if said is not None:
        raise StateError(f"this state could not be saved ({said}); nothing was loaded") from problem


def load_newest(
    store: ObjectStore, state: Mapping[str, Any], ranks: Ranks, *, step: int | None, strict: bool
) -> tuple[int | None, dict[int, str]]:
    """Fill `state`; the step (None: there is no checkpoint), and which were passed over and why. A collective."""
    without: dict[int, str] = {}
    while (chosen := _choose(store, ranks, step, without)) is not None:
        problem = _load(store, chosen, state, ranks, strict)
        if problem is None:
            return chosen, without
        if step is not None:
            raise Damaged(f"the checkpoint of step {step} cannot be loaded: {problem}")
        if ranks.rank == 0:
            log.warning("the checkpoint of step %d is passed over: %s", chosen, problem)
        without[chosen] = problem
    return None, without


def take_epoch(store: ObjectStore, ranks: Ranks, starts_from: int | None) -> tuple[int, int]:
    """Take over the run, which goes on from this step (None: from the beginning); the epoch, and which attempt of a supervised
    run this is. A collective; SaveError on all ranks, or on rank 0 its own error, if that is impossible.
    """
    said, problem = b"", None
    if ranks.rank == 0:
        try:
            owner = {"pid": os.getpid(), "host": os.uname().nodename}
            epoch = RunStore(store).take_epoch(owner=owner, starts_from=starts_from)
            said = msgspec.msgpack.encode((epoch, found.attempt if (found := reporter()) is not None else 0))
        except Exception as error:
            problem = error
    told = ranks.first_says(said)
    if problem is not None:
        raise problem
    if not told:
        raise SaveError("rank 0 could not take over the run; its own error says why")
    return msgspec.msgpack.decode(told, type=tuple[int, int])


def stored_until(store: ObjectStore, step: int) -> tuple[Commit, ...]:
    """The newest checkpoints up to `step` that count, in their order. Nobody has said so of those that a dead attempt's keeper
    has committed; where the store cannot be asked just now, nobody will.
    """
    try:
        found = [info for info in RunStore(store).checkpoints() if info.step <= step and info.state is CheckpointState.VALID]
    except StorageError:
        return ()
    return tuple((info.step, info.attempt, info.nbytes) for info in found[-MOST_TOLD:])


def _choose(store: ObjectStore, ranks: Ranks, step: int | None, without: dict[int, str]) -> int | None:
    """What all ranks try next, by rank 0's choice: a commit may land while others look. None: there has never been one."""
    chosen, refusal, fault = -1, "", ""
    if ranks.rank == 0:
        run = RunStore(store)
        try:
            chosen, refusal = _newest(run, step, without)
        except StorageError as error:
            fault = f"{type(error).__name__}: {error}"
    said = ranks.first_says(msgspec.msgpack.encode((chosen, refusal, fault)))
    chosen, refusal, fault = msgspec.msgpack.decode(said, type=tuple[int, str, str])
    if fault:
        raise StorageError(fault)
    if refusal:
        raise NoCheckpoint(refusal)
    return chosen if chosen >= 0 else None


def _newest(run: RunStore, step: int | None, without: dict[int, str]) -> tuple[int, str]:
    try:
        found = run.open(step, without=without)
    except BAD as error:
        known = (CheckpointState.VALID, CheckpointState.DAMAGED)
        nothing = step is None and not any(info.state in known for info in run.checkpoints())
        return -1, "" if nothing else str(error)
    without.update(dict(found.passed_over))
    return found.step, ""


def _load(store: ObjectStore, step: int, state: Mapping[str, Any], ranks: Ranks, strict: bool) -> str | None:
    """Load it; what is wrong with it, or None. Raises StateError on all ranks if the state does not fit."""
    opened: list[Checkpoint] = []
    problem = together(ranks, lambda: opened.append(RunStore(store).open(step)))
    if problem is not None:
        return problem
    (checkpoint,) = opened
    record = checkpoint.progress.get(RECORD)
    if record is None:
        raise StateError(f"{store.url} holds checkpoints of `ftrain run`, not of a Checkpointer: give it a folder of its own")
    binder = binder_of(checkpoint, state, ranks, strict=strict)
    apply: Callable[[], Any] | None = None
    try:
        apply = binder.bind(state, record, "")
    except (StateError, CoverageError) as error:
        binder.problems.append(str(error))
    binder.check(ranks)
    problem = together(ranks, binder.load)
    if problem is not None:
        return problem
    wrong = [name for name, value in binder.digests(ranks).items() if checkpoint.manifest.digests.get(name) != value]
    if wrong:
        return f"what was loaded is not what was saved: the digests differ for {', '.join(sorted(wrong)[:5])}"
    if apply is not None:
        apply()
    return None


def together(ranks: Ranks, action: Callable[[], object]) -> str | None:
    """Do it on every rank: what is wrong with the candidate, in one rank's words, or None; StorageError on all ranks if the
    store cannot be used by one of them."""
    damage = fault = None
    try:
        action()
    except BAD as error:
        damage = str(error)
    except StorageError as error:
        fault = f"{type(error).__name__}: {error}"
    fault = ranks.agreed(fault)
    if fault is not None:
        raise StorageError(fault)
    return ranks.agreed(damage)
