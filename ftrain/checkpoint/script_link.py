"""A rank's end of its keeper: started, spoken to, listened to, and let go."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping

import msgspec

from ftrain.checkpoint.script_messages import (
    CommitDone,
    Copied,
    Forget,
    FromScriptKeeper,
    KeeperStart,
    PartDone,
    Saved,
    Slots,
)
from recovery.launch import python
from recovery.wire import channel, socket_pair, wait_readable

log = logging.getLogger("ftrain.checkpoint")

LIVES = 3  # keepers in a row that may die without having finished anything
CLOSE_S = 30.0
SEND_S = 30.0
QUIET = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class SaveError(RuntimeError):
    """A checkpoint could not be stored; training could go on."""


class KeeperLink:
    """One keeper process of this rank, in a session of its own: what ends the script does not end it."""

    def __init__(self, start: KeeperStart) -> None:
        """Start it."""
        ours, theirs = socket_pair()
        argv = python("ftrain.checkpoint.script_keeper", msgspec.json.encode(start).decode(), str(theirs.fileno()))
        with theirs:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**os.environ, **QUIET},
            )
        self._channel = channel(ours, FromScriptKeeper)
        self._commits = start.rank == 0
        self._parts: dict[int, Saved] = {}
        self._broken: dict[int, Copied] = {}  # of these, those that will not be complete
        self._whole: set[int] = set()
        self._news: list[PartDone | CommitDone] = []

    @property
    def alive(self) -> bool:
        """Whether it runs and listens."""
        return self._process.poll() is None and not self._channel.closed

    @property
    def status(self) -> int | None:
        """How it ended; None if it has not. One that has hung up is waited for: it has nothing left to do but end."""
        return self._process.wait() if self._channel.closed else self._process.poll()

    @property
    def owes_parts(self) -> bool:
        """Whether a slot of this rank is still on its way."""
        return bool(self._parts)

    @property
    def owes(self) -> bool:
        """Whether anything is on its way; on rank 0 also a commit."""
        return bool(self._parts or self._whole)

    def adopt(self, fds: Mapping[str, int]) -> None:
        """Give it memory areas."""
        self._channel.send(Slots(names=tuple(fds)), tuple(fds.values()))

    def forget(self, names: tuple[str, ...]) -> None:
        """Take them back."""
        self._channel.send(Forget(names=names))

    def saved(self, slot: str, step: int, record: bytes) -> None:
        """A slot is complete, or being filled: then `copied` says when that is over."""
        self._send(Saved(slot=slot, step=step, record=record))
        self._channel.drain(SEND_S)  # the next word may be a long time away, and a socket takes a few hundred KB

    def copied(self, slot: str, step: int, error: str = "") -> None:
        """A slot that was being filled is complete, or will not be."""
        copied = Copied(slot=slot, step=step, error=error)
        if error:
            self._broken[step] = copied
        self._channel.send(copied)

    def _send(self, saved: Saved) -> None:
        self._parts[saved.step] = saved
        if self._commits:
            self._whole.add(saved.step)
        self._channel.send(saved)

    def listen(self, timeout_s: float) -> None:
        """Take in what it says, waiting at most so long for the first word."""
        if self._channel.wants_write:
            self._channel.drain(timeout_s)
        if not self._channel.closed and wait_readable(self._channel.fileno(), timeout_s):
            for frame in self._channel.read():
                self._note(frame.message)

    def _note(self, message: PartDone | CommitDone) -> None:
        if isinstance(message, CommitDone):
            self._whole.discard(message.step)
        else:
            self._parts.pop(message.step, None)
            self._broken.pop(message.step, None)
        self._news.append(message)

    def news(self) -> list[PartDone | CommitDone]:
        """What it has said since the last call."""
        self._channel.flush()
        self.listen(0.0)
        said, self._news = self._news, []
        return said

    def take_over(self, dead: KeeperLink, fds: Mapping[str, int]) -> None:
        """Be told all that a keeper that died was told and did not finish."""
        dead.listen(0.0)
        self._news += dead._news
        dead._channel.close()
        dead._process.wait()
        self.adopt(fds)
        for saved in dead._parts.values():
            self._send(saved)
        for broken in dead._broken.values():
            self.copied(broken.slot, broken.step, broken.error)
        for step in dead._whole - set(dead._parts):
            self._whole.add(step)
            self._channel.send(Saved(slot="", step=step, record=b""))

    def close(self) -> None:
        """Hang up; it leaves when it has nothing left to do, which may be later than we do."""
        self._channel.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it goes on without us: nobody is to warn of that


class Keepers:
    """One keeper after the other, as they die: what they have said, and what is owed. One thread at a time."""

    def __init__(self, start: KeeperStart) -> None:
        self._start = start
        self._link: KeeperLink | None = None
        self._fds: Mapping[str, int] = {}
        self._deaths = 0  # since one of them has finished something

    def link(self) -> KeeperLink:
        """The keeper: started when it is first needed, and again if it died: the slots know what is still owed.

        Raises SaveError if that has not helped several times in a row.
        """
        if self._link is None:
            self._link = KeeperLink(self._start)
            if self._fds:
                self._link.adopt(self._fds)
        elif not self._link.alive:
            self._replace(self._link)
        return self._link

    def _replace(self, dead: KeeperLink) -> None:
        self._deaths += 1
        if self._deaths > LIVES:
            raise SaveError(f"{LIVES} keeper processes in a row died (status {dead.status}); their words are in stderr")
        log.warning("the keeper process died (status %s); another one is started", dead.status)
        self._link = KeeperLink(self._start)
        self._link.take_over(dead, self._fds)

    def adopt(self, fds: Mapping[str, int]) -> None:
        """Give the keeper memory areas; one that is yet to be started gets them then."""
        self._fds = fds
        if self._link is not None:
            self._link.adopt(fds)

    def forget(self, names: tuple[str, ...]) -> None:
        """Take them back, when nothing of them is on its way any more."""
        while self._link is not None and self._link.owes_parts:
            self.link().listen(1.0)
        if self._link is not None:
            self._link.forget(names)
        self._fds = {}

    def news(self) -> list[PartDone | CommitDone]:
        """What has been said since the last call."""
        said = self._link.news() if self._link is not None else []
        if said:
            self._deaths = 0
        return said

    def wait(self) -> None:
        """Until nothing is on its way. Raises SaveError if there is nobody left who could tell."""
        while self._link is not None and self._link.owes:
            self.link().listen(1.0)

    def close(self) -> None:
        """Let the last one go."""
        if self._link is not None:
            self._link.close()
            self._link = None
