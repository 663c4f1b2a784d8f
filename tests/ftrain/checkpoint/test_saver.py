"""Arena slots and the rule by which they are reused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ftrain.checkpoint.arena import PROGRESS_NBYTES, ArenaSlot, SlotHeader, SlotState, Upload, slot_name, slot_nbytes
from ftrain.checkpoint.memory import newest_snapshot
from ftrain.checkpoint.saver import Saver, free_slot, is_uploading
from ftrain.parallel.arrays import StatePiece
from storage.box import Box
from storage.pack import ArraySpec, PackLayout, check, plan_pack

SPEC = ArraySpec(name="master/w", shape=(8, 4), dtype="float32", tile=(2, 4))


def layout(rank: int = 0, world: int = 1) -> PackLayout:
    rows = 8 // world
    return plan_pack({SPEC.name: SPEC}, [(SPEC.name, Box((rank * rows, 0), (rows, 4)))])


def piece(value: float, rank: int = 0, world: int = 1) -> StatePiece:
    rows = 8 // world
    return StatePiece(SPEC.name, Box((rank * rows, 0), (rows, 4)), torch.full((rows, 4), value), "float32")


@pytest.fixture
def memfds() -> Iterator[list[int]]:
    fds = [os.memfd_create("slot") for _ in range(4)]
    for fd in fds:
        os.ftruncate(fd, slot_nbytes(layout()))
    yield fds
    for fd in fds:
        os.close(fd)


def saver(slots: list[ArenaSlot], rank: int = 0, world: int = 1, attempt: int = 0) -> Saver:
    named = [(slot_name(rank, i, 0), slot) for i, slot in enumerate(slots)]
    return Saver(named, layout(rank, world), identity=(1, attempt, rank, world), announce=lambda name: None)


def header(step: int, state: SlotState = SlotState.COMPLETE, upload: Upload = Upload.NONE) -> SlotHeader:
    return SlotHeader(state=state, sealed=False, upload=upload, epoch=1, attempt=0, step=step, rank=0, world=1)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        pytest.param([header(0, SlotState.EMPTY), header(0, SlotState.EMPTY)], 0, id="all empty"),
        pytest.param([header(10), header(0, SlotState.EMPTY)], 1, id="not the newest"),
        pytest.param([header(10), header(20)], 0, id="the older one"),
        pytest.param([header(10, upload=Upload.WANTED), header(20)], None, id="two slots, one uploading"),
        pytest.param([header(10, upload=Upload.WANTED), header(20), header(30)], 1, id="three slots, one uploading"),
        pytest.param([header(10, SlotState.FILLING), header(20)], 0, id="a torn one"),
        pytest.param([header(30, SlotState.FILLING, Upload.WANTED), header(20)], 0, id="a torn one is owed to nobody"),
    ],
)
def test_which_slot_is_filled_next(headers: list[SlotHeader], expected: int | None) -> None:
    assert free_slot(headers) == expected


def test_a_snapshot_describes_itself_to_whoever_holds_the_descriptor(memfds: list[int]) -> None:
    saver([ArenaSlot(memfds[0])]).save([piece(1.5)], step=7, upload=True, progress={"tokens": 99})
    other = ArenaSlot(memfds[0])
    assert other.header() == SlotHeader(
        state=SlotState.COMPLETE, sealed=False, upload=Upload.WANTED, epoch=1, attempt=0, step=7, rank=0, world=1
    )
    assert other.progress() == {"tokens": 99}
    assert other.table().layout() == layout()
    other.seal()
    assert other.header().sealed
    assert check(other.payload(), layout()) == []
    first_chunk = other.payload()[: 2 * 4 * 4].view(np.float32)
    assert first_chunk.tolist() == [1.5] * 8


def test_a_seal_that_comes_too_late_does_not_vouch_for_the_next_snapshot(memfds: list[int]) -> None:
    """The keeper may still be sealing step 7 when the worker fills the slot with step 9."""
    keeper = ArenaSlot(memfds[0])
    slots = [ArenaSlot(memfds[0]), ArenaSlot(memfds[1])]
    ours = saver(slots)
    ours.save([piece(1.0)], step=7, upload=False, progress={})
    keeper.seal()
    late_word = keeper.bytes[1028:1032].copy()
    ours.save([piece(2.0)], step=8, upload=False, progress={})
    ours.save([piece(3.0)], step=9, upload=False, progress={})
    keeper.bytes[1028:1032] = late_word
    assert keeper.header().step == 9
    assert not keeper.header().sealed


def test_slots_take_turns_and_an_owed_one_is_left_alone(memfds: list[int]) -> None:
    slots = [ArenaSlot(fd) for fd in memfds[:3]]
    ours = saver(slots)
    ours.save([piece(1.0)], step=1, upload=True, progress={})
    for step in (2, 3, 4, 5):
        ours.save([piece(float(step))], step=step, upload=False, progress={})
        assert slots[0].header().step == 1
    assert is_uploading(ours.headers())
    slots[0].upload_ended()
    ours.save([piece(6.0)], step=6, upload=False, progress={})
    assert sorted(slot.header().step for slot in slots) == [4, 5, 6] or slots[0].header().step == 6


def test_no_free_slot_is_an_error_not_an_overwrite(memfds: list[int]) -> None:
    ours = saver([ArenaSlot(memfds[0]), ArenaSlot(memfds[1])])
    ours.save([piece(1.0)], step=1, upload=True, progress={})
    ours.save([piece(2.0)], step=2, upload=True, progress={})
    assert not ours.has_free_slot()
    with pytest.raises(RuntimeError, match="no arena slot is free"):
        ours.save([piece(3.0)], step=3, upload=False, progress={})


def test_the_newest_step_that_every_rank_completed_is_found(memfds: list[int]) -> None:
    slots = [ArenaSlot(fd) for fd in memfds]
    zero, one = saver(slots[:2], 0, 2), saver(slots[2:], 1, 2)
    for rank, each in enumerate((zero, one)):
        each.save([piece(1.0, rank, 2)], step=10, upload=False, progress={})
    zero.save([piece(2.0, 0, 2)], step=20, upload=False, progress={})
    slots[3].begin(epoch=1, attempt=0, step=20, rank=1, world=2)  # rank 1 died in its copy of step 20
    names = {"a0": slots[0], "a1": slots[1], "b0": slots[2], "b1": slots[3]}
    found = newest_snapshot(names)
    assert found is not None
    assert (found.step, found.slots) == (10, ("a0", "b0"))


def test_after_a_restore_newer_snapshots_are_forgotten(memfds: list[int]) -> None:
    """Else rank 0 would take its half-complete step 20 for the newest and overwrite step 10, the only whole one."""
    slots = [ArenaSlot(fd) for fd in memfds[:2]]
    first = saver(slots)
    first.save([piece(1.0)], step=10, upload=False, progress={})
    first.save([piece(2.0)], step=20, upload=True, progress={})
    again = saver(slots, attempt=1)
    again.forget_after(10)
    assert [slot.header().state for slot in slots] == [SlotState.COMPLETE, SlotState.EMPTY]
    again.save([piece(3.0)], step=20, upload=False, progress={})
    assert slots[0].header().step == 10


def test_a_progress_record_too_large_is_refused(memfds: list[int]) -> None:
    ours = saver([ArenaSlot(memfds[0])])
    with pytest.raises(ValueError, match="over the limit"):
        ours.save([piece(1.0)], step=1, upload=False, progress={"x": "y" * PROGRESS_NBYTES})
    assert ArenaSlot(memfds[0]).header().state is SlotState.FILLING


def test_a_restart_of_the_same_layout_keeps_the_snapshot(memfds: list[int]) -> None:
    slots = [ArenaSlot(memfds[0])]
    saver(slots).save([piece(1.0)], step=5, upload=False, progress={})
    saver([ArenaSlot(memfds[0])], attempt=1)
    assert slots[0].header().step == 5
    assert slots[0].header().state is SlotState.COMPLETE


@pytest.mark.parametrize(("early", "upload", "expected"), [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_the_keeper_is_told_when_a_copy_begins_if_it_may_work_behind_it(
    memfds: list[int], early: bool, upload: bool, expected: int
) -> None:
    slot, told = ArenaSlot(memfds[0]), list[SlotHeader]()
    ours = Saver([("s", slot)], layout(), identity=(1, 0, 0, 1), announce=lambda name: told.append(slot.header()))
    ours.early = early
    ours.save([piece(1.0)], step=3, upload=upload, progress={})
    assert len(told) == expected
    assert [header.state for header in told] == [SlotState.FILLING, SlotState.COMPLETE][-expected:]
    assert {header.upload for header in told} == {Upload.WANTED if upload else Upload.NONE}
