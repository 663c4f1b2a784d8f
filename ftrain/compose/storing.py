"""The part of a run's delegate that follows snapshots to storage and to other nodes, and knows what is still owed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftrain.checkpoint.messages import (
    CopyFailed,
    Owed,
    PackFailed,
    PackStored,
    PeerCopied,
    Resend,
    SaveSkipped,
    Settled,
    StoreSnapshot,
    decode_keeper,
    encode,
)
from ftrain.compose.args import Launch, Memo
from ftrain.compose.committer import Committer, Job, Room
from ftrain.compose.debts import Debts, Group
from ftrain.compose.doubts import Doubts
from ftrain.compose.elastic import ElasticDelegate
from ftrain.compose.last import LastState
from ftrain.compose.rooms import Rooms
from ftrain.compose.skips import missed
from ftrain.config import Config
from recovery import events
from recovery.delegate import Saved
from recovery.events import Event
from storage.retention import RetentionPolicy
from storage.run import RunStore


class StoringDelegate(ElasticDelegate):
    """Gathers packs into commits. Used by the coordinator's one thread; what touches storage is the committer's."""

    def __init__(
        self, launch: Launch, config: Config, run: RunStore, folder: Path, policies: Sequence[RetentionPolicy]
    ) -> None:
        super().__init__(launch, config, run, folder, policies)
        self._committer: Committer | None = None
        self._epoch = self._attempt = 0
        self._parts: dict[Group, dict[int, PackStored]] = defaultdict(dict)
        self._begun: dict[Group, float] = {}
        self._settled: set[Group] = set()
        self._committing: set[Group] = set()  # said again, by a keeper that was asked again, they would be committed twice
        self._debts = Debts()
        self._last = LastState()
        self._doubts = Doubts()
        self._stored: tuple[int, Mapping[str, Any]] | None = (
            None  # step and progress of the checkpoint that the run goes on from
        )
        self._rooms = Rooms()
        self._abandoned: set[Group] = set()  # for good, because a rank's pack could not be stored
        self._memory_step: int | None = None
        self._memory_attempt = 0  # that took it
        self._takes_over = False  # from a coordinator that died; what it left in memory is there, or is lost
        self._done = 0  # the newest step of the history as it stands, of what is known to have been done since the start
        self._held: Group | None = None  # of the newest state of that history that was whole, wherever it is now
        self._moved: set[int] = set()  # steps since the last commit that changed the state: applied, with a learning rate

    def on_adopted(self, attempt: int, memo: bytes) -> Sequence[Event]:
        """An earlier coordinator's workers go on; if the run is asked to be another one now, for no longer than they must."""
        known = msgspec.msgpack.decode(memo, type=Memo)
        if known.asked and known.asked != self._layouts.asked:
            self._missed()
            self.links.start_again("the config was changed while no coordinator lived")
        return ()

    def _missed(self) -> int | None:
        """The first update that the newest state, of memory or of storage, was to do with other data; what came of it does not
        count then. Ranges that were decided on are known from the ledger only: a declared one may be equal to one of them.
        """
        found = [self._given.missed(self._skipped, self._phasing.cursor.step)]
        found += [missed(self._skipped, *self._stored)] if self._stored is not None else []
        late = min((update for update in found if update is not None), default=None)
        if late is not None:
            self._doubts.read_otherwise(self._attempt, late)
        return late

    def _distrust(self) -> None:
        """What is in doubt is tainted at once: nobody knows which way the attempt ends, and who looks into storage then."""
        if self._doubts.open is not None and self._committer is not None:
            self._committer.distrust(*self._doubts.open)

    def _spare(self, up_to: int | None) -> None:
        if self._committer is not None:
            self._committer.spare(up_to)

    def on_keeper(self, payload: bytes) -> Sequence[Event]:
        """One rank's pack is in storage, or could not be put there. May be said twice."""
        message = decode_keeper(payload)
        if isinstance(message, Owed):
            self._debts.told(message.node, (it for it in message.shares if (it.attempt, it.step) not in self._settled))
            return []
        if isinstance(message, PeerCopied | CopyFailed):
            return self._copies.on_keeper(message)
        group = (message.attempt, message.step)
        if message.tier == "local":
            return [] if self._doubts.is_void(*group) else self._places.on_keeper(message)
        self._places.count_retries(message)
        if group in self._settled or self._doubts.is_void(*group):
            if group in self._abandoned and isinstance(message, PackStored):
                self._discard(message)
            self._settle(Settled(attempt=message.attempt, step=message.step))
            return []
        if isinstance(message, PackFailed):
            return self._on_failed(message)
        if group in self._committing:
            return []
        self._parts[group][message.rank] = message
        if len(self._parts[group]) == message.world and self._committer is not None:
            self._committing.add(group)
            begin = self._begun.pop(group, time.time())
            changed = any((self._committed or 0) < step <= message.step for step in self._moved)
            self._committer.submit(Job.of(self._parts.pop(group), epoch=self._epoch, begin=begin, changed=changed))
        return []

    def on_keeper_started(self, *, restarted: bool) -> Sequence[Event]:
        """A keeper that died took the question along; a new one knows of no other node."""
        if restarted:
            self._copies.keeper_restarted()
        else:
            self._copies.repeat()
        if restarted and self._debts.asked:
            self.links.to_keeper(encode(Resend()))
        return []

    def on_node_returned(self, node: str) -> Sequence[Event]:
        """Its keeper may not know that a step is settled: the slot would stay full, and the next save wait for it for ever."""
        self._copies.repeat()
        self.links.to_keeper(encode(Resend()))
        return []

    def _on_failed(self, failed: PackFailed) -> list[Event]:
        group = (failed.attempt, failed.step)
        if self._rooms.is_waiting(group):
            return []
        if self._committer is not None and self._rooms.wait(failed):
            self._committer.make_room(group)
            return []
        return self._give_up(failed)

    def _roomed(self, room: Room) -> list[Event]:
        """Room was made for a save, or there was none to make."""
        failed, (attempt, step) = self._rooms.made(room.group, room.freed_bytes), room.group
        if room.group in self._settled:
            return [*room.events]
        if failed is not None:
            return self._give_up(failed)
        self.links.to_keeper(encode(StoreSnapshot(attempt=attempt, step=step)))
        return [*room.events]

    def _give_up(self, failed: PackFailed) -> list[Event]:
        group = (failed.attempt, failed.step)
        self._abandoned.add(group)
        self._discard(*self._parts.pop(group, {}).values())
        self._settle(Settled(attempt=failed.attempt, step=failed.step))
        self._after_failure()
        reason = f"rank {failed.rank}: {failed.reason}"
        self._last.failed({failed.step: reason})
        return [events.CheckpointFailed(t=time.time(), attempt=failed.attempt, step=failed.step, reason=reason)]

    def _discard(self, *stored: PackStored) -> None:
        """Packs of a save that will never be whole take room that the next one may need."""
        if self._committer is not None and stored:
            self._committer.discard(stored)

    def _writers(self) -> frozenset[tuple[int, int]]:
        """(epoch, attempt) of those whose packs a collection must leave alone. Asked from the committer's thread."""
        return self._debts.writers | self._rooms.writers

    def _dropped(self, attempt: int, step: int) -> list[Event]:
        """An attempt goes on from `step`: what storage is owed of later steps will not come, or not as it was."""
        found: list[Event] = []
        for group in self._debts.dropped(attempt, step):
            self._parts.pop(group, None)
            self._settle(Settled(attempt=group[0], step=group[1]))
            reason = f"the run goes on from step {step}"
            found.append(events.CheckpointFailed(t=time.time(), attempt=group[0], step=group[1], reason=reason))
        return found

    def _after_failure(self) -> None:
        if self._config.checkpoint.if_failed == "stop":
            self.links.request_stop("checkpoint.if_failed = 'stop'")

    def _settle(self, settled: Settled) -> None:
        self._settled.add((settled.attempt, settled.step))
        self._debts.settle((settled.attempt, settled.step))
        self.links.to_keeper(encode(settled))

    def _on_skipped(self, skipped: SaveSkipped, attempt: int) -> list[Event]:
        if skipped.failed:
            self._after_failure()
        return [events.CheckpointFailed(t=time.time(), attempt=attempt, step=skipped.step, reason=skipped.reason)]

    def _outcomes(self) -> list[Event]:
        """What the committer has done since the last call."""
        found: list[Event] = []
        for outcome in self._committer.results() if self._committer else []:
            self._settle(outcome.settled)
            self._committing.discard((outcome.settled.attempt, outcome.settled.step))
            if outcome.epoch != self._epoch:
                continue  # the run went back meanwhile: no part of its history, and no failure of it either
            if outcome.committed:
                self._committed = max(self._committed or 0, outcome.settled.step)
                self._moved = {step for step in self._moved if step > self._committed}
                self._places.committed(outcome.settled.step)
            else:
                self._last.failed(
                    {event.step: event.reason for event in outcome.events if isinstance(event, events.CheckpointFailed)}
                )
                self._after_failure()
            found += outcome.events
        for room in self._committer.rooms() if self._committer else []:
            found += self._roomed(room)
        return found

    def makes_way(self) -> bool:
        """Also whoever has come to an end with data that it was not to read."""
        return super().makes_way() or self._missed() is not None

    def at_end(self) -> bool:
        """Whether the loop did its last step, and may keep it."""
        return self._last.at_end and self._missed() is None

    def finished(self) -> bool:
        """The loop has ended, and its last state is committed."""
        return self.at_end() and self._last.is_stored(self._committed)

    def drained(self) -> bool:
        """Whether the final state is committed, or nothing is on its way any more."""
        if self._committer is None or not self._committer.idle or self._debts.open:
            return False
        wanted = self._last.final is not None and self._missed() is None
        return not wanted or self._last.is_stored(self._committed) or bool(self.lost())

    def leaving(self, *, keep: bool) -> None:
        """A run that is left without its last save (a worker died meanwhile) takes its newest snapshot along."""
        wanted = self._newest_kept() if keep else None
        if wanted is not None:
            group = (wanted.attempt, wanted.step)
            self._settled.discard(group)  # if it could not be stored before, it is tried once more
            self._debts.add(group)
            self.links.to_keeper(encode(wanted))

    def _newest_kept(self) -> StoreSnapshot | None:
        """What can be stored when the run is left: what memory holds, else copies of it on the nodes that live."""
        wanted, newest = None, self._committed or 0
        if self._memory_step is None:
            wanted = self._copies.wanted({place.node for place in self.links.places()}, newer_than=newest)
        elif self._memory_step > newest:
            wanted = StoreSnapshot(attempt=self._memory_attempt, step=self._memory_step)
        return wanted if wanted is not None and not self._doubts.is_void(wanted.attempt, wanted.step) else None

    def will_store(self, keep: bool) -> int:
        """The step of the newest checkpoint if the run were left now, and everything that it then waits for went well."""
        wanted = self._newest_kept() if keep else None
        return max(self._committed or 0, self._debts.newest, wanted.step if wanted is not None else 0)

    def saved(self) -> Saved:
        """What storage has, and what there was to store."""
        held = self._held[1] if self._held is not None and not self._doubts.is_void(*self._held) else 0
        step = self._origin[1]
        return Saved(step=step, held=held, done=max(self._done, step or 0))

    def lost(self) -> str:
        """Why the final state is not in storage and will not be."""
        return self._last.lost(self._committed)
