"""Decisions against the rules they stand for: budgets that only progress resets, waits that double, reasons in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.events import Action, Verdict
from recovery.policy import RULES, Decision, Facts, History, Limits, PastInterruption, decide


def verdict(class_: str = "process_crash", action: Action = "restart", *, planned: bool = False) -> Verdict:
    return Verdict(class_=class_, component="software", action=action, planned=planned, reason="rank 1 ended with -11")


def past(
    class_: str = "process_crash", action: Action = "restart", *, step: int = 5, planned: bool = False
) -> PastInterruption:
    return PastInterruption(class_=class_, action=action, best_step=step, planned=planned)


def live(given: Verdict, limits: Limits, *, best_steps: list[int]) -> list[Decision]:
    """The decisions on the same verdict struck again and again, the highest finished step being as listed."""
    history, decisions = History(), []
    for best_step in best_steps:
        history = History(interruptions=history.interruptions, best_step=best_step)
        decision = decide(given, history, limits)
        decisions.append(decision)
        history = history.with_interruption(past(given.class_, decision.action, step=best_step, planned=given.planned))
    return decisions


def test_first_time_restarts_at_once_and_says_why() -> None:
    decision = decide(verdict(), History(), Limits())
    assert (decision.action, decision.wait_s, decision.given_up) == ("restart", 0.0, False)
    assert "process_crash: rank 1 ended with -11" in decision.reason


def test_waits_double_up_to_the_longest() -> None:
    limits = Limits(max_restarts=10, backoff_s=1.0, backoff_max_s=5.0)
    assert [d.wait_s for d in live(verdict(), limits, best_steps=[5] * 6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_crash_loop_stops() -> None:
    decisions = live(verdict(), Limits(max_restarts=3), best_steps=[5] * 4)
    assert [d.action for d in decisions] == ["restart"] * 3 + ["stop_for_human"]
    assert decisions[-1].given_up
    assert "crash loop: 3 restarts brought no new step (limit 3)" in decisions[-1].reason


def test_only_a_new_highest_step_resets_the_budget() -> None:
    limits = Limits(max_restarts=2)
    assert all(d.action == "restart" for d in live(verdict(), limits, best_steps=list(range(50))))
    assert [d.action for d in live(verdict(), limits, best_steps=[5, 5, 4])] == ["restart", "restart", "stop_for_human"]


def test_unknown_has_its_own_smaller_budget() -> None:
    decisions = live(verdict("unknown"), Limits(max_restarts=9, unknown_restarts=2), best_steps=[5] * 3)
    assert [d.action for d in decisions] == ["restart", "restart", "stop_for_human"]
    assert "unknown cause" in decisions[-1].reason


def test_the_same_failure_of_the_program_at_the_same_step_gets_one_confirmation() -> None:
    alike = Verdict(class_="process_crash", component="software", action="restart", signature="exit.segv")
    other = PastInterruption(class_="process_crash", action="restart", best_step=5, signature="crash.native")
    once = PastInterruption(class_="process_crash", action="restart", best_step=5, signature="exit.segv")
    limits = Limits(max_restarts=9, same_failure=2)
    for past_ones, action in (((once,), "restart"), ((once, other), "restart"), ((once, once), "stop_for_human")):
        decision = decide(alike, History(interruptions=past_ones, best_step=5), limits)
        assert decision.action == action
    assert "same failure (exit.segv) at the same step" in decision.reason


def test_a_retry_differs_from_the_last_one() -> None:
    decisions = live(verdict(), Limits(max_restarts=9), best_steps=[5] * 4)
    assert [len(d.differently) for d in decisions] == [0, 1, 2, 3]
    assert "from_storage" in decisions[2].differently
    assert "more_evidence" in decisions[2].reason


def test_rules_can_be_composed() -> None:
    def never(facts: Facts) -> Decision | None:
        return Decision(action="finish", reason="enough") if facts.cause.startswith("process") else None

    assert decide(verdict(), History(), Limits(), rules=(never, *RULES)).reason == "enough"


@pytest.mark.parametrize("class_", ["preemption", "time_limit", "host_maintenance"])
def test_what_is_nobodys_fault_costs_no_budget(class_: str) -> None:
    decisions = live(verdict(class_), Limits(max_restarts=1), best_steps=[5] * 20)
    assert {d.action for d in decisions} == {"restart"}
    history = History(interruptions=(past(class_),) * 9, best_step=5)
    assert decide(verdict(), history, Limits(max_restarts=1)).action == "restart"


def test_an_outage_is_waited_for_and_outlives_the_restart_budget() -> None:
    limits = Limits(max_restarts=1, outage_wait_s=10, outage_max_s=40, outage_restarts=5)
    decisions = live(verdict("object_store_network", "restart_after_wait"), limits, best_steps=[5] * 6)
    assert [d.wait_s for d in decisions[:5]] == [10, 20, 40, 40, 40]
    assert decisions[5].given_up


@pytest.mark.parametrize("action", ["stop_for_human", "finish"])
def test_a_verdict_that_ends_the_run_is_obeyed_and_not_called_giving_up(action: Action) -> None:
    decision = decide(verdict(action=action), History(), Limits())
    assert (decision.action, decision.given_up) == (action, False)


def test_no_restart_allowed_means_none() -> None:
    assert decide(verdict(), History(), Limits(max_restarts=0)).given_up


def test_jitter_only_lengthens_and_replays() -> None:
    limits = Limits(backoff_s=8.0, jitter=0.25)
    history = History(interruptions=(past(),), best_step=5)
    first, again = decide(verdict(), history, limits), decide(verdict(), history, limits)
    assert first == again
    assert 8.0 <= first.wait_s <= 10.0


classes = st.sampled_from(["unknown", "process_crash", "preemption", "object_store_network"])


@given(st.lists(classes, min_size=1, max_size=60))
def test_without_progress_every_run_that_is_somebodys_fault_ends(struck: list[str]) -> None:
    """However causes alternate, the number of counted restarts is bounded."""
    limits = Limits()
    history, counted = History(best_step=5), 0
    for class_ in struck:
        action: Action = "restart_after_wait" if class_ == "object_store_network" else "restart"
        decision = decide(verdict(class_, action), history, limits)
        if decision.given_up:
            break
        counted += class_ != "preemption"
        history = history.with_interruption(past(class_, decision.action))
    assert counted <= limits.max_restarts + limits.outage_restarts


def flaps(*at: float, rank: int = 2, class_: str = "network_link") -> list[Action]:
    """What is done about network faults at these times, on one node and a step apart."""
    history, actions = History(), list[Action]()
    for step, now_t in enumerate(at):
        history = History(interruptions=history.interruptions, best_step=step)
        found = Verdict(
            class_=class_, component="network", action="restart_exclude_node", node="n", first_failing_rank=2 if step else rank
        )
        decision = decide(found, history, Limits(flap_s=300.0), now_t=now_t)
        actions.append(decision.action)
        remembered = PastInterruption(
            class_=class_, action=decision.action, best_step=step, node="n", rank=found.first_failing_rank, t=now_t
        )
        history = history.with_interruption(remembered)
    return actions


def test_a_network_fault_is_held_against_a_place_the_second_time_within_minutes() -> None:
    assert flaps(0.0, 300.0) == ["restart", "restart_exclude_node"]
    assert flaps(0.0, 301.0, 400.0) == ["restart", "restart", "restart_exclude_node"]
    assert flaps(0.0, 10.0, rank=1) == ["restart", "restart"], "two places"
    assert flaps(0.0, 10.0, class_="gpu_lost") == ["restart_exclude_node"] * 2
    found = Verdict(class_="network_link", component="network", action="restart_exclude_node")
    assert "the second within 60 s (recovery.flap_s)" in decide(found, History(), Limits(flap_s=60.0), now_t=0.0).reason
    assert decide(found, History(), Limits()).action == "restart_exclude_node", "of one that is not dated nothing is known"


def test_each_limit_is_told_with_what_it_counts() -> None:
    """Waits for something outside are no restarts, and of all restarts only those that nobody can explain are counted apart."""
    before = (past("unknown"), past("object_store_network", "restart_after_wait"), past("process_crash"))
    history = History(interruptions=before, best_step=5)
    said = decide(verdict("unknown"), history, Limits(max_restarts=3, unknown_restarts=2)).reason
    assert "interruption 4 without a new step (restart 3 of 3, 2 of 2 after an unknown cause)" in said
    assert "interruption 4 without a new step (restart 3 of 3)" in decide(verdict(), history, Limits(same_failure=9)).reason
