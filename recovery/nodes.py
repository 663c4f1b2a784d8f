"""Which nodes to leave out of the next attempt: a pure function of what has happened, so that it can be replayed.

A node that is blamed is left out for a time that doubles with each further blame and then expires: hardware is repaired, and
blame is sometimes wrong. A network fault names two ends and proves neither guilty, so one alone is tolerated and only a second
within minutes counts (published practice: tolerate twice in five minutes). A node that fails fast is worse than one that fails
often. And when more than a share of all nodes would have to go, it is not the nodes: the breaker keeps all but the worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

from recovery.policy import History, Limits, PastInterruption

NETWORK_CLASSES = frozenset({"network_link", "network_timeout", "rendezvous"})


class Exclusions(Struct, frozen=True, kw_only=True):
    """Node -> until when it is left out, and why. `tripped`: the breaker let nodes back in that blame alone would leave out."""

    until: dict[str, float]
    reason: str
    tripped: bool = False


def exclusions(history: History, nodes: Sequence[str], now_t: float, limits: Limits) -> Exclusions:
    """The nodes of `nodes` to leave out at `now_t`."""
    blamed = {node: _until(_blames(history, node, limits), limits) for node in nodes}
    out = {node: until for node, until in blamed.items() if until > now_t}
    most = int(len(nodes) * limits.breaker_share)
    if len(out) <= most:
        return Exclusions(until=out, reason=_words(out, now_t))
    worst = sorted(out, key=lambda node: (-lemon_score(history, node, now_t, limits), node))[:most]
    kept = {node: out[node] for node in worst}
    reason = f"{len(out)} of {len(nodes)} nodes are blamed, more than the {most} that may be left out at once: not the nodes"
    return Exclusions(until=kept, reason=f"{reason}; {_words(kept, now_t)}", tripped=True)


def lemon_score(history: History, node: str, now_t: float, limits: Limits) -> float:
    """How bad a node is: blames, each counting less with its age (half after `quarantine_s`), double if it failed at once."""
    score = 0.0
    for past in _blames(history, node, limits):
        age = max(0.0, now_t - past.t) / limits.quarantine_s if limits.quarantine_s else 0.0
        score += 2.0 ** -min(age, 1000.0) * (2.0 if _at_once(history, past) else 1.0)
    return score


def _blames(history: History, node: str, limits: Limits) -> list[PastInterruption]:
    """The interruptions held against a node."""
    struck = [past for past in history.interruptions if node and past.node == node and past.action == "restart_exclude_node"]
    flaps = [past for past in struck if past.class_ in NETWORK_CLASSES]
    second = [later for earlier, later in pairwise(flaps) if later.t - earlier.t <= limits.flap_s]
    return [past for past in struck if past.class_ not in NETWORK_CLASSES or past in second]


def _until(blames: Sequence[PastInterruption], limits: Limits) -> float:
    """When the quarantine ends: it doubles with each blame, and counts from the last."""
    if not blames:
        return 0.0
    length_s = min(limits.quarantine_s * 2.0 ** min(len(blames) - 1, 64), limits.quarantine_max_s)
    return blames[-1].t + length_s


def _at_once(history: History, past: PastInterruption) -> bool:
    """Whether the attempt brought no new step: a node that fails fast eats attempt after attempt."""
    before = [other for other in history.interruptions if other.t < past.t]
    return bool(before) and before[-1].best_step >= past.best_step


def _words(out: dict[str, float], now_t: float) -> str:
    if not out:
        return "no node is left out"
    return "left out: " + ", ".join(f"{node} for {until - now_t:.0f} s more" for node, until in sorted(out.items()))
