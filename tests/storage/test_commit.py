"""Epochs and commits: who may commit, what counts, and what is visible after a crash at any point."""

import pytest

from storage.catalog import CheckpointState
from storage.checkpoint import Checkpoint
from storage.errors import Damaged, Fenced, FormatError, NoCheckpoint, ObjectMissing
from storage.keys import commit_name, epoch_key, parse_key, step_folder
from storage.memory import MemoryStore
from storage.objects import ObjectStore
from storage.run import RunStore
from storage.wrapper import WrappingStore
from tests.storage.building import SPECS, random_values, save, write_packs
from tests.storage.crashing import ClockStore, crash_everywhere

OLD, NEW = random_values(SPECS, 1), random_values(SPECS, 2)


@pytest.fixture
def run() -> RunStore:
    return RunStore(MemoryStore(), clock=lambda: 5000.0)


def holds(checkpoint: Checkpoint, values: dict[str, object]) -> bool:
    return all(checkpoint.read(name).tobytes() == values[name].tobytes() for name in SPECS)  # type: ignore[attr-defined]


def states(run: RunStore) -> dict[int, str]:
    return {info.step: info.state.value for info in run.checkpoints()}


def test_a_commit_makes_a_checkpoint_that_reads_back(run: RunStore) -> None:
    epoch = run.take_epoch(owner={"host": "a"})
    ref = save(run, OLD, step=10, epoch=epoch, attempt=3)
    assert (ref.created, ref.step, ref.epoch, ref.attempt) == (True, 10, 0, 3)
    (info,) = run.checkpoints()
    assert (info.state, info.epoch, info.attempt, info.step, info.created_s) == (CheckpointState.VALID, 0, 3, 10, 5000.0)
    opened = run.open()
    assert holds(opened, OLD)
    assert opened.progress == {"step": 10, "tokens": 100}
    assert opened.passed_over == []
    assert opened.verify().ok


def test_nothing_is_there_before_the_commit(run: RunStore) -> None:
    epoch = run.take_epoch(owner={})
    write_packs(run.store, OLD, step=10, epoch=epoch)
    assert states(run) == {10: "incomplete"}
    with pytest.raises(NoCheckpoint) as caught:
        run.open()
    assert caught.value.candidates == ("step 10: incomplete: there is no commit",)


def test_epoch_numbers_are_given_once(run: RunStore) -> None:
    assert [RunStore(run.store).take_epoch(owner={"n": n}) for n in range(4)] == [0, 1, 2, 3]


def test_a_roll_back_fences_what_came_after_and_a_zombie_that_comes_late(run: RunStore) -> None:
    zombie = run.take_epoch(owner={})
    for step in (10, 20, 30):
        save(run, OLD, step=step, epoch=zombie)
    late = write_packs(run.store, OLD, step=40, epoch=zombie)
    heir = RunStore(run.store)
    epoch = heir.take_epoch(owner={}, starts_from=20)
    assert states(heir) == {10: "valid", 20: "valid", 30: "fenced", 40: "incomplete"}
    with pytest.raises(Fenced, match="epoch 1 went on from step 20"):
        run.commit(late)
    save(heir, NEW, step=30, epoch=epoch)
    assert states(heir)[30] == "valid"
    assert holds(heir.open(), NEW)


def test_an_owner_that_was_replaced_cannot_take_the_run_back_by_going_back(run: RunStore) -> None:
    save(run, OLD, step=10, epoch=run.take_epoch(owner={"host": "a"}))
    assert run.take_epoch(owner={"host": "a"}, starts_from=10) == 1
    assert RunStore(run.store).take_epoch(owner={"host": "b"}) == 2
    with pytest.raises(Fenced, match="epoch 2 owns the run"):
        run.take_epoch(owner={"host": "a"}, starts_from=10)
    with pytest.raises(Fenced, match="epoch 2 owns the run"):
        run.taint(after=None, reason="loss spike")
    assert states(run) == {10: "valid"}


def test_a_late_commit_that_nobody_contradicts_counts(run: RunStore) -> None:
    first = run.take_epoch(owner={})
    save(run, OLD, step=20, epoch=first)
    late = write_packs(run.store, NEW, step=15, epoch=first)
    RunStore(run.store).take_epoch(owner={}, starts_from=20)
    assert run.commit(late).created
    assert states(run) == {15: "valid", 20: "valid"}


def test_a_step_that_the_epoch_has_committed_stays_as_it_is(run: RunStore) -> None:
    """A keeper seals a dead attempt's snapshot after the next attempt came to the same step."""
    epoch = run.take_epoch(owner={})
    save(run, OLD, step=10, epoch=epoch, attempt=1)
    ref = save(run, NEW, step=10, epoch=epoch, attempt=0)
    assert (ref.created, ref.attempt) == (False, 1)
    assert holds(run.open(), OLD)


def test_starting_again_from_the_very_beginning_fences_everything(run: RunStore) -> None:
    save(run, OLD, step=10, epoch=run.take_epoch(owner={}))
    run.take_epoch(owner={}, starts_from=None)
    assert states(run) == {10: "fenced"}
    assert "went on from the very beginning" in run.checkpoints()[0].reason


def test_an_epoch_cannot_start_from_what_is_not_there(run: RunStore) -> None:
    with pytest.raises(NoCheckpoint, match="no checkpoint of step 7"):
        run.take_epoch(owner={}, starts_from=7)


def test_the_newest_epoch_wins_a_step_that_two_have_committed(run: RunStore) -> None:
    first = run.take_epoch(owner={})
    save(run, OLD, step=10, epoch=first)
    save(run, OLD, step=20, epoch=first)
    second = run.take_epoch(owner={}, starts_from=20)
    save(run, NEW, step=20, epoch=second)
    assert holds(run.open(), NEW)
    run.store.put(step_folder(20) + "e0001-a0000.manifest", b"damaged")
    fallen_back = run.open()
    assert holds(fallen_back, OLD)
    assert [step for step, _ in fallen_back.passed_over] == [20]


def test_an_epoch_that_nobody_took_may_not_commit(run: RunStore) -> None:
    with pytest.raises(Fenced, match="epoch 5 was never taken"):
        save(run, OLD, step=10, epoch=5)


def test_damaged_checkpoints_are_passed_over_with_their_reasons(run: RunStore) -> None:
    epoch = run.take_epoch(owner={})
    for step in (10, 20, 30, 40, 50, 60):
        save(run, OLD if step == 10 else NEW, step=step, epoch=epoch)
    store = run.store
    store.put(step_folder(60) + commit_name(0), b"{}")
    store.put(step_folder(50) + "e0000-a0000.manifest", store.get(step_folder(40) + "e0000-a0000.manifest"))
    store.delete(step_folder(40) + "e0000-a0000.manifest")
    store.delete(step_folder(30) + "e0000-a0000-r00001.pack")
    pack = step_folder(20) + "e0000-a0000-r00000.pack"
    store.put(pack, store.get(pack)[:-4])
    assert states(run) == {10: "valid", 20: "valid", 30: "valid", 40: "valid", 50: "valid", 60: "damaged"}
    opened = run.open()
    assert opened.step == 10
    reasons = dict(opened.passed_over)
    assert "is not a record" in reasons[60]
    assert "is not the manifest that was committed" in reasons[50]
    assert "there is no object" in reasons[40]
    assert "r00001.pack is not there" in reasons[30]
    assert "bytes instead of" in reasons[20]
    with pytest.raises(Damaged, match="bytes instead of"):
        run.open(20)
    with pytest.raises(FormatError, match="is not the manifest"):
        run.open(50)


def test_steps_that_failed_to_load_can_be_passed_over(run: RunStore) -> None:
    epoch = run.take_epoch(owner={})
    save(run, OLD, step=10, epoch=epoch)
    save(run, NEW, step=20, epoch=epoch)
    opened = run.open(without={20: "the digest is wrong"})
    assert opened.step == 10
    assert opened.passed_over == [(20, "the digest is wrong")]


def test_a_damaged_epoch_record_does_not_bring_a_discarded_history_back(run: RunStore) -> None:
    first = run.take_epoch(owner={})
    for step in (10, 20):
        save(run, OLD, step=step, epoch=first)
    second = run.take_epoch(owner={}, starts_from=10)
    save(run, NEW, step=15, epoch=second)
    assert states(run) == {10: "valid", 15: "valid", 20: "fenced"}
    run.store.put(epoch_key(second), b"\0" * 100)
    assert states(run) == {10: "valid", 15: "valid", 20: "fenced"}
    late = write_packs(run.store, OLD, step=25, epoch=first)
    with pytest.raises(Fenced, match="epoch 1 cannot be read"):
        run.commit(late)


def test_a_commit_needs_its_packs(run: RunStore) -> None:
    epoch = run.take_epoch(owner={})
    manifest = write_packs(run.store, OLD, step=10, epoch=epoch)
    key = run.pack_key(10, epoch, 0, 0)
    data = run.store.get(key)
    run.store.put(key, data + b"x")
    with pytest.raises(Damaged, match="bytes instead of"):
        run.commit(manifest)
    run.store.delete(key)
    with pytest.raises(ObjectMissing, match="is not there"):
        run.commit(manifest)
    run.store.put(key, data)
    assert run.commit(manifest).created


class ForgetfulStore(WrappingStore):
    """Creates the object, loses the answer, tries again: what a retried request looks like."""

    def create(self, key: str, data: bytes) -> bool:
        self.inner.create(key, data)
        return self.inner.create(key, data)


def test_a_create_that_was_retried_finds_that_it_had_won() -> None:
    run = RunStore(ForgetfulStore(MemoryStore()))
    epoch = run.take_epoch(owner={})
    assert epoch == 0
    assert save(run, OLD, step=10, epoch=epoch).created


class TakeoverStore(WrappingStore):
    """At the moment of the commit, somebody else takes the run and starts from an earlier step."""

    def create(self, key: str, data: bytes) -> bool:
        name = parse_key(key)
        if name is not None and name.kind == "commit":
            RunStore(self.inner).take_epoch(owner={}, starts_from=None)
        return self.inner.create(key, data)


def test_a_take_over_at_the_moment_of_the_commit_fences_it() -> None:
    inner = MemoryStore()
    run = RunStore(TakeoverStore(inner))
    epoch = run.take_epoch(owner={})
    with pytest.raises(Fenced):
        save(run, OLD, step=10, epoch=epoch)
    assert states(RunStore(inner)) == {10: "fenced"}


def test_a_crash_at_any_point_of_a_commit_leaves_the_old_or_the_new_checkpoint() -> None:
    store = ClockStore()
    run = RunStore(store)
    epoch = run.take_epoch(owner={})
    save(run, OLD, step=10, epoch=epoch)

    def act(dying: ObjectStore) -> None:
        save(RunStore(dying), NEW, step=20, epoch=epoch)

    left = crash_everywhere(store, act)
    assert len(left) > 2 * 5  # two packs, manifest, view, commit, and the reads between them
    newest = []
    for remains in left:
        opened = RunStore(remains).open()
        assert opened.verify().ok
        assert holds(opened, NEW if opened.step == 20 else OLD)
        newest.append(opened.step)
        again = RunStore(remains)  # whoever restarts takes a new epoch and saves the same step: that must work from any remains
        save(again, NEW, step=20, epoch=again.take_epoch(owner={}))
        assert holds(again.open(), NEW)
    assert newest == sorted(newest)
    assert set(newest) == {10, 20}


def test_a_crash_at_any_point_of_taking_an_epoch_loses_nothing() -> None:
    store = ClockStore()
    run = RunStore(store)
    save(run, OLD, step=10, epoch=run.take_epoch(owner={}))
    left = crash_everywhere(store, lambda dying: RunStore(dying).take_epoch(owner={}))
    assert len(left) > 3
    for remains in left:
        heir = RunStore(remains)
        assert holds(heir.open(), OLD)
        save(heir, NEW, step=20, epoch=heir.take_epoch(owner={}))
        assert holds(heir.open(), NEW)
