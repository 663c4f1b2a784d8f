"""A copy is a checkpoint of its own: verified where it lies, resumable, and never in the way of anybody's run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from storage.copy import copy_checkpoint
from storage.errors import CoverageError, Damaged, Fenced, NoCheckpoint, Unavailable
from storage.keys import pack_name, step_folder
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.objects import Bytes
from storage.run import RunStore
from storage.wrapper import WrappingStore
from tests.storage.building import SPECS, random_values, save


def source_run(name: str, *, steps: tuple[int, ...] = (100,)) -> RunStore:
    run = RunStore(MemoryStore(name))
    epoch = run.take_epoch(owner={}, starts_from=None)
    for step in steps:
        save(run, random_values(SPECS, step), step=step, epoch=epoch, writers=3)
    return run


def test_a_copy_stands_alone(tmp_path: Path) -> None:
    source = source_run("copy-a").open()
    target = RunStore(LocalStore(tmp_path / "mirror"))
    done = copy_checkpoint(source, target)
    assert done.commit is not None
    assert done.copied_bytes == done.nbytes == source.manifest.nbytes
    copy = target.open()
    assert copy.verify().ok, "the view too is that of its place"
    assert copy.manifest.digests == source.manifest.digests
    assert copy.progress == source.progress
    view = next((tmp_path / "mirror" / "checkpoints" / "step-00000100").glob("*.zarr.json"))
    assert json.loads(view.read_bytes())["templates"]["u"] == str(view.parent)
    group = zarr.open_group(f"reference::{view}", mode="r")
    assert np.array_equal(np.asarray(group["master/norm"]), source.read("master/norm"))


def test_again_is_nothing_and_another_state_is_refused() -> None:
    source, target = source_run("copy-b").open(), RunStore(MemoryStore("copy-b2"))
    first = copy_checkpoint(source, target)
    again = copy_checkpoint(source, target)
    assert (again.commit, again.copied_bytes, again.epoch) == (None, 0, first.epoch)
    other = RunStore(MemoryStore("copy-b3"))
    save(other, random_values(SPECS, 9), step=100, epoch=other.take_epoch(owner={}, starts_from=None))
    with pytest.raises(CoverageError, match="another checkpoint of step 100"):
        copy_checkpoint(other.open(), target)


def test_steps_arrive_in_any_order() -> None:
    source, target = source_run("copy-c", steps=(100, 200, 300)), RunStore(MemoryStore("copy-c2"))
    for step in (200, 100, 300):
        copy_checkpoint(source.open(step), target)
    assert [(i.step, i.state) for i in target.checkpoints()] == [(100, "valid"), (200, "valid"), (300, "valid")]


class Breaking(WrappingStore):
    """Fails at its n-th stream."""

    def __init__(self, inner: MemoryStore, at: int) -> None:
        super().__init__(inner)
        self.left, self.streams = at, list[str]()

    def put_stream(self, key: str, blocks: object) -> int:
        self.left -= 1
        if self.left == 0:
            raise Unavailable("gone", key)
        self.streams.append(key)
        return self.inner.put_stream(key, blocks)  # type: ignore[arg-type]


def test_a_broken_copy_goes_on_where_it_was() -> None:
    source, memory = source_run("copy-d").open(), MemoryStore("copy-d2")
    with pytest.raises(Unavailable):
        copy_checkpoint(source, RunStore(Breaking(memory, 3)))
    with pytest.raises(NoCheckpoint):
        RunStore(memory).open()
    store = Breaking(memory, 0)
    done = copy_checkpoint(source, RunStore(store))
    assert store.streams == [step_folder(100) + pack_name(0, 0, 2)]
    assert done.copied_bytes == source.manifest.packs[2].nbytes
    assert done.epoch == 0, "the same epoch"
    assert RunStore(memory).open().verify().ok


def flip(store: MemoryStore, key: str) -> None:
    data = bytearray(store.get(key))
    data[len(data) // 3] ^= 16
    store.put(key, bytes(data))


def test_a_damaged_source_is_not_committed() -> None:
    run, target = source_run("copy-e"), RunStore(MemoryStore("copy-e2"))
    source = run.open()
    assert isinstance(run.store, MemoryStore)
    flip(run.store, source.prefix + source.manifest.packs[1].name)
    with pytest.raises(Damaged, match="crc32c"):
        copy_checkpoint(source, target)
    with pytest.raises(NoCheckpoint):
        target.open()
    assert not target.store.exists(step_folder(100) + pack_name(0, 0, 1)), "the next try sends it again"


class Lying(WrappingStore):
    """Stores other bytes than it is given."""

    def put_stream(self, key: str, blocks: object) -> int:
        data = bytearray(b"".join(bytes(b) for b in blocks))  # type: ignore[attr-defined]
        data[7] ^= 1
        self.inner.put(key, bytes(data))
        return len(data)

    def put(self, key: str, data: Bytes) -> None:
        self.inner.put(key, data)


def test_a_destination_that_lies_is_found_out() -> None:
    source = source_run("copy-f").open()
    with pytest.raises(Damaged):
        copy_checkpoint(source, RunStore(Lying(MemoryStore("copy-f2"))))


def test_a_training_run_is_not_fenced_by_accident() -> None:
    source, target = source_run("copy-g", steps=(300,)).open(), source_run("copy-g2", steps=(100,))
    with pytest.raises(Fenced, match="take-over"):
        copy_checkpoint(source, target)
    assert copy_checkpoint(source, target, take_over=True).commit is not None
    assert [i.step for i in target.checkpoints() if i.state == "valid"] == [100, 300]
