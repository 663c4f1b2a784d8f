"""Verification: whatever is changed in a stored checkpoint is found, and a load never gives wrong values for it."""

import random

import numpy as np
import pytest

from storage.box import Box
from storage.errors import StorageError
from storage.keys import step_folder
from storage.memory import MemoryStore
from storage.reader import Want
from storage.run import RunStore
from storage.zarr_view import reference_json
from tests.storage.building import SPECS, Values, random_values, save

VALUES = random_values(SPECS, 1)


@pytest.fixture
def run() -> RunStore:
    run = RunStore(MemoryStore())
    save(run, VALUES, step=10, epoch=run.take_epoch(owner={}), writers=3)
    return run


def keys(run: RunStore, ending: str) -> list[str]:
    return [info.key for info in run.store.list(step_folder(10)) if info.key.endswith(ending)]


def found_by_verify(run: RunStore) -> bool:
    try:
        return not run.open(10).verify().ok
    except StorageError:
        return True


def loaded(run: RunStore) -> Values | None:
    """What a load gives, or None if it raises."""
    wants = [Want(name, Box.whole(s.shape), np.empty(s.shape, f"<u{s.itemsize}")) for name, s in SPECS.items()]
    try:
        run.open(10).load(wants)
    except StorageError:
        return None
    return {want.array: want.destination for want in wants}


def loads_silently_wrong(run: RunStore) -> bool:
    values = loaded(run)
    return values is not None and any(values[name].tobytes() != VALUES[name].tobytes() for name in SPECS)


def test_a_good_checkpoint_is_reported_with_its_numbers(run: RunStore) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = run.open()
    report = checkpoint.verify(progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.complete
    assert report.num_arrays == 6
    assert report.read_bytes == checkpoint.manifest.nbytes
    assert report.digests == checkpoint.manifest.digests
    assert seen[-1] == (report.read_bytes, report.read_bytes)


def flip_random_bits(run: RunStore, rounds: int) -> None:
    rng = random.Random(0)
    objects = list(run.store.list(step_folder(10)))
    for _ in range(rounds):
        info = rng.choice(objects)
        good = run.store.get(info.key)
        bad = bytearray(good)
        bit = rng.randrange(8 * len(good))
        bad[bit // 8] ^= 1 << bit % 8
        run.store.put(info.key, bytes(bad))
        assert found_by_verify(run), f"bit {bit} of {info.key}"
        assert not loads_silently_wrong(run), f"bit {bit} of {info.key}"
        run.store.put(info.key, good)
    assert run.open().verify().ok


def test_every_flipped_bit_in_any_object_is_found(run: RunStore) -> None:
    flip_random_bits(run, 300)


@pytest.mark.slow
def test_every_one_of_very_many_flipped_bits_is_found(run: RunStore) -> None:
    flip_random_bits(run, 10_000)


def test_holes_and_truncations_are_found(run: RunStore) -> None:
    rng = random.Random(1)
    for key in keys(run, ""):
        good = run.store.get(key)
        for _ in range(8):
            start = rng.randrange(len(good))
            hole = good[:start] + bytes(min(64, len(good) - start)) + good[start + 64 :]
            for bad in (hole, good[:start], good + b"\0"):
                if bad == good:
                    continue
                run.store.put(key, bad)
                assert found_by_verify(run), key
                assert not loads_silently_wrong(run), key
        run.store.put(key, good)


def test_exchanged_packs_are_found(run: RunStore) -> None:
    """All checksums are right, only the values are another checkpoint's."""
    other = RunStore(MemoryStore())
    save(other, random_values(SPECS, 2), step=10, epoch=other.take_epoch(owner={}), writers=3)
    key = keys(run, ".pack")[0]
    run.store.put(key, other.store.get(key))
    report = run.open().verify()
    assert report.problems
    assert all("the digest is" in problem.reason for problem in report.problems)


@pytest.mark.parametrize("ending", [".pack", ".manifest", ".zarr.json"])
def test_missing_objects_are_found(run: RunStore, ending: str) -> None:
    run.store.delete(keys(run, ending)[0])
    assert found_by_verify(run)
    assert not loads_silently_wrong(run)


def test_a_checkpoint_that_loses_a_pack_while_it_is_open_is_reported_not_raised(run: RunStore) -> None:
    checkpoint = run.open()
    key = keys(run, ".pack")[1]
    run.store.delete(key)
    report = checkpoint.verify()
    assert key.rpartition("/")[2] in {problem.pack for problem in report.problems}
    assert any("the digest is" in problem.reason for problem in report.problems)


def test_all_damage_is_listed_with_array_pack_and_byte(run: RunStore) -> None:
    checkpoint = run.open()
    expected = set()
    for pack, part in checkpoint.manifest.parts:
        key = step_folder(10) + pack.name
        bad = bytearray(run.store.get(key))
        bad[part.position] ^= 1
        run.store.put(key, bytes(bad))
        expected.add((part.array, pack.name, part.position))
    chunks = {(p.array, p.pack, p.offset) for p in checkpoint.verify().problems if p.offset is not None}
    assert chunks == expected


def test_a_sample_reads_less_and_says_so(run: RunStore) -> None:
    sizes = {pack.nbytes for pack in run.open().manifest.packs}
    reports = [run.open().verify(sample=0.3, seed=seed) for seed in range(20)]
    assert all(report.ok for report in reports)
    assert {report.read_bytes for report in reports} > sizes  # one pack, or several, or all where the draw was empty
    assert all(report.complete == bool(report.digests) for report in reports)
    assert not all(report.complete for report in reports)
    with pytest.raises(ValueError, match="share"):
        run.open().verify(sample=0.0)


def test_a_view_that_was_moved_is_fine_and_another_one_is_not(run: RunStore) -> None:
    key = keys(run, ".zarr.json")[0]
    view = run.store.get(key)
    base = run.store.url_of(step_folder(10) + "x").removesuffix("/x").encode()
    assert base in view
    moved = reference_json(run.open().manifest, base_url="s3://elsewhere/copy")
    assert moved != view
    run.store.put(key, moved)
    assert run.open().verify().ok
    run.store.put(key, moved.replace(b"copy", b"cosy"))
    assert not run.open().verify().ok
    run.store.put(key, view.replace(b"float32", b"uint32", 1))
    assert not run.open().verify().ok
