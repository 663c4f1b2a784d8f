"""The report against a history worked out by hand, and its statistics against published values."""

from __future__ import annotations

import json

import msgspec
import pytest

from recovery import events as ev
from recovery.report import ReportError, mtbf_interval, report
from recovery.report_text import WIDTH, explain, fold, lines
from tests.recovery.test_state import crashed_once


def test_report_of_a_crash() -> None:
    found = report(crashed_once())
    assert (found.run_id, found.outcome, found.wall_s, found.step) == ("r", "finished", 27.0, 4)
    assert (found.steps_finished, found.steps_lost, found.tokens) == (5, 1, 50)
    assert found.effective_time == pytest.approx(7.5 / 27)
    assert sum(found.buckets.values()) == pytest.approx(27.0)

    first, second = found.attempts
    assert (first.steps, first.steps_lost, first.start_s, first.ended_by) == (3, 1, 9.0, "unknown")
    assert (second.first_step, second.last_step, second.source, second.restored_step) == (3, 4, "memory", 2)

    (row,) = found.interruptions
    assert (row.class_, row.first_failing_rank, row.action, row.wait_s) == ("unknown", 1, "restart", 1.0)
    assert (row.t, row.down_s, row.steps_lost) == (118.0, 2.0, 1)


def test_json_has_what_scripts_rely_on() -> None:
    plain = json.loads(json.dumps(report(crashed_once()).to_json()))
    assert [row["attempt"] for row in plain["attempts"]] == [0, 1]
    assert plain["interruptions"][0]["class"] == "unknown"
    assert plain["tokens_per_s_by_hour"] == {"0": pytest.approx(50 / 11)}


def test_text_names_cause_decision_and_formula() -> None:
    text = "\n".join(lines(report(crashed_once())))
    assert "effective time 27.8% = 7.5 s / 27.0 s" in text
    assert ": unknown, first rank 1" in text
    assert "rank 1 ended with -9" in text
    assert "restart: first time" in text
    assert "1 step lost, 2.0 s until all ranks were ready again" in text


def test_shares_of_causes_sum_to_one_with_planned_apart() -> None:
    def struck(number: int, class_: str, *, planned: bool = False) -> ev.Event:
        verdict = ev.Verdict(class_=class_, component="gpu", planned=planned)
        return ev.InterruptionClassified(t=10.0 + number, attempt=number, verdict_id=f"v{number}", verdict=verdict)

    classes = ["gpu_lost", "gpu_lost", "host_oom"]
    events = [
        ev.RunStarted(t=0, run_id="r"),
        *(struck(n, c) for n, c in enumerate(classes)),
        struck(9, "preemption", planned=True),
    ]
    found = report([*events, ev.Relabelled(t=30, verdict_id="v2", class_="cuda_oom")])
    assert [(row.class_, row.planned, row.count) for row in found.causes] == [
        ("gpu_lost", False, 2),
        ("cuda_oom", False, 1),
        ("preemption", True, 1),
    ]
    assert sum(row.share for row in found.causes if not row.planned) == pytest.approx(1.0)
    assert found.interruptions[2].relabelled_from == "host_oom"
    assert found.mtbf_s == 10.0


def test_steps_told_twice_count_once() -> None:
    history = list(crashed_once())
    again = history.index(next(event for event in history if isinstance(event, ev.SnapshotCompleted)))
    told_twice = [*history[: again + 1], *history[3 : again + 1], *history[again + 1 :]]
    assert report(told_twice).to_json() == report(history).to_json()


@pytest.mark.parametrize(
    ("count", "least", "most"),
    [(0, 0.0, 3.689), (1, 0.0253, 5.572), (10, 4.795, 18.390), (100, 81.364, 121.627)],
)
def test_interval_of_the_failure_rate_is_garwoods(count: int, least: float, most: float) -> None:
    """Values of the exact Poisson interval as tabulated."""
    low_s, high_s = mtbf_interval(count, 1.0)
    assert 1 / low_s == pytest.approx(most, rel=1e-3)
    assert (1 / high_s if high_s else 0.0) == pytest.approx(least, rel=2e-3)


def test_one_attempt_explained() -> None:
    text = "\n".join(explain(crashed_once(), 0))
    assert "steps 1 to 2 finished" in text
    assert "worker of rank 1 (pid 7) ended: killed by SIGKILL\n" in text
    assert "(pid 8) ended: killed by SIGKILL, by our own signal" in text
    assert "decided restart after 1.0 s: first time" in text
    with pytest.raises(ReportError, match="no attempt 7"):
        explain(crashed_once(), 7)


def test_what_is_too_long_for_a_terminal_goes_on_below_its_text() -> None:
    path, command = "/a/path/" + "x" * 90, "  go on     ftrain run " + " ".join(["--set a.b=1"] * 8)
    folded = fold(["short", f"      cause      {'word ' * 20}end", f"  (1) {'why ' * 25}", f"    {path} is not there", command])
    assert folded[0] == "short"
    assert folded[1].startswith("      cause      word")
    assert folded[2].startswith("                 word")
    assert folded[4].startswith("      why")
    assert any(path in line for line in folded), "a path is not cut"
    assert folded[-1] == command, "a command is what somebody copies"
    assert max(len(line) for line in folded if path not in line and line != command) <= WIDTH


def test_layouts_of_attempts_stand_below_their_table() -> None:
    found = report(crashed_once())
    rows = [msgspec.structs.replace(row, layout="tp2 x cp1 x pp4 x dp16") for row in found.attempts]
    told = lines(msgspec.structs.replace(found, attempts=rows))
    assert "  tp2 x cp1 x pp4 x dp16: attempts 0, 1" in told
    rows[1] = msgspec.structs.replace(rows[1], layout="dp8")
    told = lines(msgspec.structs.replace(found, attempts=rows))
    assert told[told.index("  tp2 x cp1 x pp4 x dp16: attempt 0") + 1] == "  dp8: attempt 1"
    assert "  0        2      init, step 0    9.0 s   1 to 3  1     unknown" in told


def test_the_decision_does_not_say_the_cause_again() -> None:
    cause = "rank 1 was killed by SIGKILL"
    row = msgspec.structs.replace(
        report(crashed_once()).interruptions[0], reason=cause, decision=f"unknown: {cause}; first time"
    )
    text = "\n".join(lines(msgspec.structs.replace(report(crashed_once()), interruptions=[row])))
    assert text.count(cause) == 1
    assert "restart: unknown; first time" in text


def test_an_empty_ledger_is_refused() -> None:
    with pytest.raises(ReportError):
        report([])


def test_a_suspicion_that_did_not_come_true_is_no_sign_of_the_next_interruption() -> None:
    def step(number: int, t: float) -> ev.Event:
        return ev.StepFinished(t=t, attempt=0, step=number, t_begin=t - 1, t_end=t)

    told: list[ev.Event] = [
        ev.RunStarted(t=0, run_id="r"),
        ev.AttemptStarted(t=1, attempt=0, ranks=1, source="init"),
        ev.Ready(t=2, attempt=0, step=0),
        ev.Suspected(t=3.5, attempt=0, reason="not finite, and finite when repeated", since=3.5),
        step(1, 3.4),
        step(2, 5.0),
        ev.Suspected(t=10.0, attempt=0, reason="no progress", since=6.0),
        ev.InterruptionClassified(
            t=11.0, attempt=0, verdict_id="v", verdict=ev.Verdict(class_="collective_timeout", component="unknown")
        ),
    ]
    assert [row.t for row in report(told).interruptions] == [10.0]


def test_changes_of_layout_are_told_with_their_reason_and_cost():
    started = ev.RunStarted(t=0.0, run_id="r")
    chosen = ev.LayoutChosen(
        t=5.0, ranks=7, layout="dp7", was="dp8", reason="n/3 was drained", costs="a restart", tokens_per_s=0.67
    )
    made = report([started, chosen])
    (row,) = made.layouts
    assert (row.was, row.layout, row.tokens_per_s) == ("dp8", "dp7", 0.67)
    assert any("dp8 -> dp7: n/3 was drained; costs a restart" in line for line in lines(made))
    assert report([started]).layouts == []
