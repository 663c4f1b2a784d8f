"""Who runs this run: one coordinator at a time per local folder, and the next one knows whether the last is dead.

A lock file alone says "held" but not by whom; a pid alone may belong to somebody else by now, or to another machine. So the
record names host, boot, pid and start time. A record of a dead process on this host is taken over at once. One written on
another host cannot be checked from here (a shared folder used as local folder): it is refused, unless the caller takes over
by force.

Between the check of a start and the claim of the coordinator that it starts, nobody else may start the run: what it has written
would be what the other one's coordinator reads. So a start claims the run itself, and hands the very lock to its coordinator:
the two hold it together, until the coordinator lets it go or both are dead.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from recovery.files import replace_file
from recovery.launch import boot_id, start_time

RECORD = "owner.json"
LOCK = "owner.lock"
HANDED = "FTRAIN_OWNER_LOCK"
"""Tells a child which descriptor is the lock that its parent holds, and the parent's pid, which is in the record till then."""


class HeldError(Exception):
    """Another live process owns the run; the message names it."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """One owner of a run."""

    host: str
    boot_id: str
    pid: int
    start_time: int
    job_id: str = ""
    since: float = 0.0
    place: str = ""
    """The folder, or the URL, that it was taken in: a copy of that has the record, too."""

    def lives_elsewhere(self, place: str) -> bool:
        """Whether it is a live process of this host that runs another folder, of which `place` is a copy."""
        try:
            ours, theirs = (each.removeprefix("file://") for each in (self.place, place))
            copied = ours != "" and not os.path.samefile(ours, theirs)
        except OSError:  # one of the two is no folder of this machine, or was moved
            return False
        here = this_process()
        return copied and (self.host, self.boot_id) == (here.host, here.boot_id) and start_time(self.pid) == self.start_time

    def describe(self) -> str:
        """For messages."""
        job = f", job {self.job_id}" if self.job_id else ""
        return f"process {self.pid} on {self.host}{job}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


def this_process() -> Owner:
    """The record of the calling process."""
    pid = os.getpid()
    job = os.environ.get("SLURM_JOB_ID", "")
    started = start_time(pid) or 0
    return Owner(host=socket.gethostname(), boot_id=boot_id(), pid=pid, start_time=started, job_id=job, since=time.time())


def inherits(owner: Owner, env: Mapping[str, str] = os.environ) -> bool:
    """Whether an owner, on whatever host, was an earlier life of this very job: Slurm ended that before it started this one."""
    again = env.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    return again and owner.job_id == env.get("SLURM_JOB_ID", "") != ""


def read_owner(folder: Path) -> Owner | None:
    """The last owner's record; None if there is none or it is unreadable (its writer died in the middle of the very first)."""
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=Owner)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class Claim:
    """Ownership of a run, held until `release` or the process's end."""

    def __init__(self, folder: Path, owner: Owner, previous: Owner | None, lock: int) -> None:
        """Use `claim` instead."""
        self.owner = owner
        self.previous = previous
        self._folder = folder
        self._lock = lock
        self._handed = False

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def hand_over(self) -> tuple[tuple[int, ...], dict[str, str]]:
        """The descriptors and the environment with which a child's `claim` takes this one's place; it is the child's to end."""
        self._handed = True
        return (self._lock,), {HANDED: f"{self._lock}:{self.owner.pid}"}

    def release(self) -> None:
        """Leave the run to whoever comes next; one that was handed over is left to whom it was handed."""
        if not self._handed:
            (self._folder / RECORD).unlink(missing_ok=True)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # for the parent that handed it to us, too
        os.close(self._lock)


def claim(folder: Path, *, take_over: bool = False) -> Claim:
    """Own the run in `folder`, atomically among the processes of this host; HeldError if somebody else does.

    `take_over` also takes it from an owner on another host, of whom nothing can be known: the caller must be sure it is dead.
    What a parent has handed over is taken up.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    here = msgspec.structs.replace(this_process(), place=str(folder.absolute()))
    lock, starter = _handed(folder) or (os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), 0)
    try:
        previous = read_owner(folder)
        _check(previous, here, locked=_lock(lock), take_over=take_over)
        if previous is not None and previous.pid == starter:
            previous = None  # it has run nothing
        _write(folder, here)
    except BaseException:
        os.close(lock)
        raise
    return Claim(folder, here, previous, lock)


def _handed(folder: Path) -> tuple[int, int] | None:
    """The lock that this process's parent holds and has handed to it, and the parent's pid; None if there is none."""
    lock, _, starter = os.environ.pop(HANDED, "").partition(":")
    if not lock:
        return None
    fd = int(lock)
    os.set_inheritable(fd, False)
    if not (folder / LOCK).exists() or not os.path.samestat(os.fstat(fd), os.stat(folder / LOCK)):
        os.close(fd)  # the folder was deleted and made anew
        return None
    return fd, int(starter)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check(previous: Owner | None, here: Owner, *, locked: bool, take_over: bool) -> None:
    if not locked:
        who = previous.describe() if previous else "another process"
        raise HeldError(f"the run is already running: {who}; `ftrain watch` shows it, `ftrain stop` ends it")
    if previous is None or previous.host == here.host or take_over or inherits(previous):
        return  # on this host the lock is free only if its holder is dead
    raise HeldError(
        f"the run was last held by {previous.describe()}, and nothing on {here.host} can tell whether that one is alive; "
        "stop it there, or pass --take-over if it is surely dead"
    )


def _write(folder: Path, owner: Owner) -> None:
    replace_file(folder / RECORD, msgspec.json.encode(owner))
