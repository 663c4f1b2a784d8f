"""A save that finds no room: what is deleted for it, what is spared, what is left behind (ADR 34)."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from ftrain.checkpoint.messages import PackFailed
from ftrain.compose.rooms import Rooms
from ftrain.compose.tiers import Mirror
from recovery.events import CheckpointCommitted, StorageNotice, TierCommitted
from storage.commit import CommitRecord
from storage.errors import NoSpace
from storage.manifest import Manifest
from storage.memory import MemoryStore
from storage.retention import KeepLast
from storage.run import RunStore
from tests.ftrain.compose.test_storage_glue import OTHER, VALUES, Committing, parts
from tests.storage.building import save
from tests.storage.crashing import ClockStore


def test_room_is_made_of_what_is_deleted_anyway_and_nothing_else() -> None:
    committing = Committing(ClockStore(), [KeepLast(n=2)], grace_s=3600.0)
    for step in (10, 20, 30):
        assert committing.commit(VALUES, step, changed=False).committed
    assert committing.packs() == [10, 20, 30], "within the grace period"
    committing.committer.make_room((0, 40))
    assert not committing.committer.idle
    assert committing.done.acquire(timeout=30)
    (room,) = committing.committer.rooms()
    (said,) = room.events
    assert isinstance(said, StorageNotice)
    assert (room.group, said.topic, said.step) == ((0, 40), "room", 40)
    assert room.freed_bytes > 0
    assert "before their 3600 s (checkpoint.grace_s) were over" in said.text
    assert committing.packs() == [20, 30]
    committing.committer.make_room((0, 40))
    assert committing.done.acquire(timeout=30)
    (room,) = committing.committer.rooms()
    assert (room.freed_bytes, room.events) == (0, ())
    assert committing.committer.idle
    committing.committer.close()


def test_a_commit_that_finds_no_room_is_tried_again_once_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    committing = Committing(ClockStore(), [KeepLast(n=1)], grace_s=3600.0)
    for step in (10, 20):
        assert committing.commit(VALUES, step, changed=False).committed
    commit = committing.run.commit

    def on_a_full_disk(manifest: Manifest) -> CommitRecord:
        if committing.packs() == [10, 20, 30]:
            raise NoSpace("no space left on the device", "manifest")
        return commit(manifest)

    monkeypatch.setattr(committing.run, "commit", on_a_full_disk)
    outcome = committing.commit(VALUES, 30, changed=False)
    assert outcome.committed
    assert [type(event) for event in outcome.events] == [StorageNotice, CheckpointCommitted]
    assert committing.packs() == [20, 30]
    committing.committer.close()


class SmallStore(ClockStore):
    """Has room for so many packs."""

    room = 6

    def put_stream(self, key: str, stream: Any) -> None:
        if sum(info.key.endswith(".pack") for info in self.list()) >= self.room:
            raise NoSpace("no space left on the device", key)
        super().put_stream(key, stream)


def test_a_commit_that_finds_no_room_at_all_leaves_nothing_behind() -> None:
    committing = Committing(FullAtCommit(), [KeepLast(n=2)], grace_s=3600.0)
    outcome = committing.commit(VALUES, 10, changed=True)
    assert not outcome.committed
    assert "no space left" in outcome.events[0].reason  # type: ignore[attr-defined]
    assert list(committing.store.list("checkpoints/")) == []
    committing.committer.close()


class FullAtCommit(ClockStore):
    """Has room for packs and manifest, and for nothing after them."""

    def create(self, key: str, data: bytes) -> bool:
        if "/commit-" in key:
            raise NoSpace("no space left on the device", key)
        return super().create(key, data)


def test_a_mirror_makes_room_of_what_is_deleted_anyway() -> None:
    """Three checkpoints of two packs find room there, two are kept; an hour of grace is not waited for."""
    run, small = RunStore(MemoryStore()), SmallStore()
    epoch = run.take_epoch(owner={})
    mirror = Mirror(lambda: run.store, lambda: small, [KeepLast(n=2)], grace_s=3600.0)
    for step in (10, 20, 30, 40, 50):
        save(run, VALUES, step=step, epoch=epoch)
        mirror.committed(step)
        deadline = time.monotonic() + 60
        while not (told := mirror.results()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [(type(event), event.step) for event in told] == [(TierCommitted, step)]  # type: ignore[attr-defined]
    mirror.close()
    assert [info.step for info in RunStore(small).checkpoints() if info.state == "valid"] == [40, 50]


def test_a_save_without_room_is_tried_again_at_most_twice_and_only_where_room_was_made() -> None:
    failed = PackFailed(epoch=0, attempt=0, step=3, rank=0, world=2, reason="full", no_space=True)
    rooms = Rooms()
    assert not rooms.wait(msgspec.structs.replace(failed, no_space=False))
    assert rooms.wait(failed)
    assert rooms.is_waiting((0, 3))
    assert rooms.made((0, 3), 0) is failed, "nothing was freed: as before"
    assert rooms.wait(failed)
    assert rooms.made((0, 3), 100) is None
    assert rooms.wait(failed), "another rank's failure, from before there was room"
    assert rooms.made((0, 3), 0) is None
    assert not rooms.wait(failed)


def test_packs_that_were_given_up_are_deleted_unless_another_epoch_owns_the_run() -> None:
    committing = Committing(ClockStore(), [KeepLast(n=2)], grace_s=3600.0)
    assert committing.commit(VALUES, 10, changed=False).committed
    committing.committer.discard(parts(committing.store, VALUES, 20, committing.epoch))
    assert committing.done.acquire(timeout=30)
    assert committing.packs() == [10]
    late = parts(committing.store, VALUES, 30, committing.epoch)
    RunStore(committing.store).take_epoch(owner={}, starts_from=10)
    committing.committer.discard(late)
    assert committing.done.acquire(timeout=30)
    assert committing.packs() == [10, 30]
    assert "Fenced" in committing.committer.collect_error
    committing.committer.close()


def test_room_for_a_save_is_not_made_of_what_other_ranks_have_stored_of_it() -> None:
    """Its attempt may be an older one than the newest, of a coordinator before this one, who knows of no debt yet."""
    rooms, store = Rooms(), ClockStore()
    store.now = time.time() - 60.0
    committing = Committing(store, [KeepLast(n=1)], grace_s=3600.0, writers=lambda: rooms.writers)
    for step in (10, 20):
        assert committing.commit(VALUES, step, changed=False).committed
    owed, epoch = parts(store, VALUES, 30, committing.epoch)[:1], committing.epoch
    committing.epoch = committing.run.take_epoch(owner={}, starts_from=20)
    assert committing.commit(OTHER, 40, changed=False).committed
    assert rooms.wait(PackFailed(epoch=epoch, attempt=0, step=30, rank=1, world=2, reason="full", no_space=True))
    committing.committer.make_room((0, 30))
    assert committing.done.acquire(timeout=30)
    assert committing.committer.rooms()[0].freed_bytes > 0
    assert owed[0].manifest.pack.name in {info.key.rsplit("/", 1)[1] for info in store.list("checkpoints/step-00000030")}
    committing.committer.close()
