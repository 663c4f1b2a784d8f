"""Where a run goes back to, what does not count any more, and that what is done again is compared."""

from __future__ import annotations

from ftrain.checkpoint.messages import Doubt, StepDone
from ftrain.compose.doubts import Doubts, go_back
from ftrain.compose.skips import Told, newest_before
from recovery.events import Event, StorageNotice, Suspected
from recovery.state import Onset
from storage.catalog import CheckpointInfo, CheckpointState
from storage.keys import step_folder
from storage.memory import MemoryStore
from storage.run import RunStore
from tests.storage.building import SPECS, random_values, save


def done(step: int, loss: float) -> StepDone:
    return StepDone(
        step=step,
        t_begin=1.0,
        t_end=2.0,
        blocked_s=0.0,
        evaluate_s=0.0,
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        tokens=8,
        applied=True,
    )


def infos(*steps: int, fenced: int = 0) -> list[CheckpointInfo]:
    states = {step: CheckpointState.FENCED if step == fenced else CheckpointState.VALID for step in steps}
    return [CheckpointInfo(step=step, state=state, reason="") for step, state in states.items()]


def test_back_to_the_newest_valid_checkpoint_before_the_onset() -> None:
    doubts = Doubts()
    doubts.on_doubt(Doubt(step=25, reason="loss spike", onset=20), attempt=3)
    doubts.on_doubt(Doubt(step=26, reason="not finite", onset=26), attempt=3)  # in doubt since the earliest
    onset, _ = doubts.give_up() or (0, "")
    assert newest_before(infos(5, 10, 15, 20, 25, fenced=15), onset) == 10
    assert doubts.give_up() is None, "once"


def test_back_to_the_start_if_there_is_none() -> None:
    doubts = Doubts()
    doubts.on_doubt(Doubt(step=4, reason="not finite", onset=2), attempt=0)
    onset, _ = doubts.give_up() or (99, "")
    assert newest_before(infos(10), onset) is None


def test_a_doubt_that_was_cleared_sends_nobody_back() -> None:
    doubts = Doubts()
    (event,) = doubts.on_doubt(Doubt(step=4, reason="finite when repeated"), attempt=0)
    assert isinstance(event, Suspected)
    assert doubts.give_up() is None


def test_what_is_on_its_way_since_the_onset_is_void_at_once_and_for_good() -> None:
    doubts = Doubts()
    doubts.on_doubt(Doubt(step=25, reason="loss spike", onset=20), attempt=3)
    for _ in range(2):
        void = {(attempt, step) for attempt in (2, 3, 4) for step in (19, 20, 25) if doubts.is_void(attempt, step)}
        assert void == {(2, 20), (2, 25), (3, 20), (3, 25)}
        doubts.give_up()


def test_a_doubt_that_is_told_again_sends_nobody_back_twice() -> None:
    doubts = Doubts()
    doubt = Doubt(step=25, reason="loss spike", onset=20)
    doubts.on_doubt(doubt, attempt=3)
    doubts.give_up()
    doubts.on_doubt(doubt, attempt=3)
    assert doubts.open is None
    doubts.on_doubt(doubt, attempt=4)
    assert doubts.give_up() == (20, "the run goes back to before step 20: loss spike")


def test_a_coordinator_that_takes_over_knows_what_the_ledger_knows() -> None:
    doubts = Doubts()
    old = Onset(attempt=1, step=8, reason="not finite", void=True, open=False)
    doubts.recall([old, Onset(attempt=3, step=20, reason="loss spike", void=True)])
    assert [doubts.is_void(1, 8), doubts.is_void(2, 8), doubts.is_void(3, 20)] == [True, False, True]
    assert doubts.give_up() == (20, "the run goes back to before step 20: loss spike")
    assert doubts.is_void(3, 20)


def run_of(*steps: int) -> RunStore:
    run = RunStore(MemoryStore())
    epoch = run.take_epoch(owner={})
    for step in steps:
        save(run, random_values(SPECS, step), step=step, epoch=epoch)
    return run


def test_going_back_taints_what_is_later_and_may_be_done_again() -> None:
    run = run_of(10, 20, 30)
    first, second = (go_back(run, 20, "loss spike") for _ in range(2))
    assert (first.step, second.step, second.epoch, first.told()) == (10, 10, first.epoch + 1, [])
    assert {info.step: info.state for info in run.checkpoints()} == {10: "valid", 20: "tainted", 30: "tainted"}


def test_a_checkpoint_that_cannot_be_gone_back_to_is_passed_over_and_that_is_told() -> None:
    run = run_of(10, 20, 30)
    run.store.delete(next(info.key for info in run.store.list(step_folder(20)) if info.key.endswith(".pack")))
    back = go_back(run, 25, "loss spike")
    assert (back.step, list(back.passed)) == (10, [20])
    (told,) = back.told()
    assert isinstance(told, StorageNotice)
    assert told.text.startswith("step 20 cannot be gone back to")


def test_with_nothing_left_before_the_onset_the_run_begins_anew_and_says_so() -> None:
    run = run_of(30)
    back = go_back(run, 20, "loss spike")
    assert back.step is None
    (told,) = back.told()
    assert isinstance(told, StorageNotice)
    assert "begins anew" in told.text
    assert [info.state for info in run.checkpoints()] == ["tainted"]


def test_a_repetition_that_differs_in_one_bit_is_said_once() -> None:
    doubts = Doubts()
    losses = {step: 2.0 + step for step in range(1, 6)}
    assert not any(doubts.on_step(done(step, loss), 0, "dp2") for step, loss in losses.items())
    assert not any(doubts.on_step(done(step, losses[step]), 1, "dp2") for step in (2, 3))
    (event,) = doubts.on_step(done(4, 6.000000000000001), 1, "dp2")
    assert isinstance(event, Suspected)
    assert "attempt 0: 6.0, now 6.000000000000001" in event.reason
    assert doubts.on_step(done(5, 9.0), 1, "dp2") == []
    assert doubts.on_step(done(6, float("nan")), 1, "dp2") == []
    assert doubts.on_step(done(6, float("nan")), 2, "dp2") == []  # not a number twice is the same twice


def test_what_is_done_again_under_another_layout_is_rounded_otherwise_and_no_corruption() -> None:
    doubts = Doubts()

    def attempt(number: int, layout: str, losses: dict[int, float]) -> list[Event]:
        return [event for step, loss in losses.items() for event in doubts.on_step(done(step, loss), number, layout)]

    assert attempt(0, "dp2", {1: 5.0, 2: 4.0, 3: 3.0}) == []
    assert attempt(1, "dp1", {2: 4.1, 3: 3.1, 4: 2.1}) == [], "on from step 1 with fewer"
    assert attempt(2, "dp2", {4: 2.0, 5: 1.0}) == [], "and back, from a state that the others have made"
    assert attempt(3, "dp2", {2: 4.0, 3: 3.0, 4: 2.05, 5: 1.05}) == [], "on from step 1: not that state any more"
    (told,) = attempt(4, "dp2", {3: 3.0, 4: 2.06})
    assert isinstance(told, Suspected)
    assert "step 4 was done again" in told.reason


def test_what_was_read_otherwise_is_void_from_there_on_and_not_compared() -> None:
    doubts = Doubts()
    for step in (9, 10):
        doubts.on_step(done(step, 1.0), 0, "dp2")
    doubts.read_otherwise(0, 10)
    assert [doubts.is_void(0, step) for step in (9, 10)] == [False, True]
    assert not doubts.is_void(1, 10)
    assert doubts.on_step(done(10, 2.0), 1, "dp2") == [], "other data have another loss"
    (told,) = doubts.on_step(done(9, 2.0), 1, "dp2")
    assert isinstance(told, Suspected)


def test_workers_have_missed_a_range_that_they_were_not_told_of_once_they_came_to_it() -> None:
    told = Told()
    assert told.missed([(4, 5)], 9) is None, "nobody has done anything"
    told.tell([(4, 5)])
    assert told.missed([(4, 5)], 9) is None
    assert told.missed([(4, 5), (8, 8), (7, 7)], 9) == 7
    assert told.missed([(4, 5), (4, 5)], 9) == 4, "the same range once more is other data"
    assert told.missed([(4, 5), (8, 8)], 7) is None
    told.tell(None)
    assert told.missed([(4, 5)], 9) is None, "an agent of a version that did not say"
