"""When data are passed over: declared, the same twice on the same data, within the budget."""

from __future__ import annotations

import pytest

from recovery.events import Decided, InterruptionClassified, Suspected, Verdict
from recovery.policy import Decision, Doubted, History, Limits, decide
from recovery.state import RunState, fold

DIVERGED = Verdict(class_="numeric_divergence", component="numerics", action="roll_back", signature="num.nan", reason="spike")
TWICE = Doubted(first=30, last=32, again=True)


def decided(doubted: Doubted | None, *, allowed: int, verdict: Verdict = DIVERGED) -> Decision:
    return decide(verdict, History(best_step=32), Limits(skip_updates=allowed), doubted=doubted)


def test_what_makes_no_sense_twice_is_passed_over_and_the_reason_has_the_budget() -> None:
    found = decided(TWICE, allowed=3)
    assert (found.action, found.skip) == ("roll_back", (30, 32))
    assert "the data of updates 30 to 32 are passed over (3 of 3 that recovery.skip_updates allows)" in found.reason


@pytest.mark.parametrize(
    ("doubted", "allowed"),
    [
        (TWICE, 0),  # not declared
        (TWICE, 2),  # more than is left
        (Doubted(first=30, last=32, again=True, passed_over=1), 3),
        (Doubted(first=30, last=32, again=False), 9),  # the first time: it may have been the machine
        (None, 9),
    ],
)
def test_else_nothing_is_passed_over(doubted: Doubted | None, allowed: int) -> None:
    found = decided(doubted, allowed=allowed)
    assert (found.action, found.skip) == ("roll_back", None)


def test_another_cause_passes_over_nothing() -> None:
    other = Verdict(class_="unknown", component="unknown", action="restart")
    assert decided(TWICE, allowed=9, verdict=other).skip is None


def failed(attempt: int, skip: tuple[int, int] | None = None) -> list[Suspected | InterruptionClassified | Decided]:
    times = {"t": float(attempt), "attempt": attempt}
    return [
        Suspected(**times, reason="spike", since=0.0, onset=30, until=31),
        InterruptionClassified(**times, verdict_id=f"v{attempt}", verdict=DIVERGED),
        Decided(**times, action="roll_back", reason="", verdict_id=f"v{attempt}", skip=skip),
    ]


def test_after_a_skip_other_data_are_read_and_nothing_was_seen_on_them_yet() -> None:
    state = fold(failed(0))
    assert state.doubted(0) == Doubted(first=30, last=31, again=False)
    state = fold(failed(1, skip=(30, 31)), state)
    assert state.skips == ((30, 31),)
    state = fold(failed(2)[:1], state)
    assert state.doubted(2) == Doubted(first=30, last=31, again=False, passed_over=2)
    assert state.history.since_progress() == ()
    state = fold(failed(3)[:1], fold(failed(2)[1:], state))
    assert state.doubted(3) == Doubted(first=30, last=31, again=True, passed_over=2)
    assert RunState().doubted(0) is None
