"""One owner of a run, whichever host it is on.

`recovery.owner` keeps two coordinators of one host apart, by a lock in the run's local folder. Two hosts share nothing but the
run's storage, so the owner renews a lease there, and whoever starts reads it first: a live one elsewhere is refused by name,
unless its lease is over or the user takes over. Correctness does not hang on it: epochs fence whoever is late.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from recovery.agent_record import living_agent
from recovery.launch import start_time
from recovery.owner import HeldError, Owner, claim, inherits, this_process
from storage.errors import StorageError
from storage.lease import Held, read_holder, release, renew
from storage.objects import ObjectStore

__all__ = ["Holder", "check_holder", "check_not_here"]

RENEWALS = 3  # in each lease: two may fail before anybody thinks we are gone


def check_holder(store: ObjectStore, *, take_over: bool) -> None:
    """HeldError if another live coordinator holds the run: who, where, since when, and until when it is believed."""
    held = read_holder(store)
    if held is None or held.over or take_over:
        return
    owner, here = _owner(held), this_process()
    if owner is None or inherits(owner):
        return
    if owner.host == here.host:
        if owner.lives_elsewhere(store.url):
            raise HeldError(
                f"{store.url} is a copy of {owner.place}, made while that was running, by {owner.describe()}: what was copied "
                f"of a live run may not fit together. `ftrain stop {owner.place}` ends that one; another run begins with its "
                f"state by `ftrain run CONFIG --set run.url=... --from {owner.place}`"
            )
        if _lives(owner, here):
            raise HeldError(f"{store.url} is held by {owner.describe()}; `ftrain watch` shows it, `ftrain stop` ends it")
        return
    raise HeldError(
        f"{store.url} is held by {owner.describe()}: it renewed its lease {held.record.lease_s - held.left_s:.0f} s ago. Stop "
        f"it there, wait {max(held.left_s, 0):.0f} s for the lease to end if it is dead, or pass --take-over if it surely is"
    )


def check_not_here(store: ObjectStore, folder: Path) -> None:
    """HeldError if the run lives on this host, where nobody need guess: by its lock in `folder`, its agent, or its lease.

    `folder`: the run's local one, if it has the usual one. For whoever takes a run over without running it.
    """
    if folder.is_dir():
        claim(folder, take_over=True).release()
        if (agent := living_agent(folder)) is not None:
            raise HeldError(
                f"workers of {store.url} still step (agent: process {agent.pid}): `ftrain run` goes on with them; without it "
                "they end by themselves (recovery.lease_s)"
            )
    held = read_holder(store)
    owner, here = _owner(held) if held is not None and not held.record.released else None, this_process()
    if owner is not None and owner.host == here.host and _lives(owner, here):
        raise HeldError(f"{store.url} is held by {owner.describe()}; `ftrain stop` ends it")


def _lives(owner: Owner, here: Owner) -> bool:
    """Whether an owner on this host is alive: the host knows."""
    return owner.boot_id == here.boot_id and start_time(owner.pid) == owner.start_time


def _owner(held: Held) -> Owner | None:
    try:
        return msgspec.convert(held.record.owner, Owner)
    except msgspec.ValidationError:
        return None


class Holder:
    """Renews this process's lease on a thread of its own, and notices when somebody else has taken the run."""

    def __init__(self, store: ObjectStore, *, epoch: int, lease_s: float) -> None:
        self._store, self._lease_s = store.quick(), lease_s
        self.epoch = epoch
        self.taken_by = ""
        """Who holds the run now, if it is not this process any more."""
        self._owner: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(this_process(), place=store.url))
        self._closing = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._work, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the run, so that the next need not wait."""
        self._closing.set()
        self._thread.join(30.0)
        try:
            if not self.taken_by:
                release(self._store, epoch=self.epoch, owner=self._owner)
        except StorageError:
            return  # the lease runs out by itself

    def _work(self) -> None:
        while not self._closing.wait(self._lease_s / RENEWALS) and not self.taken_by:
            self._renew()

    def _renew(self) -> None:
        try:
            held = read_holder(self._store)
            if held is not None and held.record.epoch > self.epoch:
                owner = _owner(held)
                self.taken_by = owner.describe() if owner else f"the owner of epoch {held.record.epoch}"
                return
            renew(self._store, epoch=self.epoch, owner=self._owner, lease_s=self._lease_s)
            self.renewed = time.monotonic()
        except StorageError:
            return  # storage is away: the next renewal tries again, and a save says what is wrong
