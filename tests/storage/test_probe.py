"""Where create-if-absent has more than one winner: found out, said, and worked around as far as it goes."""

import uuid
from collections.abc import Iterator

import pytest

from storage import epoch as epoch_module
from storage import probe
from storage.memory import MemoryStore
from storage.objects import check_store
from storage.probe import creates_atomically, forget_probes, probe_create
from storage.run import RunStore
from storage.testing import CountingStore
from storage.wrapper import WrappingStore
from tests.storage.building import SPECS, random_values, save

VALUES = random_values(SPECS, 1)


class Elsewhere(WrappingStore):
    """A store that does not know by itself what it is."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self._name = uuid.uuid4().hex

    @property
    def endpoint(self) -> str:
        return self._name


class IgnorantStore(Elsewhere):
    """As some S3 look-alikes: the header is ignored, every create "wins"."""

    def create(self, key: str, data: bytes) -> bool:
        self.inner.put(key, data)
        return True


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(epoch_module, "SETTLE_S", 0.0)
    forget_probes()
    yield
    forget_probes()


def test_it_is_probed_once_per_endpoint() -> None:
    store = CountingStore(Elsewhere(MemoryStore()))
    assert probe_create(store) is True
    asked = store.requests.total()
    assert asked >= 2 * probe.ROUNDS
    assert probe_create(store.child("run")) is True
    assert store.requests.total() == asked
    assert list(store.list()) == [], "nothing is left"


def test_what_knows_by_itself_is_not_asked() -> None:
    store = CountingStore(MemoryStore())
    assert probe_create(store) is True
    assert store.requests.total() == 0


def test_a_store_whose_creates_overwrite_is_found_out() -> None:
    store = IgnorantStore(MemoryStore())
    assert check_store(store) is False
    assert not creates_atomically(store)
    assert list(store.list()) == []


def test_there_a_commit_still_has_one_winner_and_nothing_is_overwritten() -> None:
    store = IgnorantStore(MemoryStore())
    check_store(store)
    run = RunStore(store)
    assert [run.take_epoch(owner={}), RunStore(store).take_epoch(owner={})] == [0, 1]
    run = RunStore(store)
    epoch = run.take_epoch(owner={})
    assert save(run, VALUES, step=10, epoch=epoch).created
    before = store.get("checkpoints/step-00000010/commit-e0002.json")
    assert not save(run, random_values(SPECS, 2), step=10, epoch=epoch, attempt=1).created
    assert store.get("checkpoints/step-00000010/commit-e0002.json") == before


def test_a_racer_that_wrote_later_has_won() -> None:
    class Raced(IgnorantStore):
        def create(self, key: str, data: bytes) -> bool:
            self.inner.put(key, data)
            self.inner.put(key, other)
            return True

    inner = MemoryStore()
    RunStore(inner).take_epoch(owner={"host": "b"})
    other = inner.get("epochs/e0000.json")
    inner.delete("epochs/e0000.json")
    store = Raced(inner)
    assert check_store(IgnorantStore(MemoryStore())) is False
    probe._found[store.endpoint] = False
    record = epoch_module.EpochRecord(epoch=0, starts_from=None, owner={}, nonce="mine", created_s=0.0)
    assert epoch_module.create_record(store, "epochs/e0000.json", record, "mine") is False
