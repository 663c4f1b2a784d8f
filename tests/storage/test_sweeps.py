"""Crashes at every operation of falling back and of changing the epoch, and damage of every kind, in numbers."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from storage.box import Box
from storage.compress import Compressor
from storage.digest import digest_box
from storage.errors import Fenced, StorageError
from storage.keys import step_folder
from storage.memory import MemoryStore
from storage.objects import ByteRange, ObjectStore
from storage.pack import ArraySpec, PartGeometry
from storage.reader import Want
from storage.run import RunStore
from storage.testing import swap, truncate, zero
from tests.storage import building
from tests.storage.building import SPECS, Values, random_values, save, smooth_values, write_packs
from tests.storage.crashing import ClockStore, crash_everywhere
from tests.storage.test_commit import holds, states

OLD, NEW, OTHER = (random_values(SPECS, seed) for seed in (1, 2, 3))
PAGE = 4096


@pytest.fixture
def store() -> ClockStore:
    """Steps 10 and 20 whole, 30 damaged in a way that only a load sees."""
    store = ClockStore()
    run = RunStore(store)
    epoch = run.take_epoch(owner={})
    for step in (10, 20, 30):
        save(run, OLD if step < 30 else NEW, step=step, epoch=epoch)
    key = run.pack_key(30, epoch, 0, 0)
    data = bytearray(store.get(key))
    data[0] ^= 1
    store.put(key, bytes(data))
    return store


def fall_back(store: ObjectStore) -> None:
    """What a restart does: the newest fails its check, the one before loads, a new epoch goes on from there and saves."""
    run = RunStore(store)
    newest = run.open()
    report = newest.verify()
    older = run.open(without={newest.step: report.problems[0].reason}) if not report.ok else newest
    epoch = run.take_epoch(owner={}, starts_from=older.step)
    save(run, OTHER, step=older.step + 5, epoch=epoch)


def test_a_crash_at_any_point_of_a_fall_back_loses_nothing(store: ClockStore) -> None:
    left = crash_everywhere(store, fall_back)
    assert len(left) > 40
    seen = set()
    for remains in left:
        run = RunStore(remains)
        newest = run.open()
        seen.add(newest.step)
        assert newest.step in (20, 25, 30), "the new one, what it goes on from, or still the damaged one"
        assert holds(run.open(20), OLD)
        assert holds(run.open(10), OLD)
        if newest.step == 30:
            fall_back(remains)  # the next start does what this one did not finish
            newest = run.open()
        assert states(run)[30] == "fenced"
        assert newest.verify().ok
        assert RunStore(remains).open(20).verify().ok
    assert seen == {20, 25, 30}


def test_a_crash_at_any_point_of_an_epoch_change_leaves_one_history(store: ClockStore) -> None:
    """A roll-back to 10: before the record stands everything counts as before, after it nothing newer does."""
    zombie = RunStore(store)
    late = write_packs(store, NEW, step=40, epoch=0)

    def change(dying: ObjectStore) -> None:
        RunStore(dying).take_epoch(owner={}, starts_from=10)

    left = crash_everywhere(store, change)
    histories = set()
    for remains in left:
        run = RunStore(remains)
        found = states(run)
        histories.add(tuple(sorted(found.items())))
        rolled_back = found[20] == "fenced"
        try:
            RunStore(remains).commit(late)
        except Fenced:
            assert rolled_back, "a zombie is refused only by a history that went on without it"
            assert states(run) == found, "and the new history is unharmed"
        else:
            assert not rolled_back
        assert holds(run.open(10), OLD)
    assert len(histories) == 2
    assert zombie.open().step == 30, "the original is untouched"


# -- damage ----------------------------------------------------------------------------------------------------------------

LARGE = {
    spec.name: spec
    for spec in (
        ArraySpec(name="master/w", shape=(96, 200), dtype="float32", tile=(8, 100)),
        ArraySpec(name="weights/w", shape=(96, 200), dtype="bfloat16", tile=(8, 100)),
        ArraySpec(name="exp_avg/w", shape=(96, 200), dtype="float32", tile=(8, 100)),
        ArraySpec(name="master/norm", shape=(200,), dtype="float32", tile=(200,)),
    )
}
LARGE_VALUES = smooth_values(LARGE, 4)


@pytest.fixture(params=[None, Compressor()], ids=str)
def run(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RunStore:
    """Packs of tens of kilobytes, so that a hole of a page leaves most of them whole."""
    monkeypatch.setattr(building, "SPECS", LARGE)
    run = RunStore(MemoryStore())
    epoch = run.take_epoch(owner={})
    save(run, random_values(LARGE, 5), step=5, epoch=epoch, writers=3, compressor=request.param)
    save(run, LARGE_VALUES, step=10, epoch=epoch, writers=3, compressor=request.param)
    return run


def verified(run: RunStore) -> bool:
    try:
        return run.open(10).verify().ok
    except StorageError:
        return False


def loaded(run: RunStore) -> Values | None:
    """What a load of everything gives, digests compared as every restore does; None if it says that it is not right."""
    wants = [Want(name, Box.whole(s.shape), np.empty(s.shape, f"<u{s.itemsize}")) for name, s in LARGE.items()]
    try:
        checkpoint = run.open(10)
        checkpoint.load(wants)
    except StorageError:
        return None
    values = {want.array: want.destination.view(f"<u{want.destination.dtype.itemsize}") for want in wants}
    proofs = {name: digest_box(values[name], LARGE[name].shape, Box.whole(LARGE[name].shape)) for name in LARGE}
    return values if proofs == checkpoint.manifest.digests else None


def in_a_gap(run: RunStore, key: str, good: bytes) -> bool:
    """Whether nothing but bytes between the parts of a pack is wrong: they hold nothing, and no load reads them."""
    wrong = {at for at, (a, b) in enumerate(zip(run.store.get(key), good, strict=True)) if a != b}
    manifest = run.open(10).manifest
    for row, (pack, part) in enumerate(manifest.parts):
        if key.endswith(pack.name):
            plain = PartGeometry.of(LARGE[part.array], part.shape).nbytes
            nbytes = plain if manifest.stored is None else int(manifest.stored[row])
            wrong -= set(range(part.position, part.position + nbytes))
    return bool(wrong)


def check_found(run: RunStore, key: str, good: bytes, what: str) -> None:
    assert not verified(run), f"verify missed {what} of {key}"
    values = loaded(run)
    if key.endswith(".pack"):
        assert values is None or in_a_gap(run, key, good), f"a load missed {what} of {key}"
    elif values is not None:  # the Zarr view is not what a load reads
        assert ".zarr" in key, key
    if values is not None:
        assert all(values[name].tobytes() == LARGE_VALUES[name].tobytes() for name in LARGE)
    run.store.put(key, good)


Damage = Callable[[RunStore, str, random.Random], str]


def hole(run: RunStore, key: str, rng: random.Random) -> str:
    size = run.store.size(key)
    start = rng.randrange(0, max(1, size - PAGE))
    zero(run.store, key, ByteRange(start, min(start + PAGE, size)))
    return f"a hole at {start}"


def flip(run: RunStore, key: str, rng: random.Random) -> str:
    data = bytearray(run.store.get(key))
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    run.store.put(key, bytes(data))
    return f"bit {bit}"


def cut(run: RunStore, key: str, rng: random.Random) -> str:
    size = rng.randrange(run.store.size(key))
    truncate(run.store, key, size)
    return f"a cut to {size}"


def lose(run: RunStore, key: str, rng: random.Random) -> str:
    run.store.delete(key)
    return "the loss"


def inflict(run: RunStore, act: Damage, rounds: int, *, only: str = "") -> None:
    rng = random.Random(7)
    keys = [info.key for info in run.store.list(step_folder(10)) if info.key.endswith(only)]
    for _ in range(rounds):
        key = rng.choice(keys)
        good = run.store.get(key)
        what = act(run, key, rng)
        if not run.store.exists(key) or run.store.get(key) != good:
            check_found(run, key, good, what)
    assert verified(run)
    assert loaded(run) is not None


@pytest.mark.parametrize(("act", "rounds"), [(flip, 150), (hole, 60), (cut, 40), (lose, 12)])
def test_damage_is_found_by_verify_and_by_load(run: RunStore, act: Damage, rounds: int) -> None:
    inflict(run, act, rounds // 4 if run.open(10).manifest.compressor else rounds)


@pytest.mark.slow
@pytest.mark.parametrize(("act", "rounds"), [(flip, 10_000), (hole, 1_000), (cut, 1_000), (lose, 100)])
def test_very_much_damage_is_found_by_verify_and_by_load(run: RunStore, act: Damage, rounds: int) -> None:
    inflict(run, act, rounds // 4 if run.open(10).manifest.compressor else rounds)


def test_swapped_packs_are_found_by_verify_and_by_load(run: RunStore) -> None:
    """Of the same step, and of another one whose every checksum is right."""
    mine = [info.key for info in run.store.list(step_folder(10)) if info.key.endswith(".pack")]
    other = [info.key for info in run.store.list(step_folder(5)) if info.key.endswith(".pack")]
    pairs = [(a, b) for i, a in enumerate(mine) for b in mine[i + 1 :]] + list(zip(mine, other, strict=True))
    for first, second in pairs:
        swap(run.store, first, second)
        assert not verified(run)
        assert loaded(run) is None
        swap(run.store, first, second)
    assert verified(run)
