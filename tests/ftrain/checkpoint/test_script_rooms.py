"""A script on a disk that fills up: what retention has deleted makes room, and a save that fails takes none (ADR 34)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ftrain
from ftrain.checkpoint.script_keeper import ScriptKeeper
from ftrain.checkpoint.script_messages import KeeperStart
from storage.keys import parse_key
from storage.local import LocalStore
from storage.run import RunStore
from tests.supervised import until
from tests.world import run_world

pytestmark = pytest.mark.dist

ELEMENTS = 1 << 17  # half a MiB a rank and checkpoint
PACK = ELEMENTS * 4
SAVES = 10


def saves(rank: int, url: str, first: int) -> tuple[int | None, list[str]]:
    """Saves in a row; the newest that is in storage, and what was raised."""
    state = {"own": ftrain.per_rank(torch.zeros(ELEMENTS))}
    checkpointer = ftrain.Checkpointer(url, keep_last=2, on_error="raise")
    checkpointer.load(state)
    raised = []
    for step in range(first, first + SAVES):
        try:
            checkpointer.save(step, {"own": ftrain.per_rank(torch.full((ELEMENTS,), float(10 * step + rank)))})
            checkpointer.wait()
        except ftrain.SaveError as error:
            raised.append(str(error))
    committed = checkpointer.committed
    checkpointer.close()
    return committed, raised


def room_for(disk: Path, packs: float) -> Path:
    """Leave that much on a small disk; returns the file to delete for the rest."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(8 * 2**20 - int(packs * PACK) - 256 * 1024))
    return ballast


def packs_of(url: Path) -> set[int]:
    """Steps of which there are packs."""
    names = (parse_key(info.key) for info in LocalStore(str(url)).list("checkpoints/"))
    return {name.step for name in names if name is not None and name.kind == "pack"}


def valid(url: Path) -> list[int]:
    return [info.step for info in RunStore(LocalStore(str(url))).checkpoints() if str(info.state) == "valid"]


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_deleted_anyway_makes_room_for_the_next_save(small_disk, world: int) -> None:
    """Room for four checkpoints, of which two are kept: the grace period of the others is an hour."""
    disk = small_disk(8)
    room_for(disk, 4 * world)
    url = disk / "run"
    for committed, raised in run_world(saves, world, str(url), 1):
        assert raised == []
        assert committed == SAVES
    until(lambda: valid(url) == [SAVES - 1, SAVES], "the last collection")  # by a keeper, which ends after us
    checkpoint = RunStore(LocalStore(str(url))).open()
    assert checkpoint.step == SAVES
    assert checkpoint.verify().ok


def test_a_save_that_finds_no_room_fails_alone_and_leaves_nothing(small_disk) -> None:
    """Room for two checkpoints and a half, with two kept: one rank finds room for its part, the other does not."""
    disk = small_disk(8)
    ballast = room_for(disk, 5)
    url = disk / "run"
    for committed, raised in run_world(saves, 2, str(url), 1):
        assert committed == 2
        assert len(raised) == SAVES - 2
        assert all("no space left" in text for text in raised)
    assert valid(url) == [1, 2]
    until(lambda: packs_of(url) == {1, 2}, "the parts of failed saves are deleted")  # by keepers, which end after us
    ballast.unlink()
    for committed, raised in run_world(saves, 2, str(url), SAVES + 1):
        assert raised == []
        assert committed == 2 * SAVES


def test_a_keeper_whose_script_has_been_followed_by_another_deletes_nothing(tmp_path: Path) -> None:
    run_world(saves, 1, str(tmp_path), 1)
    before, told = packs_of(tmp_path), list[object]()
    RunStore(LocalStore(str(tmp_path))).take_epoch(owner={})
    older = ScriptKeeper(KeeperStart(url=str(tmp_path), rank=0, world=1, epoch=0, keep_last=1), told.append)
    newer = ScriptKeeper(KeeperStart(url=str(tmp_path), rank=0, world=1, epoch=1, keep_last=1), told.append)
    try:
        assert not older._make_room(SAVES + 1)
        assert packs_of(tmp_path) == before
        assert newer._make_room(SAVES + 1)
        assert packs_of(tmp_path) == {SAVES}
    finally:
        older.close()
        newer.close()
