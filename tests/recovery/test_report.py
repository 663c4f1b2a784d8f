"""The report against a history worked out by hand, and its statistics against published values."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from recovery import events as ev
from recovery.classify import classify
from recovery.evidence import Evidence
from recovery.report import ReportError, mtbf_interval, report
from recovery.report_text import WIDTH, evidence_texts, explain, fold, lines
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
    assert "steps 1 to 3 finished" in text
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
    option = f"  option    restart as it is (4 steps done again): cd {path} && ftrain run my.toml"
    assert fold([option]) == [option]
    assert max(len(line) for line in folded if path not in line and line != command) <= WIDTH


def test_layouts_of_attempts_stand_below_their_table() -> None:
    found = report(crashed_once())
    rows = [msgspec.structs.replace(row, layout="tp2 x cp1 x pp4 x dp16") for row in found.attempts]
    told = lines(msgspec.structs.replace(found, attempts=rows))
    assert "  tp2 x cp1 x pp4 x dp16: attempts 0, 1" in told
    rows[1] = msgspec.structs.replace(rows[1], layout="dp8")
    told = lines(msgspec.structs.replace(found, attempts=rows))
    assert told[told.index("  tp2 x cp1 x pp4 x dp16: attempt 0") + 1] == "  dp8: attempt 1"
    assert "  0        2      init 0     9.0 s     1 to 3  1     unknown" in told


@pytest.mark.parametrize(
    ("step", "ended_by"),
    [(137, "user_interrupt"), (137, "object_store_throttle"), (13_700, "object_store_throttle"), (1_370_000, "user_interrupt")],
)
def test_rows_of_attempts_fit_a_terminal_and_what_ended_them_stands_below_its_heading(step: int, ended_by: str) -> None:
    found = report(crashed_once())
    rows = [
        msgspec.structs.replace(row, source="storage", restored_step=step, first_step=step, last_step=2 * step, start_s=None)
        for row in found.attempts
    ]
    rows[0].ended_by = ended_by
    told = fold(lines(msgspec.structs.replace(found, attempts=rows)))
    at = told.index("attempts") + 1
    assert [len(row.split()) for row in told[at : at + 3]] == [10, 10, 10]  # one line each, with "from step" and "1 to 2"
    assert told[at].index("ended by") == told[at + 1].index(ended_by)
    assert max(map(len, told[at : at + 3])) <= WIDTH


def test_the_decision_does_not_say_the_cause_again() -> None:
    cause = "rank 1 was killed by SIGKILL"
    row = msgspec.structs.replace(
        report(crashed_once()).interruptions[0], reason=cause, decision=f"unknown: {cause}; first time"
    )
    text = "\n".join(lines(msgspec.structs.replace(report(crashed_once()), interruptions=[row])))
    assert text.count(cause) == 1
    assert "restart: unknown; first time" in text


def test_each_notice_is_shown_once_and_of_many_the_newest() -> None:
    said = [ev.StorageNotice(t=100.0 + n, topic="metrics", text=f"notice {n % 7}") for n in range(10)]
    start = ev.RunStarted(t=100.0, run_id="x")
    few = "\n".join(lines(report([start, said[0], said[7]])))
    assert few.count("notice 0") == 1
    assert "notices\n  1970-01-01 00:01:47  notice 0" in few
    many = lines(report([start, *said]))[-6:]
    assert many[0] == "the newest 5 of 7 notices"
    assert [line[-1] for line in many[1:]] == ["5", "6", "0", "1", "2"]
    assert "notice" not in "\n".join(lines(report([start])))


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


def test_changes_of_layout_are_told_with_their_reason_and_cost() -> None:
    started = ev.RunStarted(t=0.0, run_id="r")
    chosen = ev.LayoutChosen(
        t=5.0, ranks=7, layout="dp7", was="dp8", reason="n/3 was drained", costs="a restart", tokens_per_s=0.67
    )
    made = report([started, chosen])
    (row,) = made.layouts
    assert (row.was, row.layout, row.tokens_per_s) == ("dp8", "dp7", 0.67)
    assert any("dp8 -> dp7: n/3 was drained; costs a restart" in line for line in lines(made))
    assert report([started]).layouts == []


def every_tenth(*, assumed: bool = True) -> list[ev.Event]:
    """A script that tells each tenth step: 10 to 50, killed, and from the start again, 10 to 60. Each step takes a second."""

    def told(attempt: int, begin: float, last: int) -> list[ev.Event]:
        first = 10 if assumed else 0
        return [
            ev.AttemptStarted(t=begin, attempt=attempt, ranks=1, source="storage" if attempt else "init"),
            ev.Ready(t=begin + first, attempt=attempt, step=9 if assumed else 0, assumed=assumed),
            *(
                ev.StepFinished(
                    t=begin + step,
                    attempt=attempt,
                    step=step,
                    t_begin=begin + max(first, step - 10),
                    t_end=begin + step,
                    tokens=9,
                )
                for step in range(10, last + 1, 10)
            ),
        ]

    crash = ev.Verdict(class_="unknown", component="unknown", reason="killed")
    return [
        ev.RunStarted(t=0, run_id="r"),
        *told(0, 0.0, 50),
        ev.ProcessDied(t=55, attempt=0, kind="worker", pid=7, status=-9, rank=0),
        ev.InterruptionClassified(t=56, attempt=0, verdict_id="v", verdict=crash),
        ev.Decided(t=56, attempt=0, action="restart", reason="", verdict_id="v"),
        *told(1, 60.0, 60),
        ev.ProcessDied(t=121, attempt=1, kind="worker", pid=8, status=0, rank=0),
        ev.RunEnded(t=122, outcome="finished", step=60),
    ]


def test_steps_count_by_their_numbers_and_no_start_is_made_up() -> None:
    """The first told step counts as one; those between two that are told count all; what is told again was lost: 10 to 50."""
    found = report(every_tenth())
    assert (found.step, found.steps_finished, found.steps_lost, found.at_least) == (60, 41 + 51, 41, True)
    assert [(row.steps, row.first_step, row.last_step) for row in found.attempts] == [(41, 10, 50), (51, 10, 60)]
    assert [(row.restored_step, row.steps_lost) for row in found.attempts] == [(None, 41), (None, 0)]
    assert [row.steps_lost for row in found.interruptions] == [41]
    assert sum(found.buckets.values()) == pytest.approx(found.wall_s)
    assert (found.buckets["productive"], found.buckets["discarded"]) == (50.0, 40.0 + 5.0)
    text = "\n".join(lines(found))
    assert "at least 92 steps finished, at least 41 of them lost and done again" in text
    assert "storage not told" in text
    assert "cost       at least 41 steps lost" in text
    story = "\n".join(explain(every_tenth(), 1))
    assert "step 9" not in story
    assert "steps 10 to 60 finished" in story


def test_a_start_that_is_told_counts_the_steps_before_the_first_told_one() -> None:
    found = report(every_tenth(assumed=False))
    assert (found.steps_finished, found.steps_lost) == (50 + 60, 50)
    assert [(row.steps, row.restored_step) for row in found.attempts] == [(50, 0), (60, 0)]


def test_of_steps_told_as_one_only_those_after_the_restart_are_lost() -> None:
    history = every_tenth(assumed=False)
    at = max(place for place, event in enumerate(history) if isinstance(event, ev.Ready))
    again = ev.Ready(t=60, attempt=1, step=45)
    found = report([*history[:at], again, *(event for event in history[at + 1 :] if getattr(event, "step", 60) >= 50)])
    assert (found.steps_lost, found.interruptions[0].steps_lost) == (5, 5)
    assert found.steps_finished == 50 + 15
    assert found.tokens_again == 9 * 5 // 10
    assert found.buckets["discarded"] == 5.0 + 5.0  # half of the ten seconds, and what was begun at the kill
    assert sum(found.buckets.values()) == pytest.approx(found.wall_s)


def test_what_did_not_run_is_not_interrupted_and_costs_nothing() -> None:
    """Stopped for a person at 12 s, started again an hour later, ready 3 s after that."""
    verdict = ev.Verdict(class_="software_error", component="code")
    told: list[ev.Event] = [
        ev.RunStarted(t=0, run_id="r"),
        ev.AttemptStarted(t=0, attempt=0, ranks=1, source="init"),
        ev.Ready(t=1, attempt=0, step=0),
        ev.ProcessDied(t=10, attempt=0, kind="worker", pid=7, status=1, rank=0),
        ev.InterruptionClassified(t=11, attempt=0, verdict_id="v", verdict=verdict),
        ev.Decided(t=11, attempt=0, action="stop_for_human", reason="the same again", verdict_id="v"),
        ev.RunEnded(t=12, outcome="stopped"),
        ev.RunStarted(t=3612, run_id="r"),
        ev.AttemptStarted(t=3613, attempt=1, ranks=1, source="init"),
        ev.Ready(t=3615, attempt=1, step=0),
    ]
    found = report(told)
    assert found.mtbf_s == 15.0
    assert (found.mtbf_low_s, found.mtbf_high_s) == mtbf_interval(1, 15.0)
    (row,) = found.interruptions
    assert (row.down_s, row.absent_s) == (5.0, 3600.0)
    assert "5.0 s until all ranks were ready again, and 1h 00m in which nobody had" in "\n".join(lines(found))


def test_tokens_that_were_read_again_are_told_apart() -> None:
    found = report(crashed_once())
    assert (found.tokens, found.tokens_again) == (50, 10)
    assert "50 tokens read, 10 of them again, loss 1.0000" in lines(found)


def test_steps_without_any_time_have_no_effective_time() -> None:
    told: list[ev.Event] = [
        ev.RunStarted(t=0, run_id="r"),
        ev.AttemptStarted(t=1, attempt=0, ranks=1, source="init"),
        ev.Ready(t=2, attempt=0, step=0, assumed=True),
        ev.StepFinished(t=2, attempt=0, step=1, t_begin=2, t_end=2),
        ev.RunEnded(t=3, outcome="finished", step=1),
    ]
    text = "\n".join(lines(report(told)))
    assert "effective time: not known" in text
    assert " 0.0%" not in text


def test_work_done_before_anybody_knew_that_it_had_begun_is_followed_by_no_restart() -> None:
    told: list[ev.Event] = [
        ev.RunStarted(t=0, run_id="r"),
        ev.AttemptStarted(t=1, attempt=0, ranks=1, source="init"),
        ev.ProcessDied(t=3, attempt=0, kind="worker", pid=7, status=0, rank=0),
        ev.Ready(t=2, attempt=0, step=0, assumed=True),
        ev.StepFinished(t=2, attempt=0, step=1, t_begin=2, t_end=2),
        ev.StepFinished(t=3, attempt=0, step=2, t_begin=2, t_end=3),
        ev.AttemptEnded(t=3, attempt=0, step=2),
        ev.RunEnded(t=4, outcome="finished", step=2),
    ]
    found = report(told)
    assert {name: s for name, s in found.buckets.items() if s} == {"initialisation": 2.0, "productive": 1.0, "stopping": 1.0}


def test_a_story_joins_steps_between_which_nothing_is_told() -> None:
    history = list(crashed_once())
    text = "\n".join(explain(history, 0))
    assert "steps 1 to 3 finished" in text, "the snapshot after step 2 is no part of the story"
    at = next(place for place, event in enumerate(history) if isinstance(event, ev.StepFinished))
    text = "\n".join(explain([*history[: at + 1], *history[at + 4 :]], 0))
    assert "  step 1 finished" in text


def test_nothing_is_said_of_the_state_of_a_script_that_tells_nothing() -> None:
    started, *rest = crashed_once()
    script = [msgspec.structs.replace(started, config={"command": ["true"]}), *rest[:1], ev.RunEnded(t=130, outcome="failed")]
    assert report(script).attempts[0].restored_step is None
    assert "state from" not in "\n".join(explain(script, 0))
    assert "state from init" in "\n".join(explain(crashed_once(), 0))


def test_an_attempt_that_somebody_stopped_says_so_and_one_that_came_to_its_end_does_not() -> None:
    def ended(outcome: Any) -> str:
        told: list[ev.Event] = [
            *crashed_once(),
            ev.RunStarted(t=200, run_id="r"),
            ev.AttemptStarted(t=201, attempt=2, ranks=2, source="storage"),
            ev.Ready(t=203, attempt=2, step=4),
            ev.StopRequested(t=204, by="ftrain stop"),
            ev.AttemptEnded(t=205, attempt=2, step=5),
            ev.RunEnded(t=206, outcome=outcome, step=5),
        ]
        rows = report(told).attempts
        assert [row.ended_by for row in rows[:2]] == ["unknown", ""]
        return rows[2].ended_by

    assert ended("stopped") == "user_interrupt"
    assert ended("finished") == ""


def test_what_several_ranks_said_is_one_line_that_names_them() -> None:
    said = "StateError: 'model' is not a module"
    evidence = [ev.EvidenceLine(where="log", line=7 * rank + 3, text=f"[rank{rank}]: {said}") for rank in (1, 0, 2)]
    evidence += [
        ev.EvidenceLine(where="log", line=40, text="[rank2]: another"),
        ev.EvidenceLine(where="scheduler", line=1, text="supervisor: no progress of rank 2"),
        ev.EvidenceLine(where="scheduler", line=2, text="slurmstepd: cancelled"),
    ]
    assert evidence_texts(evidence) == [
        f"log:10: [ranks 0, 1, 2]: {said}",
        "log:40: [rank2]: another",
        "no progress of rank 2",
        "scheduler:2: slurmstepd: cancelled",
    ]


def test_a_cause_that_the_supervisor_saw_itself_shows_no_prefix_of_ours() -> None:
    for rank, text in ((1, "no progress of rank 1: sleeps at train.py:8"), (None, "node n2 was lost: its connection ended")):
        case = Evidence(exit={"0": None, "1": None} if rank else {}, scheduler=(f"supervisor: {text}",))
        verdict = classify(case)
        assert verdict.reason == text
        assert [line.text for line in verdict.evidence] == [f"supervisor: {text}"], "as the ledger keeps it"
