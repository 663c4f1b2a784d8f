"""A plan made on an overlay is what then happens, and making it changes nothing."""

from __future__ import annotations

import pytest

from storage.errors import ObjectMissing
from storage.memory import MemoryStore
from storage.overlay import OverlayStore
from storage.retention import KeepEvery, KeepLast
from storage.run import RunStore
from tests.storage.building import SPECS, random_values, save


def contents(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list()}


@pytest.mark.parametrize("grace_s", [0.0, 3600.0])
def test_the_plan_of_a_collection_is_what_is_done(grace_s: float) -> None:
    memory = MemoryStore(f"overlay-{grace_s}")
    run = RunStore(memory)
    epoch = run.take_epoch(owner={}, starts_from=None)
    for step in (100, 200, 300, 400):
        save(run, random_values(SPECS, step), step=step, epoch=epoch, attempt=step // 100)
    policies, before = [KeepLast(1), KeepEvery(200)], contents(memory)
    overlay = OverlayStore(memory)
    plan = RunStore(overlay).collect(policies, now_s=2e9, grace_s=grace_s)
    assert contents(memory) == before
    done = run.collect(policies, now_s=2e9, grace_s=grace_s)
    assert plan == done
    assert sorted(plan.deleted_commits) == [100, 300]
    assert set(overlay.deleted) == set(before) - set(contents(memory))
    assert (plan.freed_bytes > 0) == (grace_s == 0)


def test_reads_see_what_was_written_and_not_what_was_deleted() -> None:
    memory = MemoryStore("overlay-reads")
    memory.put("a", b"1")
    memory.put("b", b"22")
    overlay = OverlayStore(memory)
    overlay.put("a", b"new")
    overlay.delete("b")
    assert overlay.create("c", b"3")
    assert not overlay.create("a", b"x")
    assert [(info.key, info.size) for info in overlay.list()] == [("a", 3), ("c", 1)]
    assert overlay.get("a") == b"new"
    assert not overlay.exists("b")
    with pytest.raises(ObjectMissing):
        overlay.get("b")
    overlay.delete("a")
    assert [info.key for info in overlay.list()] == ["c"]
    assert memory.get("a") == b"1"
