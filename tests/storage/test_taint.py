"""A roll-back distrusts what came after: never chosen, never collected unless asked for, always to be had by its step."""

from __future__ import annotations

import pytest

from storage.checkpoint import Checkpoint
from storage.errors import NoCheckpoint
from storage.keys import parse_key, step_folder, taint_name
from storage.objects import ObjectStore
from storage.retention import KeepLast
from storage.run import RunStore
from tests.storage.building import SPECS, Values, random_values, save
from tests.storage.crashing import ClockStore, crash_everywhere
from tests.storage.test_commit import states

OLD, BAD, NEW = (random_values(SPECS, seed) for seed in (1, 2, 3))
GRACE = 3600.0
REASON = "the run goes back to before step 15: loss spike"


@pytest.fixture
def store() -> ClockStore:
    """A run of 10, 20 and 30, of which everything after 10 is in doubt."""
    store = ClockStore()
    run = RunStore(store)
    epoch = run.take_epoch(owner={})
    for step, values in ((10, OLD), (20, BAD), (30, BAD)):
        save(run, values, step=step, epoch=epoch)
    return store


def holds(checkpoint: Checkpoint, values: Values) -> bool:
    return all(checkpoint.read(name).tobytes() == values[name].tobytes() for name in SPECS)


def roll_back(store: ObjectStore) -> RunStore:
    """What a coordinator does when results do not make sense."""
    run = RunStore(store, clock=lambda: 2000.0)
    run.taint(after=10, reason=REASON)
    run.take_epoch(owner={}, starts_from=10)
    return run


def collect(store: ClockStore, *, tainted: bool = False) -> list[int]:
    """Collect until there is nothing more to do; the steps whose checkpoints went."""
    gone = list[int]()
    for _ in range(3):
        gone += RunStore(store).collect([KeepLast(1)], now_s=store.now, grace_s=GRACE, tainted=tainted).deleted_commits
        store.now += 2 * GRACE
    return gone


def test_what_is_tainted_says_why_and_is_never_chosen(store: ClockStore) -> None:
    run = roll_back(store)
    assert states(run) == {10: "valid", 20: "tainted", 30: "tainted"}
    (info,) = [info for info in run.checkpoints() if info.step == 30]
    assert (info.reason, info.epoch, info.created_s > 0, info.nbytes > 0) == (REASON, 0, True, True)
    assert run.open().step == 10
    assert run.open().passed_over == []
    assert RunStore(store).take_epoch(owner={}) == 2
    assert run.open().step == 10


def test_it_can_be_had_by_its_step_and_verifies(store: ClockStore) -> None:
    run = roll_back(store)
    assert holds(run.open(30), BAD)
    assert run.open(30).verify().ok
    with pytest.raises(NoCheckpoint, match=r"tainted: the run goes back to before step 15: loss spike"):
        run.open(30, tainted=False)
    with pytest.raises(NoCheckpoint):
        run.take_epoch(owner={}, starts_from=30)  # no history goes on from it


def test_no_collection_deletes_it_unless_asked(store: ClockStore) -> None:
    run = roll_back(store)
    for step in (20, 40):
        save(run, NEW, step=step, epoch=1)
    assert states(run) == {10: "valid", 20: "valid", 30: "tainted", 40: "valid"}
    assert holds(run.open(20), NEW), "the new history's checkpoint of the same step comes first"
    assert sorted(collect(store)) == [10, 20]
    assert states(run) == {20: "tainted", 30: "tainted", 40: "valid"}
    assert holds(run.open(20), BAD)
    assert holds(run.open(30), BAD)
    report = run.collect([KeepLast(1)], now_s=store.now, grace_s=GRACE)
    assert (report.kept, report.tainted, report.deleted_objects) == ([40], [20, 30], 0)
    assert sorted(collect(store, tainted=True)) == [20, 30]
    assert {info.key.split("/")[1] for info in store.list("checkpoints/")} == {"step-00000040"}
    assert holds(run.open(), NEW)


def test_a_damaged_record_distrusts_too(store: ClockStore) -> None:
    run = roll_back(store)
    store.put(step_folder(30) + taint_name(0), b"?")
    assert states(run)[30] == "tainted"
    assert "cannot be read" in run.checkpoints()[-1].reason
    assert run.open().step == 10
    assert collect(store) == []
    assert holds(run.open(30), BAD)


def test_back_to_the_very_beginning_everything_is_tainted_and_nothing_lost(store: ClockStore) -> None:
    run = RunStore(store)
    assert run.taint(after=None, reason=REASON) == [30, 20, 10]
    run.take_epoch(owner={}, starts_from=None)
    assert set(states(run).values()) == {"tainted"}
    save(run, NEW, step=10, epoch=1)
    assert collect(store) == []
    assert holds(run.open(), NEW)
    assert holds(run.open(20), BAD)


def test_a_second_roll_back_taints_only_what_counts(store: ClockStore) -> None:
    run = roll_back(store)
    save(run, NEW, step=40, epoch=1)
    assert run.taint(after=10, reason="again") == [40]
    assert {info.step: info.reason for info in run.checkpoints() if info.state == "tainted"} == {
        20: REASON,
        30: REASON,
        40: "again",
    }


def test_a_crash_at_any_point_of_a_roll_back_keeps_every_checkpoint_and_a_history_without_holes(store: ClockStore) -> None:
    left = crash_everywhere(store, roll_back)
    assert len(left) > 15
    seen = set()
    for remains in left:
        run = RunStore(remains)
        visible = [step for step, state in sorted(states(run).items()) if state == "valid"]
        seen.add(tuple(visible))
        assert visible in ([10], [10, 20], [10, 20, 30])
        assert run.open().step == visible[-1]
        assert holds(run.open(), OLD if visible[-1] == 10 else BAD)
        again = roll_back(remains)  # whoever comes next distrusts the same results
        save(again, NEW, step=40, epoch=again.epoch or 0)
        collect(remains)
        assert states(run) == {20: "tainted", 30: "tainted", 40: "valid"}
        assert all(run.open(step).verify().ok for step in (20, 30, 40))
    assert seen == {(10,), (10, 20), (10, 20, 30)}


def test_a_crash_at_any_point_of_a_collection_of_tainted_ones_resurrects_none(store: ClockStore) -> None:
    run = roll_back(store)
    save(run, NEW, step=40, epoch=1)

    def act(dying: ObjectStore) -> None:
        RunStore(dying).collect([KeepLast(1)], now_s=store.now, grace_s=0.0, tainted=True)

    for remains in crash_everywhere(store, act):
        found = states(RunStore(remains))
        assert found.pop(40) == "valid"
        assert set(found.values()) <= {"tainted", "retired", "incomplete", "valid"}
        assert "valid" not in (found.get(20), found.get(30))
        collect(remains, tainted=True)
        assert {info.key.split("/")[1] for info in remains.list("checkpoints/")} == {"step-00000040"}
        assert holds(RunStore(remains).open(), NEW)


def test_the_name_of_the_record() -> None:
    parsed = parse_key(step_folder(30) + taint_name(4))
    assert parsed is not None
    assert (parsed.kind, parsed.step, parsed.epoch) == ("tainted", 30, 4)
