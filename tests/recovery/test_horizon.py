"""The last save is begun in time: worked examples, and the two properties that matter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import events as ev
from recovery.horizon import Notice, Pace, PaceKeeper, last_call, soonest

LIMIT = Notice(class_="time_limit", by="time limit", ends_t=1000.0)
PACE = Pace(step_s=10.0, save_s=40.0)


@pytest.mark.parametrize(
    ("now_t", "stop", "fits"),
    [
        pytest.param(900.0, False, True, id="100 left: two steps and a save fit"),
        pytest.param(910.0, False, True, id="90 left: just"),
        pytest.param(911.0, True, True, id="89 left: one step and a save"),
        pytest.param(961.0, True, False, id="39 left: not even a save"),
        pytest.param(2000.0, True, False, id="it should be over"),
    ],
)
def test_a_step_is_only_begun_if_a_save_fits_after_it(now_t: float, stop: bool, fits: bool) -> None:
    call = last_call(LIMIT, PACE, now_t=now_t, margin_s=30.0)
    assert (call.stop, call.fits) == (stop, fits)
    assert "time limit" in call.reason


def test_a_notice_without_a_time_means_now() -> None:
    call = last_call(Notice(class_="preemption", by="spot"), Pace(), now_t=0.0, margin_s=30.0)
    assert call.stop
    assert "nobody says when" in call.reason


def test_a_time_that_is_over_is_told_as_one() -> None:
    call = last_call(LIMIT, PACE, now_t=2000.0, margin_s=30.0)
    assert call.reason == "time limit: its time, 1970-01-01 00:16:40 UTC, is over, so this step is the last"


@given(
    left=st.floats(0, 1e4),
    step_s=st.floats(0, 100),
    save_s=st.floats(0, 1000),
    margin_s=st.floats(0, 100),
    more=st.floats(0, 100),
)
def test_once_it_is_time_it_stays_time(left: float, step_s: float, save_s: float, margin_s: float, more: float) -> None:
    pace = Pace(step_s=step_s, save_s=save_s)
    first = last_call(LIMIT, pace, now_t=1000.0 - left, margin_s=margin_s)
    later = last_call(LIMIT, pace, now_t=1000.0 - left + more, margin_s=margin_s)
    assert later.stop or not first.stop
    if not first.stop:  # then the step under way, one more and the save really fit
        assert left >= 2 * step_s + save_s + margin_s - 1e-6


def test_the_pace_is_the_slowest_of_late_and_of_this_layout() -> None:
    def step(number: int, seconds: float) -> ev.Event:
        return ev.StepFinished(t=0.0, attempt=0, step=number, t_begin=100.0, t_end=100.0 + seconds)

    keeper = PaceKeeper()
    assert keeper.pace == Pace()
    for number in range(40):
        keeper.on_event(step(number, 50.0 if number == 0 else 2.0))
    keeper.on_event(ev.CheckpointCommitted(t=0.0, step=1, seconds=7.0))
    assert keeper.pace == Pace(step_s=2.0, save_s=7.0)
    keeper.on_event(ev.AttemptStarted(t=0.0, attempt=1, ranks=1, source="storage"))
    assert keeper.pace == Pace(step_s=0.0, save_s=7.0)


def test_the_soonest_end_counts_and_an_unknown_one_is_now() -> None:
    late, unknown = Notice(class_="time_limit", by="b", ends_t=2000.0), Notice(class_="preemption", by="c")
    assert soonest(iter([late, LIMIT])) is LIMIT
    assert soonest(iter([late, unknown])) is unknown
    assert soonest(iter([])) is None
