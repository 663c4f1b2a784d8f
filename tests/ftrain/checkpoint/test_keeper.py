"""The keeper's slots come and go while it works."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ftrain.checkpoint.arena import ArenaSlot, slot_nbytes
from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.messages import KeeperMessage, Owed, PackFailed, PackStored, Settled, StoreSnapshot
from storage.box import Box
from storage.compress import Compressor
from storage.errors import NoSpace
from storage.memory import MemoryStore
from storage.merge import merge
from storage.pack import ArraySpec, check, plan_pack, write_part
from storage.run import RunStore

SPEC = ArraySpec(name="master/w", shape=(64, 8), dtype="float32", tile=(2, 8))
LAYOUT = plan_pack({SPEC.name: SPEC}, [(SPEC.name, Box((0, 0), (64, 8)))])


@pytest.fixture
def fd() -> Iterator[int]:
    """Memory for one slot."""
    made = os.memfd_create("slot")
    os.ftruncate(made, slot_nbytes(LAYOUT))
    yield made
    os.close(made)


def snapshot(fd: int, *, step: int, upload: bool) -> None:
    slot = ArenaSlot(fd)
    slot.prepare(LAYOUT)
    slot.begin(epoch=0, attempt=0, step=step, rank=0, world=2)
    slot.complete(b"{}", upload=upload)
    slot.close()


def test_a_slot_that_it_does_not_have_is_forgotten_like_any_other(fd: int) -> None:
    said: list[KeeperMessage] = []
    keeper = Keeper(MemoryStore, said.append)
    snapshot(fd, step=3, upload=True)
    keeper.drop("another node's")
    keeper.adopt("ours", fd)
    keeper.close()
    keeper.drop("ours")
    keeper.drop("ours")
    (stored,) = said
    assert isinstance(stored, PackStored)
    assert stored.step == 3


def test_what_goes_to_storage_is_compressed_and_the_slot_and_the_local_tier_are_not(fd: int) -> None:
    """The digests are the same, and both commit to checkpoints that verify."""
    said: list[KeeperMessage] = []
    stores = {"storage": MemoryStore("pressed"), "local": MemoryStore("plain")}
    keeper = Keeper(lambda: stores["storage"], said.append, local=lambda: stores["local"], local_every=1)
    slot = ArenaSlot(fd)
    values = np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)
    write_part(slot.prepare(LAYOUT), SPEC, LAYOUT.parts[0], values)
    slot.compress_with(Compressor(cname="zstd", clevel=1))
    slot.begin(epoch=0, attempt=0, step=3, rank=0, world=1)
    slot.complete(b"{}", upload=True)
    keeper.adopt("ours", fd)
    keeper.close()
    stored = {answer.tier: answer for answer in said if isinstance(answer, PackStored)}
    assert stored["storage"].manifest.digests == stored["local"].manifest.digests
    for tier, store in stores.items():
        run = RunStore(store)
        run.take_epoch(owner={})
        run.commit(merge([stored[tier].manifest], step=3, epoch=0, attempt=0, progress={}, created_s=0.0))
        checkpoint = run.open()
        assert (checkpoint.manifest.compressor is None) == (tier == "local")
        assert checkpoint.verify().ok
        np.testing.assert_array_equal(checkpoint.read(SPEC.name), values)
    assert check(slot.payload(), LAYOUT) == []
    slot.close()


def test_packs_of_a_step_are_compressed_alike_whichever_keeper_stores_them(fd: int) -> None:
    """As the worker was told that filled the slot: a keeper that follows a dead one, or one on a node that came later, may
    have been started with another config, and a pack that is sent again must have the bytes it had.
    """
    said: list[KeeperMessage] = []
    store, slot = MemoryStore(), ArenaSlot(fd)
    packs = []
    for step, compressor in enumerate([Compressor(clevel=9, shuffle="noshuffle"), Compressor(cname="zstd"), None]):
        slot.prepare(LAYOUT)
        slot.compress_with(compressor)
        slot.begin(epoch=0, attempt=step, step=step, rank=0, world=1)
        slot.complete(b"{}", upload=True)
        for _ in range(2):
            keeper = Keeper(lambda: store, said.append)
            keeper.adopt("ours", fd)
            keeper.close()
            assert isinstance(said[-1], PackStored)
            assert said[-1].manifest.compressor == compressor
            packs.append(store.get(f"checkpoints/step-{step:08d}/{said[-1].manifest.pack.name}"))
        assert packs[-1] == packs[-2]
        keeper.settled(Settled(attempt=step, step=step))
    slot.close()


def test_what_is_here_of_a_snapshot_is_stored_when_asked_for_though_other_ranks_are_elsewhere(fd: int) -> None:
    said: list[KeeperMessage] = []
    keeper = Keeper(MemoryStore, said.append)
    snapshot(fd, step=3, upload=False)
    keeper.adopt("ours", fd)
    for attempt, step in [(0, 4), (1, 3), (0, 3)]:
        keeper.store(StoreSnapshot(attempt=attempt, step=step))
    keeper.close()
    assert [(type(answer), answer.step) for answer in said if not isinstance(answer, Owed)] == [(PackStored, 3)]


class FullStore(MemoryStore):
    """Has no room, until it has."""

    full = True

    def put_stream(self, key: str, stream: Any) -> None:
        if self.full:
            raise NoSpace("no space left on the device", key)
        super().put_stream(key, stream)


def test_what_there_was_no_room_for_is_stored_when_asked_for_again_and_only_that(fd: int) -> None:
    said: queue.SimpleQueue[KeeperMessage] = queue.SimpleQueue()
    store, request = FullStore(), StoreSnapshot(attempt=0, step=3)
    keeper = Keeper(lambda: store, said.put)
    snapshot(fd, step=3, upload=True)
    keeper.adopt("ours", fd)
    failed = said.get(timeout=30)
    assert isinstance(failed, PackFailed)
    assert (failed.step, failed.no_space) == (3, True)
    assert "no space left" in failed.reason
    store.full = False
    keeper.snapshot_ready("ours")  # said again by whoever: nobody has asked for another try
    keeper.store(request)
    assert isinstance(said.get(timeout=30), PackStored)
    keeper.store(request)
    keeper.close()
    assert said.empty()


@pytest.mark.parametrize("freed", [[True], [False, True], [False, False, False]])
def test_a_keeper_that_can_make_room_tries_again_but_not_for_ever(fd: int, freed: list[bool]) -> None:
    said: list[KeeperMessage] = []
    store, asked = FullStore(), list[int]()

    def make_room(step: int) -> bool:
        store.full = not freed[len(asked)]
        asked.append(step)
        return True

    keeper = Keeper(lambda: store, said.append, make_room=make_room)
    snapshot(fd, step=3, upload=True)
    keeper.adopt("ours", fd)
    keeper.close()
    assert [type(answer) for answer in said] == [PackStored if True in freed else PackFailed]
    assert asked == [3] * min(len(freed), 2)


def test_a_snapshot_announced_twice_is_stored_once_and_one_whose_copy_died_never(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftrain.checkpoint.stream.STALL_S", 0.05)
    said: list[KeeperMessage] = []
    store = MemoryStore()
    keeper = Keeper(lambda: store, said.append)
    slot = ArenaSlot(fd)
    slot.prepare(LAYOUT)
    slot.begin(epoch=0, attempt=0, step=3, rank=0, world=1, upload=True)
    keeper.adopt("ours", fd)  # as a keeper that replaces another one finds it
    keeper.snapshot_ready("ours")
    slot.complete(b'{"step":3}', upload=True)
    keeper.snapshot_ready("ours")
    while not said:
        threading.Event().wait(0.01)
    slot.upload_ended()
    slot.begin(epoch=0, attempt=0, step=4, rank=0, world=1, upload=True)
    keeper.snapshot_ready("ours")
    keeper.close()
    (stored,) = said
    assert isinstance(stored, PackStored)
    assert (stored.step, stored.progress) == (3, {"step": 3})
    assert [info.key for info in store.list("")] == ["checkpoints/step-00000003/e0000-a0000-r00000.pack"]
