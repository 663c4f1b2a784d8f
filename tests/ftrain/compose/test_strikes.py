"""The plan of a drill, and what each strike is said to have led to."""

from __future__ import annotations

from collections import Counter

import pytest

from ftrain.compose.strikes import BY_NAME, NONE, Strike, Struck, confusion, inside, match, plan
from recovery.report import InterruptionRow

NAMES = tuple(BY_NAME)


def test_a_seed_is_a_drill() -> None:
    one, again, other = (plan(NAMES, seed=seed, seconds=600.0, mean_gap_s=5.0, ranks=4) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert all(0 <= strike.rank < 4 and 0 < strike.after_s <= 600.0 for strike in one)
    assert [strike.after_s for strike in one] == sorted(strike.after_s for strike in one)


def test_each_kind_comes_before_any_comes_again() -> None:
    strikes = plan(NAMES, seed=3, seconds=1000.0, mean_gap_s=5.0, ranks=2)
    rounds = [strikes[first : first + len(NAMES)] for first in range(0, len(strikes) - len(NAMES), len(NAMES))]
    assert len(rounds) > 10
    assert all(Counter(strike.kind for strike in turn) == Counter(NAMES) for turn in rounds)


def test_gaps_have_the_mean_that_was_asked_for() -> None:
    strikes = plan(NAMES, seed=4, seconds=50_000.0, mean_gap_s=10.0, ranks=2)
    assert 50_000.0 / len(strikes) == pytest.approx(10.0, rel=0.05)  # 5000 gaps: a standard deviation is 1.4 %


def test_the_shortest_drill_strikes_once() -> None:
    assert len(plan(NAMES, seed=5, seconds=0.1, mean_gap_s=1000.0, ranks=1)) == 1


def row(t: float, class_: str) -> InterruptionRow:
    return InterruptionRow(
        verdict_id=str(t),
        t=t,
        attempt=0,
        class_=class_,
        component="",
        planned=False,
        first_failing_rank=None,
        node="",
        confidence=0.5,
        reason="",
        evidence=(),
        action="restart",
        steps_lost=2,
    )


def test_strikes_meet_their_interruptions_and_nothing_is_explained_twice() -> None:
    struck = [Struck(kind=kind, t=t, pid=1, rank=0, step=1) for kind, t in [("worker-kill", 10.0), ("keeper-kill", 20.0)]]
    struck.append(Struck(kind="worker-stop", t=30.0, pid=1, rank=0, step=1))
    rows = [row(10.2, "unknown"), row(34.0, "data_error"), row(35.0, "unknown")]
    matched, left = match(struck, rows)
    assert [(it.class_, it.action, it.right) for it in matched] == [
        ("unknown", "restart", True),
        (NONE, NONE, True),
        ("data_error", "restart", False),
    ]
    assert [it.t for it in left] == [35.0]
    assert confusion(matched) == {"keeper-kill": {NONE: 1}, "worker-kill": {"unknown": 1}, "worker-stop": {"data_error": 1}}


def test_two_strikes_at_once_may_be_one_interruption() -> None:
    struck = [Struck(kind=kind, t=t, pid=1, rank=0, step=1) for kind, t in [("exception", 10.5), ("worker-kill", 10.0)]]
    matched, left = match(struck, [row(10.6, "unknown")])
    assert [(it.kind, it.class_, it.right) for it in matched] == [("worker-kill", NONE, True), ("exception", "unknown", True)]
    assert left == []


def test_what_workers_do_to_themselves_has_a_step_in_place_of_a_time() -> None:
    strikes = [
        Strike(after_s=after_s, kind=kind, rank=1) for after_s, kind in [(10.0, "nan"), (20.0, "keeper-kill"), (30.0, "loop")]
    ]
    faults = inside(strikes, steps=600, seconds=60.0)
    assert [(it.kind, it.at, it.step, it.rank) for it in faults] == [("nan", "gradients", 100, 1), ("loop", "step", 300, 1)]
