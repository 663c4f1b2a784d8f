"""Healing: identical bytes come back from a copy that verifies, whatever was damaged, and a crash makes nothing worse."""

import random

import pytest

from storage.copy import copy_checkpoint
from storage.errors import Damaged, FormatError, NoCheckpoint
from storage.heal import heal
from storage.keys import step_folder
from storage.memory import MemoryStore
from storage.objects import ByteRange, ObjectStore
from storage.run import RunStore
from storage.testing import flip_bit, swap, truncate, zero
from tests.storage.building import SPECS, random_values, save
from tests.storage.crashing import ClockStore, crash_everywhere

VALUES = random_values(SPECS, 1)


def contents(store: ObjectStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list()}


@pytest.fixture
def store() -> ClockStore:
    store = ClockStore()
    run = RunStore(store, clock=lambda: 5000.0)
    epoch = run.take_epoch(owner={})
    save(run, random_values(SPECS, 9), step=5, epoch=epoch, writers=3)
    save(run, VALUES, step=10, epoch=epoch, writers=3)
    return store


@pytest.fixture
def donor() -> RunStore:
    """The same state of another run, written by another number of writers under another cut."""
    run = RunStore(MemoryStore())
    run.take_epoch(owner={})
    save(run, VALUES, step=10, epoch=run.take_epoch(owner={}), writers=2, dim=1)
    return run


def packs(store: ObjectStore, step: int = 10) -> list[str]:
    return [info.key for info in store.list(step_folder(step)) if info.key.endswith(".pack")]


def damage_everything(store: ObjectStore, seed: int) -> None:
    rng = random.Random(seed)
    first, second, third = packs(store)
    for _ in range(5):
        flip_bit(store, first, rng.randrange(8 * store.size(first)))
    zero(store, second, ByteRange(64, 164))
    truncate(store, second, store.size(second) - 40)
    store.delete(third)
    store.put(step_folder(10) + "e0000-a0000.zarr.json", b"{}")


@pytest.mark.parametrize("seed", range(5))
def test_identical_bytes_come_back(store: ClockStore, donor: RunStore, seed: int) -> None:
    before = contents(store)
    damage_everything(store, seed)
    report = heal(store, 10, [donor.open()])
    assert contents(store) == before
    assert len(report.objects) == 4
    assert report.before
    assert report.num_chunks > 0
    assert RunStore(store).open().verify().ok


def test_what_was_wrong_is_counted_not_what_was_read_with_it(store: ClockStore, donor: RunStore) -> None:
    flip_bit(store, packs(store)[0], 8 * 3)
    report = heal(store, 10, [donor.open()])
    assert (report.num_chunks, report.objects) == (1, [packs(store)[0]])


def test_what_is_whole_is_not_touched(store: ClockStore, donor: RunStore) -> None:
    store.now += 1
    assert heal(store, 10, [donor.open()]).objects == []
    assert all(info.modified_s < store.now for info in store.list())


def test_packs_of_another_checkpoint_are_found_by_the_digests_and_replaced(store: ClockStore, donor: RunStore) -> None:
    before = contents(store)
    swap(store, packs(store, 5)[0], packs(store, 10)[0])
    heal(store, 10, [donor.open()])
    assert contents(store)[packs(store, 10)[0]] == before[packs(store, 10)[0]]
    assert RunStore(store).open(10).verify().ok


def test_two_copies_damaged_in_different_places_make_a_whole_one(store: ClockStore, donor: RunStore) -> None:
    before = contents(store)
    pack = packs(store)[0]
    positions = {part.array: part.position for p, part in RunStore(store).open(10).manifest.parts if pack.endswith(p.name)}
    assert len(positions) > 1
    flip_bit(store, pack, 8 * min(positions.values()))
    manifest = donor.open().manifest
    part = next(part for p, part in manifest.parts if p.name == manifest.packs[0].name)
    spec = manifest.array(part.array)
    last = part.position + (part.shape[0] // spec.tile[0] - 1) * (spec.tile[0] * spec.tile[1] * spec.itemsize + 4)
    flip_bit(donor.store, donor.pack_key(10, 1, 0, 0), 8 * last)
    heal(store, 10, [donor.open()])
    assert contents(store) == before


def test_where_no_copy_has_it_nothing_is_written(store: ClockStore, donor: RunStore) -> None:
    damage_everything(store, 0)
    for info in list(donor.store.list(step_folder(10))):
        if info.key.endswith(".pack"):
            zero(donor.store, info.key, ByteRange(0, info.size))
    store.put(step_folder(10) + "e0000-a0000.zarr.json", RunStore(store).open(5) and b"{}")
    damaged = {key: data for key, data in contents(store).items() if key.endswith(".pack")}
    with pytest.raises(Damaged, match="in every donor"):
        heal(store, 10, [donor.open()])
    assert {key: data for key, data in contents(store).items() if key.endswith(".pack")} == damaged


def test_another_state_is_no_donor(store: ClockStore) -> None:
    other = RunStore(MemoryStore())
    save(other, random_values(SPECS, 2), step=10, epoch=other.take_epoch(owner={}))
    flip_bit(store, packs(store)[0], 0)
    with pytest.raises(Damaged, match="no donor holds the same state"):
        heal(store, 10, [other.open()])
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 7"):
        heal(store, 7, [other.open()])


def test_a_damaged_manifest_comes_back_if_the_copy_has_the_same_one(store: ClockStore, donor: RunStore) -> None:
    twin = RunStore(store.copy()).open(10)
    before = contents(store)
    key = step_folder(10) + "e0000-a0000.manifest"
    flip_bit(store, key, 300)
    with pytest.raises(FormatError, match="no donor's manifest"):
        heal(store, 10, [donor.open()])
    assert heal(store, 10, [donor.open(), twin]).objects == [key]
    assert contents(store) == before


COMMIT = step_folder(10) + "commit-e0000.json"


@pytest.fixture
def copy(store: ClockStore) -> RunStore:
    """What `ckpt cp` and the mirror make: another epoch, other names, the same state."""
    mirror = RunStore(MemoryStore())
    mirror.take_epoch(owner={"copy_of": "something before"}, starts_from=None)
    copy_checkpoint(RunStore(store).open(10), mirror)
    return mirror


@pytest.mark.parametrize("also", ["", "e0000-a0000.manifest", "e0000-a0000-r00001.pack"])
@pytest.mark.parametrize("kind", ["twin", "copy"])
def test_a_damaged_commit_comes_back_from_whoever_kept_its_bytes(
    store: ClockStore, copy: RunStore, kind: str, also: str
) -> None:
    donors = [copy.open(10)] if kind == "copy" else [RunStore(store.copy()).open(10)]
    before = contents(store)
    flip_bit(store, COMMIT, 200)
    if also:
        flip_bit(store, step_folder(10) + also, 300)
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 10"):
        RunStore(store).open(10)
    assert COMMIT in heal(store, 10, donors).objects
    assert contents(store) == before
    assert RunStore(store).open(10).verify().ok


def test_a_commit_of_something_else_is_not_put_back(store: ClockStore, donor: RunStore) -> None:
    """Of another run under the same key, and of the same run with another manifest: then the step stays damaged."""
    other = RunStore(ClockStore(), clock=lambda: 7000.0)
    save(other, VALUES, step=10, epoch=other.take_epoch(owner={}), writers=2)
    flip_bit(store, COMMIT, 200)
    for also in (None, step_folder(10) + "e0000-a0000.manifest"):
        if also is not None:
            flip_bit(store, also, 300)
        before = contents(store)
        for donors in ([donor.open()], [other.open()]):
            with pytest.raises(NoCheckpoint, match="cannot be healed: it is damaged"):
                heal(store, 10, donors)
        assert contents(store) == before


def test_a_commit_that_is_gone_stays_gone(store: ClockStore, copy: RunStore) -> None:
    store.delete(COMMIT)
    with pytest.raises(NoCheckpoint, match="it is incomplete"):
        heal(store, 10, [copy.open(10)])
    assert not store.exists(COMMIT)


def test_a_crash_at_any_point_of_healing_a_commit_makes_nothing_worse(store: ClockStore, copy: RunStore) -> None:
    before = contents(store)
    flip_bit(store, COMMIT, 200)
    flip_bit(store, step_folder(10) + "e0000-a0000.manifest", 300)
    for remains in crash_everywhere(store, lambda dying: heal(dying, 10, [copy.open(10)])):
        assert RunStore(remains).open(None).step in (5, 10)
        heal(remains, 10, [copy.open(10)])
        assert contents(remains) == before


def test_a_crash_at_any_point_makes_nothing_worse_and_the_next_try_finishes(store: ClockStore, donor: RunStore) -> None:
    before = contents(store)
    damage_everything(store, 3)
    wrong = {key for key in before if key not in contents(store) or contents(store)[key] != before[key]}
    left = crash_everywhere(store, lambda dying: heal(dying, 10, [donor.open()]))
    assert len(left) > 20
    for remains in left:
        after = contents(remains)
        assert {key for key in before if after.get(key) != before[key]} <= wrong
        heal(remains, 10, [donor.open()])
        assert contents(remains) == before
