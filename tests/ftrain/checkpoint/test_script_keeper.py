"""The keeper of a script's rank: in which order it goes to the store."""

from __future__ import annotations

import os
import queue
from pathlib import Path

import numpy as np
import pytest

from ftrain.checkpoint import script_keeper
from ftrain.checkpoint.arena import ArenaSlot, slot_nbytes
from ftrain.checkpoint.script_keeper import ScriptKeeper
from ftrain.checkpoint.script_messages import CommitDone, Copied, KeeperStart, Saved, Slots, delivery_key
from storage.box import Box
from storage.local import LocalStore
from storage.objects import MAX_OBJECT_BYTES, Bytes
from storage.pack import ArraySpec, plan_pack
from storage.run import RunStore
from storage.wrapper import WrappingStore

SPEC = ArraySpec(name="model/w", shape=(64, 8), dtype="float32", tile=(2, 8))
LAYOUT = plan_pack({SPEC.name: SPEC}, [(SPEC.name, Box((0, 0), (64, 8)))])
STEP = 3


class Recording(WrappingStore):
    """Writes down which parts were looked for and left."""

    def __init__(self, inner: LocalStore) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        self.calls.append(("get", key))
        return super().get(key, max_bytes=max_bytes)

    def put(self, key: str, data: Bytes) -> None:
        super().put(key, data)
        self.calls.append(("put", key))


def test_nobody_looks_for_parts_while_one_s_own_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking ever more rarely from the begin of a save on would notice the last part late by a third of what it took."""
    store = Recording(LocalStore(tmp_path))
    epoch = RunStore(store).take_epoch(owner={}, starts_from=None)
    monkeypatch.setattr(script_keeper, "open_store", lambda url: store)
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    keeper = ScriptKeeper(KeeperStart(url=str(tmp_path), rank=0, world=1, epoch=epoch), told.put)
    fd = os.memfd_create("slot")
    os.ftruncate(fd, slot_nbytes(LAYOUT))
    slot = ArenaSlot(fd)
    payload = slot.prepare(LAYOUT)
    slot.begin(epoch=epoch, attempt=0, step=STEP, rank=0, world=1, upload=True)
    try:
        keeper.handle(Slots(names=("a",)), (fd,))
        keeper.handle(Saved(slot="a", step=STEP, record=b'{"map":{}}'), ())  # as an overlapped save says it: the copy comes now
        payload[:] = np.arange(LAYOUT.nbytes) % 251
        slot.complete(b"{}", upload=True)
        keeper.handle(Copied(slot="a", step=STEP), ())
        answers = [told.get(timeout=60), told.get(timeout=60)]
    finally:
        keeper.close()
    assert [type(answer).__name__ for answer in answers] == ["PartDone", "CommitDone"]
    assert isinstance(answers[1], CommitDone)
    assert not answers[1].error
    part = delivery_key(STEP, epoch, 0, 0)
    assert [what for what, key in store.calls if key == part] == ["put", "get"]
