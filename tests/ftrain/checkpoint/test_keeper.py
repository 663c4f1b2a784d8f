"""The keeper's slots come and go while it works."""

from __future__ import annotations

import os

from ftrain.checkpoint.arena import ArenaSlot, slot_nbytes
from ftrain.checkpoint.keeper import Keeper
from ftrain.checkpoint.messages import KeeperMessage, PackStored
from storage.box import Box
from storage.memory import MemoryStore
from storage.pack import ArraySpec, plan_pack

SPEC = ArraySpec(name="master/w", shape=(64, 8), dtype="float32", tile=(2, 8))
LAYOUT = plan_pack({SPEC.name: SPEC}, [(SPEC.name, Box((0, 0), (64, 8)))])


def test_a_slot_that_it_does_not_have_is_forgotten_like_any_other() -> None:
    said: list[KeeperMessage] = []
    keeper = Keeper(MemoryStore, said.append)
    fd = os.memfd_create("slot")
    os.ftruncate(fd, slot_nbytes(LAYOUT))
    slot = ArenaSlot(fd)
    slot.prepare(LAYOUT)
    slot.begin(epoch=0, attempt=0, step=3, rank=0, world=1)
    slot.complete(b"{}", upload=True)
    keeper.drop("another node's")
    keeper.adopt("ours", fd)
    keeper.close()
    keeper.drop("ours")
    keeper.drop("ours")
    (stored,) = said
    assert isinstance(stored, PackStored)
    assert stored.step == 3
    slot.close()
    os.close(fd)
