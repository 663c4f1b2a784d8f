"""Healing compressed packs: the identical bytes come back, or none do."""

import pytest

from storage import heal_compressed
from storage.compress import Compressor, compress
from storage.copy import copy_checkpoint
from storage.errors import Damaged
from storage.heal import heal
from storage.keys import step_folder
from storage.memory import MemoryStore
from storage.objects import ByteRange
from storage.pack import ArraySpec, PartGeometry
from storage.run import RunStore
from storage.testing import flip_bit, swap, zero
from tests.storage import building
from tests.storage.building import COMPRESSIBLE, random_values, save, smooth_values
from tests.storage.crashing import ClockStore, crash_everywhere
from tests.storage.test_heal import contents, damage_everything, packs

LZ4, ZSTD = Compressor(), Compressor(cname="zstd", clevel=3)
VALUES = smooth_values(COMPRESSIBLE, 1)


@pytest.fixture(autouse=True)
def specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SPECS", COMPRESSIBLE)


@pytest.fixture
def store() -> ClockStore:
    """Another state at step 5, ours at step 10, in three packs each."""
    store = ClockStore()
    run = RunStore(store, clock=lambda: 5000.0)
    epoch = run.take_epoch(owner={})
    save(run, smooth_values(COMPRESSIBLE, 9), step=5, epoch=epoch, writers=3, compressor=LZ4)
    save(run, VALUES, step=10, epoch=epoch, writers=3, compressor=LZ4)
    return store


def donor(compressor: Compressor | None, *, dim: int = 1, writers: int = 2) -> RunStore:
    """The same state of another run, under another cut."""
    run = RunStore(MemoryStore())
    save(run, VALUES, step=10, epoch=run.take_epoch(owner={}), writers=writers, dim=dim, compressor=compressor)
    return run


@pytest.mark.parametrize("compressor", [None, LZ4, ZSTD], ids=str)
def test_identical_bytes_come_back_however_the_donor_is_compressed(store: ClockStore, compressor: Compressor | None) -> None:
    before = contents(store)
    damage_everything(store, 1)
    report = heal(store, 10, [donor(compressor).open()])
    assert contents(store) == before
    assert report.num_chunks > 0


def test_a_damaged_table_of_lengths_comes_back(store: ClockStore) -> None:
    """Then nothing of that part can be found here, and all of it comes from the donor; the other parts stay."""
    before, manifest = contents(store), RunStore(store).open(10).manifest
    assert manifest.stored is not None
    end = int(manifest.table.position[1] + manifest.stored[1])
    key = step_folder(10) + manifest.packs[int(manifest.table.pack[1])].name
    flip_bit(store, key, 8 * (end - 9))
    spec, part = manifest.arrays[int(manifest.table.array[1])], manifest.table.part(1, manifest.arrays)
    assert heal(store, 10, [donor(None).open()]).num_chunks == PartGeometry.of(spec, part.shape).num_chunks
    assert contents(store) == before


def test_an_uncompressed_pack_is_healed_from_a_compressed_copy() -> None:
    plain = donor(None).store
    before = contents(plain)
    flip_bit(plain, packs(plain)[0], 8 * 3)
    assert heal(plain, 10, [donor(LZ4).open()]).num_chunks == 1
    assert contents(plain) == before


def test_packs_of_another_checkpoint_are_replaced(store: ClockStore) -> None:
    """Also where a chunk of theirs is damaged, so that nothing but the sum of the checksums shows whose they are."""
    before = contents(store)
    first, second = packs(store, 5)[0], packs(store, 10)[0]
    swap(store, first, second)
    flip_bit(store, second, 8 * 20)
    heal(store, 10, [donor(LZ4).open()])
    assert contents(store)[second] == before[second]
    assert RunStore(store).open(10).verify().ok


def test_a_compressor_that_makes_other_bytes_writes_nothing(store: ClockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise has the same length under any compressor, so only the checksums in the manifest tell."""
    run, specs = RunStore(store), {name: COMPRESSIBLE[name] for name in ("exp_avg/layers.0.wq", "master/layers.0.wq")}
    monkeypatch.setattr(building, "SPECS", specs)
    noise = random_values(specs, 4)
    save(run, noise, step=20, epoch=0, writers=2, compressor=LZ4)
    plain, pressed = RunStore(MemoryStore()), RunStore(MemoryStore())
    for other, compressor in ((plain, None), (pressed, LZ4)):
        save(other, noise, step=20, epoch=other.take_epoch(owner={}), writers=3, compressor=compressor)
    before = contents(store)
    key = packs(store, 20)[0]
    flip_bit(store, key, 8 * 20)
    damaged = contents(store)
    monkeypatch.setattr(heal_compressed, "compress", lambda values, compressor, size: compress(values, ZSTD, size))
    with pytest.raises(Damaged, match=r"not the bytes that were committed.*copy the donor's checkpoint instead"):
        heal(store, 20, [plain.open()])
    assert contents(store) == damaged
    heal(store, 20, [plain.open(), pressed.open()])
    assert contents(store) == before, "bytes that are copied need no compressor"


class CountingStore(MemoryStore):
    """How much was asked for, and how often."""

    requests = 0

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        self.requests += 1
        return super().get_range(key, rng)


def test_a_lost_pack_comes_back_in_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte has 65,000 chunks, and a mirror may be far away."""
    specs = {"master/w": ArraySpec(name="master/w", shape=(512, 64), dtype="float32", tile=(1, 64))}
    monkeypatch.setattr(building, "SPECS", specs)
    values = smooth_values(specs, 1)
    run, mirror = RunStore(MemoryStore()), RunStore(CountingStore())
    for each, writers in ((run, 2), (mirror, 3)):
        save(each, values, step=10, epoch=each.take_epoch(owner={}), writers=writers, compressor=LZ4)
    before = contents(run.store)
    source = mirror.open()
    run.store.delete(packs(run.store)[1])
    assert heal(run.store, 10, [source]).num_chunks == 256
    assert contents(run.store) == before
    assert isinstance(mirror.store, CountingStore)
    assert mirror.store.requests < 30


def test_where_no_copy_has_it_nothing_is_written(store: ClockStore) -> None:
    source = donor(ZSTD)
    for key in packs(source.store):
        zero(source.store, key, ByteRange(0, source.store.size(key)))
    flip_bit(store, packs(store)[0], 8 * 20)
    damaged = contents(store)
    with pytest.raises(Damaged, match="no donor has the same bytes"):
        heal(store, 10, [source.open()])
    assert contents(store) == damaged


def test_a_damaged_manifest_and_commit_come_back_from_a_copy(store: ClockStore) -> None:
    mirror = RunStore(MemoryStore())
    mirror.take_epoch(owner={"copy_of": "something before"}, starts_from=None)
    copy_checkpoint(RunStore(store).open(10), mirror)
    before = contents(store)
    for name in ("e0000-a0000.manifest", "commit-e0000.json", "e0000-a0000.zarr.json"):
        flip_bit(store, step_folder(10) + name, 300)
    heal(store, 10, [mirror.open()])
    assert contents(store) == before


@pytest.mark.slow
def test_a_crash_at_any_point_makes_nothing_worse_and_the_next_try_finishes(store: ClockStore) -> None:
    before = contents(store)
    damage_everything(store, 3)
    wrong = {key for key in before if key not in contents(store) or contents(store)[key] != before[key]}
    for remains in crash_everywhere(store, lambda dying: heal(dying, 10, [donor(None).open()])):
        after = contents(remains)
        assert {key for key in before if after.get(key) != before[key]} <= wrong
        heal(remains, 10, [donor(None).open()])
        assert contents(remains) == before
