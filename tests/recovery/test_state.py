"""The fold and the books against small histories worked out by hand, and against random ones for what must always hold."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import events as ev
from recovery.accounts import Bucket, Buckets, ReportError
from recovery.state import Onset, Phase, RunState, apply, buckets, fold

CRASH = ev.Verdict(class_="unknown", component="unknown", action="restart", reason="rank 1 ended with -9", first_failing_rank=1)


def step(
    number: int, begin: float, end: float, *, attempt: int = 0, blocked: float = 0, evaluate: float = 0
) -> ev.StepFinished:
    return ev.StepFinished(
        t=end,
        attempt=attempt,
        step=number,
        t_begin=begin,
        t_end=end,
        blocked_s=blocked,
        evaluate_s=evaluate,
        loss=1.0,
        tokens=10,
    )


def crashed_once() -> Iterator[ev.Event]:
    """Launch at 100, ready at 110, 3 steps of 2 s, a death in the fourth, back-off, again from step 2, done."""
    yield ev.RunStarted(t=100, run_id="r")
    yield ev.AttemptStarted(t=101, attempt=0, ranks=2, source="init")
    yield ev.Ready(t=110, attempt=0, step=0)
    yield step(1, 110, 112)
    yield step(2, 112, 114, blocked=0.5)
    yield ev.SnapshotCompleted(t=114, attempt=0, step=2)
    yield step(3, 115, 117)
    yield ev.ProcessDied(t=118, attempt=0, kind="worker", pid=7, status=-9, rank=1)
    yield ev.ProcessDied(t=118.2, attempt=0, kind="worker", pid=8, status=-9, rank=0, ours=True)
    yield ev.InterruptionClassified(t=118.5, attempt=0, verdict_id="v0", verdict=CRASH)
    yield ev.Decided(t=118.5, attempt=0, action="restart", reason="first time", wait_s=1.0, verdict_id="v0")
    yield ev.AttemptEnded(t=118.6, attempt=0, step=3)
    yield ev.AttemptStarted(t=119.5, attempt=1, ranks=2, source="memory", restored_step=2)
    yield ev.Ready(t=120, attempt=1, step=2)
    yield step(3, 120, 122, attempt=1)
    yield step(4, 122, 125, attempt=1, evaluate=1.0)
    yield ev.ProcessDied(t=126, attempt=1, kind="worker", pid=9, status=0, rank=0)
    yield ev.RunEnded(t=127, outcome="finished", step=4)


def seconds(books: Buckets) -> dict[str, float]:
    return {name: books.seconds(name) for name in books.ns if books.ns[name]}


def test_books_of_a_crash() -> None:
    books = buckets(crashed_once())
    assert seconds(books) == {
        "initialisation": 10.0,
        "productive": 2.0 + 1.5 + 2.0 + 2.0,
        "checkpoint": 0.5,
        "evaluation": 1.0,
        "other": 1.0,
        "discarded": 2.0 + 1.0,  # step 3 of attempt 0, and the one second of its step 4
        "detection": 0.5,
        "backoff": 1.0,
        "restart": 0.5,
        "stopping": 2.0,
    }
    assert books.wall_ns == 27 * 10**9
    assert books.effective == pytest.approx(7.5 / 27)


def test_time_without_supervisor_is_absent_and_resuming_is_initialisation() -> None:
    again = [
        *crashed_once(),
        ev.RunStarted(t=200, run_id="r", resumed_from_step=4),
        ev.AttemptStarted(t=201, attempt=2, ranks=2, source="storage"),
        ev.Ready(t=203, attempt=2, step=4),
    ]
    books = buckets(again)
    assert books.seconds("absent") == 73.0
    assert books.seconds("initialisation") == 13.0


def test_a_coordinator_that_died_is_absent_from_its_last_sign_of_life_but_its_workers_steps_count() -> None:
    events = [
        ev.RunStarted(t=0, run_id="r"),
        ev.AttemptStarted(t=1, attempt=0, ranks=2, source="init"),
        ev.Ready(t=2, attempt=0, step=0),
        step(1, 2, 4),
        ev.RunStarted(t=10, run_id="r", readopted=True),
        ev.StepsFinished(
            t=10,
            attempt=0,
            steps=(ev.StepRecord(step=2, t_begin=4, t_end=6), ev.StepRecord(step=3, t_begin=6, t_end=9)),
        ),
        step(2, 4, 6),  # told twice
        step(4, 10, 12),
    ]
    assert seconds(buckets(events)) == {"initialisation": 2.0, "productive": 9.0, "absent": 1.0}
    assert fold(events).phase is Phase.RUNNING
    assert fold(events).step == 4


def test_a_hang_is_detection_from_its_last_progress() -> None:
    events = [
        ev.RunStarted(t=0, run_id="r"),
        ev.AttemptStarted(t=0, attempt=0, ranks=2, source="init"),
        ev.Ready(t=1, attempt=0, step=0),
        step(1, 1, 2),
        ev.Suspected(t=60, attempt=0, reason="no progress", since=3.0, rank=1),
        ev.Decided(t=61, attempt=0, action="restart", reason="hang"),
        ev.AttemptStarted(t=62, attempt=1, ranks=2, source="memory"),
        ev.Ready(t=65, attempt=1, step=1),
    ]
    expected = {"initialisation": 1.0, "productive": 1.0, "discarded": 1.0, "detection": 58.0, "restart": 4.0}
    assert seconds(buckets(events)) == expected


def test_a_suspicion_that_did_not_come_true_ends() -> None:
    events = [
        ev.RunStarted(t=0, run_id="r"),
        ev.Ready(t=1, attempt=0, step=0),
        ev.Suspected(t=60, attempt=0, reason="no progress", since=1.0, rank=1),
        step(1, 1, 70),
        ev.Evaluated(t=72, step=1, loss=1.0),
    ]
    assert seconds(buckets(events)) == {"initialisation": 1.0, "productive": 69.0, "other": 2.0}
    assert fold(events).phase is Phase.RUNNING


def test_books_can_be_closed_at_any_time() -> None:
    for until in range(100, 140):
        books = buckets(crashed_once(), float(until))
        assert books.wall_ns == (until - 100) * 10**9


def test_books_without_a_launch_are_refused() -> None:
    with pytest.raises(ReportError, match="no start"):
        buckets([step(1, 0, 1)])


def test_books_that_do_not_add_up_are_refused() -> None:
    good = buckets(crashed_once())
    bad = Buckets(start_ns=good.start_ns, end_ns=good.end_ns, ns=good.ns | {Bucket.OTHER: good.ns[Bucket.OTHER] + 1})
    with pytest.raises(ReportError, match="do not add up"):
        bad.check()


def test_state_of_a_crash() -> None:
    state = fold(crashed_once())
    assert (state.phase, state.outcome, state.step, state.best_step) == (Phase.ENDED, "finished", 4, 4)
    assert (state.attempts, state.attempt, state.source, state.snapshot_step) == (2, 1, "memory", 2)
    (past,) = state.interruptions
    assert (past.class_, past.best_step, past.rank) == ("unknown", 3, 1)
    assert state.history.since_progress() == ()  # step 4 came after it


def test_relabelling_is_remembered_by_the_policy() -> None:
    state = fold([*crashed_once(), ev.Relabelled(t=130, verdict_id="v0", class_="preemption", planned=True)])
    assert (state.interruptions[0].class_, state.interruptions[0].planned) == ("preemption", True)
    assert len(state.interruptions) == 1


def doubted(*, decided: ev.Action) -> list[ev.Event]:
    doubt = ev.Suspected(t=130, attempt=1, since=130, reason="loss spike", onset=20)
    return [*crashed_once(), doubt, ev.Decided(t=131, attempt=1, action=decided, reason="", wait_s=0, verdict_id="v1")]


def test_an_onset_is_void_once_the_run_goes_back_and_stays_so_when_told_again() -> None:
    history = doubted(decided="roll_back")
    assert fold(history).onsets == (Onset(attempt=1, step=20, reason="loss spike", void=True),)
    assert fold([*history, history[-2]]).onsets == fold(history).onsets
    assert not fold(doubted(decided="restart")).onsets[0].void
    later, earlier = (ev.Suspected(t=132, attempt=1, since=132, reason="nan", onset=step) for step in (25, 15))
    undecided = history[:-1]
    assert [fold([*undecided, event]).onsets[0].step for event in (later, earlier)] == [20, 15]
    assert fold(crashed_once()).onsets == ()


@pytest.mark.parametrize("decided", ["roll_back", "restart", "stop_for_human"])
def test_an_onset_is_open_until_an_attempt_begins_before_it_whatever_comes_between(decided: ev.Action) -> None:
    left = [ev.StopRequested(t=132, by="ftrain stop"), ev.RunEnded(t=133, outcome="stopped"), ev.RunStarted(t=140, run_id="r")]
    history = [*doubted(decided=decided), *left, ev.EpochTaken(t=140, epoch=2, starts_from=19)]

    def still_open(attempt: int, step: int) -> bool:
        begun = ev.AttemptStarted(t=141, attempt=attempt, ranks=2, source="storage", restored_step=step)
        return fold([*history, begun]).onsets[0].open

    assert fold(history).onsets[0].open
    assert not still_open(2, 19)
    assert still_open(2, 20), "it begins with what is in doubt"
    assert still_open(1, 19), "its own attempt, told again"


def test_what_is_committed_goes_back_with_the_run() -> None:
    committed = ev.CheckpointCommitted(t=1, attempt=0, step=30, epoch=0, nbytes=1, seconds=1.0)
    assert fold([committed, ev.EpochTaken(t=2, epoch=1, starts_from=20)]).committed_step == 20
    assert fold([committed, ev.EpochTaken(t=2, epoch=1, starts_from=30)]).committed_step == 30
    assert fold([committed, ev.EpochTaken(t=2, epoch=1)]).committed_step == 30, "a command's run does not say"


times = st.floats(min_value=0, max_value=1000, allow_nan=False)
attempts = st.integers(0, 4)
numbers = st.integers(0, 20)
ids = st.sampled_from("ab")
kinds: st.SearchStrategy[ev.ProcessKind] = st.sampled_from(["worker", "agent", "keeper"])
actions: st.SearchStrategy[ev.Action] = st.sampled_from(["restart", "finish", "roll_back"])
any_event: st.SearchStrategy[ev.Event] = st.one_of(
    st.builds(ev.RunStarted, t=times, run_id=st.just("r"), readopted=st.booleans()),
    st.builds(ev.AttemptStarted, t=times, attempt=attempts, ranks=st.just(2), source=st.just("memory")),
    st.builds(ev.Ready, t=times, attempt=attempts, step=numbers),
    st.builds(
        ev.StepFinished,
        t=times,
        attempt=attempts,
        step=numbers,
        t_begin=times,
        t_end=times,
        blocked_s=times,
        evaluate_s=times,
        loss=st.none() | times,
    ),
    st.builds(ev.ProcessDied, t=times, kind=kinds, pid=numbers, status=st.sampled_from([0, 1, -9])),
    st.builds(ev.Suspected, t=times, attempt=attempts, reason=st.just("slow"), since=times, onset=st.none() | numbers),
    st.builds(ev.InterruptionClassified, t=times, verdict_id=ids, verdict=st.just(CRASH)),
    st.builds(ev.Decided, t=times, attempt=attempts, action=actions, reason=st.just(""), wait_s=times, verdict_id=ids),
    st.builds(ev.AttemptEnded, t=times, attempt=attempts, step=numbers),
    st.builds(ev.StopRequested, t=times, by=st.just("SIGTERM")),
    st.builds(ev.RunEnded, t=times, outcome=st.just("stopped"), step=st.none() | numbers),
    st.builds(ev.Relabelled, t=times, verdict_id=ids, class_=st.just("gpu_lost")),
)


@given(st.lists(any_event, max_size=40), st.integers(0, 40))
def test_replay_equals_incremental(history: list[ev.Event], cut: int) -> None:
    live = RunState()
    for event in history:
        live = apply(live, event)
    replayed = fold(ev.decode_line(ev.encode_line(event)) for event in history[:cut])
    assert fold(history[cut:], replayed) == live


@given(st.lists(any_event, max_size=40), st.none() | times)
def test_whatever_happened_every_second_has_one_bucket(history: list[ev.Event], until: float | None) -> None:
    books = buckets([ev.RunStarted(t=1.0, run_id="r"), *history], until)
    assert sum(books.ns.values()) == books.wall_ns >= 0
    assert min(books.ns.values()) >= 0


def test_a_stop_before_the_first_attempt_makes_no_restart_of_it() -> None:
    """The run does its first step all the same, and saves it; of a later launch the same."""
    events = [
        ev.RunStarted(t=100.0, run_id="r"),
        ev.StopRequested(t=101.0, by="SIGINT"),
        ev.AttemptStarted(t=102.0, attempt=0, ranks=1, source="init"),
        ev.Ready(t=109.0, attempt=0, step=0),
        ev.StepFinished(t=110.0, attempt=0, step=1, t_begin=109.0, t_end=110.0),
        ev.ProcessDied(t=110.0, attempt=0, kind="worker", pid=1, status=0, rank=0),
        ev.AttemptEnded(t=111.0, attempt=0, step=1),
        ev.RunEnded(t=112.0, outcome="stopped", step=1),
    ]
    assert seconds(buckets(events)) == {"initialisation": 8.0, "productive": 1.0, "stopping": 3.0}
    again = [msgspec.structs.replace(event, t=event.t + 20) for event in events[:-4] if not isinstance(event, ev.StepFinished)]
    again = [msgspec.structs.replace(event, attempt=1) if event.attempt == 0 else event for event in again]
    found = seconds(buckets([*events, *again]))
    assert found["initialisation"] == 8.0 + 8.0
    assert "restart" not in found
