"""Who holds a run: told from any machine, by the store's clock."""

import pytest

from storage.lease import HELD_KEY, read_holder, release, renew
from storage.memory import MemoryStore
from storage.run import RunStore
from tests.storage.crashing import ClockStore

HERE = {"host": "a", "pid": 1}


@pytest.fixture
def store() -> ClockStore:
    return ClockStore(now=50.0)


def test_nobody_holds_a_run_that_nobody_took(store: ClockStore) -> None:
    assert read_holder(store) is None


def test_a_lease_runs_out_by_the_clock_of_the_store(store: ClockStore) -> None:
    renew(store, epoch=3, owner=HERE, lease_s=60.0)
    store.now += 20
    held = read_holder(store, clock=lambda: 1e12)  # this host's clock is of no interest
    assert held is not None
    assert (held.record.owner, held.record.epoch, held.left_s, held.over) == (HERE, 3, 40.0, False)
    store.now += 41
    assert read_holder(store).over  # type: ignore[union-attr]
    renew(store, epoch=3, owner=HERE, lease_s=60.0)
    assert not read_holder(store).over  # type: ignore[union-attr]
    assert [info.key for info in store.list()] == [HELD_KEY]


def test_where_the_store_tells_no_time_the_clocks_of_the_hosts_must_do() -> None:
    class Timeless(ClockStore):
        pass

    store = Timeless(now=0.0)
    renew(store, epoch=0, owner=HERE, lease_s=60.0)
    held = read_holder(store, clock=lambda: read_holder(store).record.renewed_s + 61)  # type: ignore[union-attr]
    assert held is not None
    assert held.over


def test_a_run_that_was_let_go_is_free_at_once(store: ClockStore) -> None:
    renew(store, epoch=3, owner=HERE, lease_s=60.0)
    release(store, epoch=3, owner=HERE)
    assert read_holder(store).over  # type: ignore[union-attr]


def test_an_old_holder_does_not_let_go_for_the_new_one(store: ClockStore) -> None:
    renew(store, epoch=4, owner={"host": "b"}, lease_s=60.0)
    release(store, epoch=3, owner=HERE)
    held = read_holder(store)
    assert held is not None
    assert (held.over, held.record.owner) == (False, {"host": "b"})


def test_a_damaged_record_is_no_holder_and_no_epoch() -> None:
    store = MemoryStore()
    renew(store, epoch=0, owner=HERE, lease_s=60.0)
    assert RunStore(store).take_epoch(owner={}) == 0
    store.put(HELD_KEY, b"?")
    assert read_holder(store) is None
