"""The coordinator's half of the peer tier: which snapshot is copied between nodes next, and which one is whole on all of them.

One step at a time, the newest there is when the one before has ended: so the copies never fall behind by more than they take,
whatever the interval of snapshots, and at most two areas a rank hold them. What is whole must stay, on its own nodes too, until
the next one is (see ftrain.checkpoint.peers). Nothing here may hold up the run: a copy that fails is a notice, and the next
snapshot is tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from ftrain.checkpoint.messages import Buddies, CopyFailed, KeepSnapshots, PeerCopied, StoreSnapshot, encode
from recovery.events import Event, StorageNotice, TierCommitted

Key = tuple[int, int]
"""(attempt, step) of a snapshot."""


class Copies:
    """Used by the delegate's one thread; it asks nothing of keepers as long as the ring is empty."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """`send`: to all keepers; what is sent while one of them cannot be reached is lost."""
        self._send = send
        self.whole: Key | None = None
        """The newest snapshot of which every rank's share is in the memory of two nodes."""
        self._homes: tuple[str, ...] = ()  # the node of each rank when it became so
        self._ring: tuple[str, ...] = ()
        self._nodes: tuple[str, ...] = ()  # of each rank
        self._copying: Key | None = None
        self._begun = 0.0
        self._answers: dict[int, PeerCopied] = {}
        self._next: Key | None = None
        self._said = ""

    @property
    def step(self) -> int | None:
        """Of the newest whole one."""
        return self.whole[1] if self.whole else None

    def recall(self, copied: Key | None) -> None:
        """What an earlier coordinator had on record."""
        self.whole = copied

    def started(self, nodes: Sequence[str]) -> None:
        """An attempt is about to be started; `nodes`: of each rank (fewer than two: nothing is copied)."""
        ring = tuple(dict.fromkeys(nodes))
        self._nodes, self._ring = tuple(nodes), ring if len(ring) > 1 else ()
        self._end()
        self._next = None
        self.repeat()

    def adopted(self, nodes: Sequence[str]) -> None:
        """An earlier coordinator's attempt goes on."""
        self.started(nodes)
        self._homes = self._nodes if self._ring else ()

    def repeat(self) -> None:
        """Tell the keepers where things stand: one of them is new, or may have missed it."""
        if self._ring:
            self._send(encode(Buddies(ring=list(self._ring))))
            self._tell()

    def keeper_restarted(self) -> None:
        """What one keeper was copying ended with it."""
        self._end()
        self.repeat()

    def forget(self) -> None:
        """The areas are void."""
        self.whole = self._next = None
        self._end()

    def began_at(self, step: int) -> None:
        """The run goes on from this step: a later copy is no part of its history."""
        if self.whole is not None and self.whole[1] > step:
            self.whole = None
        if self._ring:
            self._send(encode(KeepSnapshots(keep=self.whole, forget_after=step)))

    def reachable(self, nodes: Collection[str]) -> int | None:
        """The step of the newest whole snapshot, if `nodes` hold every share of it between them."""
        ring = tuple(dict.fromkeys(self._homes))
        lost = [number for number, node in enumerate(ring) if node not in nodes]
        kept = all(ring[(number + 1) % len(ring)] in nodes for number in lost)
        return self.step if ring and kept else None

    def wanted(self, nodes: Collection[str], *, newer_than: int) -> StoreSnapshot | None:
        """For the keepers of `nodes`, as the run is being left: the newest whole snapshot, if they have it and it is newer."""
        step = self.reachable(nodes)
        if self.whole is None or step is None or step <= newer_than:
            return None
        lost = [rank for rank, node in enumerate(self._homes) if node not in nodes]
        return StoreSnapshot(attempt=self.whole[0], step=step, copies_of=lost)

    def taken(self, attempt: int, step: int) -> None:
        """A snapshot is complete on all ranks."""
        if not self._ring:
            return
        if self._copying is None:
            self._begin((attempt, step))
        else:
            self._next = attempt, step
            self._tell()  # again: a node may have missed it, and then nobody would ever answer

    def _begin(self, key: Key) -> None:
        self._copying, self._next, self._begun = key, None, time.time()
        self._answers.clear()
        self._tell()

    def _tell(self) -> None:
        self._send(encode(KeepSnapshots(keep=self.whole, copy=self._copying)))

    def _end(self) -> None:
        self._copying = None
        self._answers.clear()

    def on_keeper(self, message: PeerCopied | CopyFailed) -> list[Event]:
        """What came of one rank's copy."""
        if (message.attempt, message.step) != self._copying:
            return []
        if isinstance(message, CopyFailed):
            if message.node != self._nodes[message.rank]:
                return []  # a node that the rank has left: its areas are still there
            told = self._failed(message)
        else:
            self._answers[message.rank] = message
            if len(self._answers) < message.world:
                return []
            told = [self._done(message)]
        self._end()
        if self._next is not None:
            self._begin(self._next)
        else:
            self._tell()
        return told

    def _done(self, last: PeerCopied) -> Event:
        self.whole, self._homes, self._said = self._copying, self._nodes, ""
        nbytes, now = sum(answer.nbytes for answer in self._answers.values()), time.time()
        seconds = now - self._begun
        return TierCommitted(t=now, attempt=last.attempt, tier="peer", step=last.step, nbytes=nbytes, seconds=seconds)

    def _failed(self, message: CopyFailed) -> list[Event]:
        """Said once for each reason in a row: the next snapshot may well fail alike."""
        if message.reason == self._said:
            return []
        self._said = message.reason
        text = f"rank {message.rank}: step {message.step} is not in the memory of another node: {message.reason}"
        return [StorageNotice(t=time.time(), attempt=message.attempt, topic="peer", text=text, step=message.step)]
