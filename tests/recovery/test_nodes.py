"""Quarantine, the two-strike rule of the network and the breaker, on histories written by hand."""

from __future__ import annotations

import pytest

from recovery.nodes import exclusions, lemon_score
from recovery.policy import History, Limits, PastInterruption

NODES = tuple(f"n{i}" for i in range(8))
LIMITS = Limits(quarantine_s=100.0, quarantine_max_s=350.0, flap_s=10.0, breaker_share=0.25)


def blame(node: str, t: float, class_: str = "gpu_lost", *, step: int = 0) -> PastInterruption:
    return PastInterruption(class_=class_, action="restart_exclude_node", best_step=step, node=node, t=t)


def out(*past: PastInterruption, now: float) -> dict[str, float]:
    return exclusions(History(interruptions=past), NODES, now, LIMITS).until


def test_a_blamed_node_is_out_until_its_time_expires() -> None:
    assert out(blame("n1", 50), now=60) == {"n1": 150.0}
    assert out(blame("n1", 50), now=150) == {}


def test_each_further_blame_doubles_the_time_up_to_the_longest() -> None:
    assert out(blame("n1", 0), blame("n1", 200), now=210) == {"n1": 400.0}
    assert out(*(blame("n1", 10.0 * k) for k in range(6)), now=60) == {"n1": 50 + 350.0}


def test_a_network_fault_counts_only_the_second_time_within_minutes() -> None:
    assert out(blame("n1", 0, "network_link"), now=1) == {}
    assert out(blame("n1", 0, "network_link"), blame("n1", 50, "network_link"), now=51) == {}
    assert out(blame("n1", 0, "network_link"), blame("n1", 5, "network_link"), now=6) == {"n1": 105.0}


def test_what_was_only_restarted_blames_nobody() -> None:
    past = PastInterruption(class_="process_crash", action="restart", best_step=0, node="n1", t=0)
    assert out(past, now=1) == {}
    assert out(blame("", 0), now=1) == {}


def test_the_breaker_keeps_only_the_worst_out() -> None:
    past = [*(blame(node, 0) for node in NODES[:5]), blame("n3", 1), blame("n4", 2)]
    found = exclusions(History(interruptions=tuple(past)), NODES, 3.0, LIMITS)
    assert found.tripped
    assert set(found.until) == {"n3", "n4"}  # a quarter of eight
    assert "not the nodes" in found.reason


def test_a_lemon_is_worse_the_later_and_the_faster_it_failed() -> None:
    def score(*past: PastInterruption, now: float) -> float:
        return lemon_score(History(interruptions=past), "n1", now, LIMITS)

    assert score(blame("n1", 0), now=0) == 1.0
    assert score(blame("n1", 0), now=100) == pytest.approx(0.5)
    slow = score(blame("n2", 0, step=5), blame("n1", 1, step=9), now=1)
    fast = score(blame("n2", 0, step=5), blame("n1", 1, step=5), now=1)
    assert (slow, fast) == (1.0, 2.0)
    assert score(now=5) == 0.0
