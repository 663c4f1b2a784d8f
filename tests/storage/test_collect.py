"""Collection: commit first, packs after the grace period, and no crash or mistake that loses the last good checkpoint."""

import pytest

from storage.collect import CollectReport
from storage.errors import Fenced, NoSpace
from storage.keys import step_folder, tombstone_name
from storage.objects import Bytes, ObjectStore
from storage.retention import KeepBest, KeepLast, RetentionPolicy
from storage.run import RunStore
from tests.storage.building import SPECS, random_values, save, write_packs
from tests.storage.crashing import ClockStore, crash_everywhere
from tests.storage.test_commit import holds, states

VALUES = random_values(SPECS, 1)
GRACE = 3600.0
LAST: list[RetentionPolicy] = [KeepLast(1)]


@pytest.fixture
def store() -> ClockStore:
    return ClockStore()


@pytest.fixture
def run(store: ClockStore) -> RunStore:
    return RunStore(store, clock=lambda: store.now)


def collect(run: RunStore, policies: list[RetentionPolicy], **how: frozenset[str]) -> CollectReport:
    assert isinstance(run.store, ClockStore)
    return run.collect(policies, now_s=run.store.now, grace_s=GRACE, **how)


def names(store: ObjectStore, step: int) -> list[str]:
    return [info.key.removeprefix(step_folder(step)) for info in store.list(step_folder(step))]


def test_the_commit_goes_first_and_the_rest_after_the_grace_period(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    store.now += 10 * GRACE  # how old the packs are does not shorten the grace
    reader = run.open(10)
    report = collect(run, LAST)
    assert (report.kept, report.deleted_commits, report.deleted_objects) == ([20], [10], 0)
    assert states(run) == {10: "retired", 20: "valid"}
    assert holds(reader, VALUES)  # it had opened the checkpoint before
    store.now += GRACE - 1
    assert collect(run, LAST).deleted_objects == 0
    store.now += 1
    report = collect(run, LAST)
    assert report.deleted_objects == 4
    assert names(store, 10) == []
    assert report.freed_bytes > run.open().manifest.nbytes
    assert run.open().verify().ok


class FullStore(ClockStore):
    """Has no room for another object from now on; deleting one makes none, as if somebody else took it at once."""

    full = False

    def put(self, key: str, data: Bytes) -> None:
        if self.full:
            raise NoSpace("no space left on the device", key)
        super().put(key, data)


def test_what_is_deleted_already_is_swept_where_there_is_no_room_for_a_tombstone() -> None:
    """And what policies keep no more stays a checkpoint until there is, or until no grace is wanted."""
    store = FullStore()
    run = RunStore(store, clock=lambda: store.now)
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    collect(run, LAST)
    save(run, VALUES, step=30, epoch=epoch)
    store.full = True
    store.now += GRACE
    report = collect(run, LAST)
    assert (report.deleted_commits, report.deleted_objects) == ([], 4)
    assert any("step 20: no space left" in why for why in report.skipped)
    assert states(run) == {20: "valid", 30: "valid"}
    assert names(store, 10) == [], "its tombstone went with it"
    report = run.collect(LAST, now_s=store.now, grace_s=0.0)
    assert (report.deleted_commits, report.deleted_objects) == ([20], 4)
    assert states(run) == {30: "valid"}
    assert names(store, 20) == []
    assert run.open().verify().ok


def test_without_policies_nothing_is_deleted(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    store.now += 10 * GRACE
    assert collect(run, []).deleted_commits == []
    assert states(run) == {10: "valid", 20: "valid"}


def test_the_metric_of_the_commit_is_what_policies_see(run: RunStore) -> None:
    epoch = run.take_epoch(owner={})
    for step, loss in ((10, 2.0), (20, 1.0), (30, 3.0)):
        manifest = write_packs(run.store, VALUES, step=step, epoch=epoch)
        manifest.progress["eval_loss"] = loss
        run.commit(manifest)
    assert [info.metric for info in run.checkpoints()] == [2.0, 1.0, 3.0]
    assert collect(run, [KeepBest(1)]).kept == [20, 30]


def test_the_newest_checkpoint_that_opens_is_never_deleted(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20, 30):
        save(run, VALUES, step=step, epoch=epoch)
    store.put(step_folder(30) + "e0000-a0000.manifest", b"damaged")
    store.delete(run.pack_key(20, epoch, 0, 0))
    store.now += 10 * GRACE
    report = collect(run, LAST)
    assert report.kept == [10, 20, 30]
    assert len(report.skipped) == 2
    assert run.open().step == 10


def test_if_none_opens_none_is_deleted(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
        store.put(step_folder(step) + "e0000-a0000.manifest", b"damaged")
    store.now += 10 * GRACE
    before = store.snapshot()
    assert collect(run, LAST).deleted_commits == []
    assert store.snapshot() == before


def test_a_step_with_a_damaged_commit_is_left_alone(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    store.put(step_folder(10) + "commit-e0000.json", b"?")
    store.now += 10 * GRACE
    before = names(store, 10)
    report = collect(run, LAST)
    assert names(store, 10) == before
    assert "step 10" in report.skipped[0]


def test_fenced_checkpoints_are_deleted(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    heir = RunStore(store)
    heir.take_epoch(owner={}, starts_from=10)
    collect(heir, [KeepLast(5)])
    store.now += GRACE
    collect(heir, [KeepLast(5)])
    assert names(store, 20) == []
    assert states(heir) == {10: "valid"}


def orphan(run: RunStore, step: int, epoch: int, attempt: int) -> str:
    key = run.pack_key(step, epoch, attempt, 0)
    run.store.put(key, b"half a pack")
    return key


def test_packs_of_adopted_workers_are_left_alone(run: RunStore, store: ClockStore) -> None:
    """Workers that a new coordinator adopted write under the epoch they were started in: old, but not dead."""
    old = run.take_epoch(owner={})
    save(run, VALUES, step=10, epoch=old)
    heir = RunStore(store)
    save(heir, VALUES, step=15, epoch=heir.take_epoch(owner={}))
    adopted, dead = orphan(run, 20, old, 3), orphan(run, 20, old, 2)
    store.now += 10 * GRACE
    collect(heir, LAST, writers=frozenset({(old, 3)}))
    assert (store.exists(adopted), store.exists(dead)) == (True, False)


def test_orphans_of_dead_attempts_are_swept_after_the_grace_period(run: RunStore, store: ClockStore) -> None:
    old = run.take_epoch(owner={})
    save(run, VALUES, step=10, epoch=old)
    dead = [orphan(run, 15, old, 3), orphan(run, 10, old, 1)]
    heir = RunStore(store)
    epoch = heir.take_epoch(owner={})
    dead.append(orphan(heir, 20, epoch, 0))
    store.now += GRACE - 1
    at_work = [orphan(heir, 20, epoch, 1), orphan(heir, 30, epoch, 1)]
    collect(heir, LAST)
    assert all(store.exists(key) for key in dead)
    store.now += 1
    collect(heir, LAST, live=frozenset({dead[1], dead[2].rpartition("/")[2]}))
    assert [store.exists(key) for key in dead] == [False, True, True]
    store.now += 10 * GRACE
    collect(heir, LAST)
    assert not any(store.exists(key) for key in dead)
    assert all(store.exists(key) for key in at_work)  # the newest attempt of the newest epoch may be writing right now
    assert heir.open().verify().ok


def test_packs_of_an_earlier_epoch_that_a_commit_names_stay(run: RunStore, store: ClockStore) -> None:
    """A new coordinator commits what the keeper had stored under the epoch before."""
    old = run.take_epoch(owner={})
    manifest = write_packs(store, VALUES, step=10, epoch=old)
    heir = RunStore(store)
    epoch = heir.take_epoch(owner={})
    heir.commit(type(manifest)(**{**vars(manifest), "epoch": epoch}))
    store.now += 10 * GRACE
    collect(heir, LAST)
    assert heir.open().verify().ok
    assert holds(heir.open(), VALUES)


def test_an_epoch_that_was_replaced_deletes_nothing(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    RunStore(store).take_epoch(owner={})
    with pytest.raises(Fenced, match="epoch 1 owns the run"):
        collect(run, LAST)


def test_a_crash_at_any_point_of_a_collection_loses_nothing_and_the_next_one_finishes(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    collect(run, LAST)
    for step in (30, 40):
        save(run, VALUES, step=step, epoch=epoch)
    store.now += GRACE  # step 10's packs are due, the commits of 20 and 30 go now

    def act(dying: ObjectStore) -> None:
        RunStore(dying).collect(LAST, now_s=store.now, grace_s=GRACE, live=frozenset())

    left = crash_everywhere(store, act)
    assert len(left) > 2 * 9  # two tombstones, two commits, four objects, one tombstone, and the reads between them
    for remains in left:
        again = RunStore(remains)
        assert again.open().step == 40
        assert holds(again.open(), VALUES)
        for info in again.checkpoints():  # whatever is still visible reads back
            assert info.state != "valid" or again.open(info.step).verify().ok
        remains.now += GRACE
        collect(again, LAST)
        remains.now += GRACE
        collect(again, LAST)
        assert {info.key.split("/")[1] for info in remains.list("checkpoints/")} == {"step-00000040"}


def test_a_commit_that_outlived_its_tombstone_gets_a_new_grace_period(run: RunStore, store: ClockStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, VALUES, step=step, epoch=epoch)
    commit = store.get(step_folder(10) + "commit-e0000.json")
    collect(run, LAST)
    store.put(step_folder(10) + "commit-e0000.json", commit)  # as if it had crashed just before deleting it
    store.now += 10 * GRACE
    assert collect(run, LAST).deleted_commits == [10]
    assert store.exists(step_folder(10) + tombstone_name(0))
    assert len(names(store, 10)) == 5
