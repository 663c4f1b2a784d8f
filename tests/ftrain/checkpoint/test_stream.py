"""A snapshot streamed out of the arena is sealed when its bytes leave, whatever the store does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ftrain.checkpoint import stream as module
from ftrain.checkpoint.arena import ArenaSlot, slot_nbytes
from ftrain.checkpoint.stream import SlotStream, SnapshotLostError
from storage import sealing as sealing_module
from storage.box import Box
from storage.digest import digest_part
from storage.pack import ArraySpec, PackLayout, check, plan_pack

SPEC = ArraySpec(name="master/w", shape=(64, 8), dtype="float32", tile=(2, 8))
LAYOUT = plan_pack({SPEC.name: SPEC}, [(SPEC.name, Box((0, 0), (64, 8)))])


@pytest.fixture
def slot(monkeypatch: pytest.MonkeyPatch) -> ArenaSlot:
    """A complete snapshot of step 7, owed to storage; blocks and pieces are so small that there are many."""
    monkeypatch.setattr(module, "BLOCK_NBYTES", 100)
    monkeypatch.setattr(sealing_module, "PIECE_BYTES", 150)
    fd = os.memfd_create("slot")
    os.ftruncate(fd, slot_nbytes(LAYOUT))
    slot = ArenaSlot(fd)
    os.close(fd)
    fill(slot, 7, LAYOUT)
    return slot


def fill(slot: ArenaSlot, step: int, layout: PackLayout) -> None:
    payload = slot.prepare(layout)
    slot.begin(epoch=1, attempt=0, step=step, rank=0, world=1)
    payload[:] = np.random.default_rng(step).integers(0, 255, layout.nbytes, dtype=np.uint8)
    slot.complete(b"{}", upload=True)


def test_blocks_are_sealed_when_they_leave_and_the_digest_is_that_of_the_whole(slot: ArenaSlot) -> None:
    blocks = list[bytes]()
    with SlotStream(slot) as stream:
        for block in stream:
            blocks.append(bytes(block))  # read before the next one is asked for, as a store does
        digests = stream.digests()
    assert len(blocks) > 5
    data = np.frombuffer(b"".join(blocks), np.uint8)
    assert check(data, LAYOUT) == []
    np.testing.assert_array_equal(data, slot.payload())
    assert digests == {SPEC.name: digest_part(data, SPEC, LAYOUT.parts[0])}
    assert slot.header().sealed


def test_a_stream_that_broke_can_be_read_again(slot: ArenaSlot) -> None:
    with SlotStream(slot) as stream:
        next(iter(stream))
        again = b"".join(bytes(block) for block in stream)
    assert check(np.frombuffer(again, np.uint8), LAYOUT) == []


def test_a_store_that_fails_at_once_leaves_the_snapshot_sealed_in_memory(slot: ArenaSlot) -> None:
    with pytest.raises(ConnectionError), SlotStream(slot):
        raise ConnectionError
    assert slot.header().sealed
    assert check(slot.payload(), LAYOUT) == []


def test_known_digests_are_not_computed_again(slot: ArenaSlot) -> None:
    with SlotStream(slot, digests={SPEC.name: 5}) as stream:
        assert check(np.frombuffer(b"".join(bytes(block) for block in stream), np.uint8), LAYOUT) == []
        assert stream.digests() == {SPEC.name: 5}
    slot.payload()[:] = 0  # nobody seals a sealed slot again
    with SlotStream(slot, digests={SPEC.name: 5}) as stream:
        assert not any(any(block) for block in stream)


def test_an_error_of_the_sealing_reaches_whoever_waits_for_the_bytes(slot: ArenaSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> Iterator[int]:
        yield 120
        raise MemoryError("no memory for the column keys")

    monkeypatch.setattr(module, "sealing", fails)
    with SlotStream(slot) as stream:
        with pytest.raises(MemoryError, match="column keys"):
            list(stream)
        with pytest.raises(MemoryError):
            stream.digests()
    assert not slot.header().sealed


def test_a_snapshot_taken_over_a_slot_that_is_still_being_streamed_is_not_vouched_for(slot: ArenaSlot) -> None:
    """Nobody keeps a slot for the local tier: its stream may be behind the next snapshot."""
    with SlotStream(slot) as stream:
        next(iter(stream))
        fill(slot, 8, LAYOUT)
    assert slot.header().step == 8
    assert not slot.header().sealed


def begin(slot: ArenaSlot, step: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A snapshot whose copy has begun; returns what will have been copied."""
    slot.begin(epoch=1, attempt=0, step=step, rank=0, world=1, upload=True)
    return np.random.default_rng(step).integers(0, 255, LAYOUT.nbytes, dtype=np.uint8)


def test_a_stream_follows_the_copy_and_ends_with_it(slot: ArenaSlot) -> None:
    values = begin(slot, 8)
    taken, blocks = threading.Semaphore(0), list[bytes]()

    def read() -> None:
        with SlotStream(slot) as stream:
            for block in stream:
                blocks.append(bytes(block))
                taken.release()

    reader = threading.Thread(target=read)
    reader.start()
    payload = slot.payload()
    payload[:300] = values[:300]
    slot.fill(300)
    assert taken.acquire(timeout=60)  # the first block left while the rest was not there
    assert len(blocks) < LAYOUT.nbytes // 100
    payload[300:] = values[300:]
    slot.fill(LAYOUT.nbytes)  # all is copied, but nobody has said that it belongs together
    assert not slot.header().sealed
    slot.complete(b"{}", upload=True)
    reader.join(60)
    data = np.frombuffer(b"".join(blocks), np.uint8)
    assert check(data, LAYOUT) == []
    np.testing.assert_array_equal(data, slot.payload())
    assert slot.header().sealed


@pytest.mark.parametrize("ends", ["stalls", "forgotten", "another"])
def test_the_last_block_of_a_snapshot_that_does_not_become_whole_never_leaves(
    slot: ArenaSlot, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.05 if ends == "stalls" else 60)
    begin(slot, 8)
    slot.fill(LAYOUT.nbytes)
    left = list[int]()
    with SlotStream(slot) as stream:
        if ends == "forgotten":
            slot.forget()
        elif ends == "another":
            begin(slot, 9)
        with pytest.raises(SnapshotLostError):
            left.extend(len(block) for block in stream)
        assert stream.lost
    assert sum(left) < LAYOUT.nbytes
    assert not slot.header().sealed
