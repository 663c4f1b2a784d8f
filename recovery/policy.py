"""From a verdict to what is done about it: a pure function of (verdict, history, limits), with its reason in words.

Pure, so that the supervisor, the tests and the planner's failure simulation run the very same code, and so that a decision can
stand in the ledger before it is carried out and be replayed from the ledger afterwards.

Two costs shape the rules. A false stop costs until a person looks, which has no bound; a false restart costs one restart. So
the default is to go on, and what stops a run must be known: a cause that cannot go away by itself, or proof that trying again
does not help. That proof is the lack of *progress* (no new highest step), never time: a run that fails every hour and moves
on is healthy, a run that restarts for ever at the same step is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from recovery.events import Action, Verdict

# What is nobody's fault and says nothing about the next attempt: never counted against a budget.
FREE_CLASSES = frozenset({"preemption", "time_limit", "host_maintenance"})


class Limits(Struct, frozen=True, kw_only=True):
    """How patient the supervisor is. Times in seconds."""

    max_restarts: int = 3  # restarts without a new highest step before giving up
    unknown_restarts: int = 2  # the same, of interruptions nobody can explain
    backoff_s: float = 1.0  # first wait after a repeated failure, doubled each time
    backoff_max_s: float = 60.0  # longest such wait
    outage_wait_s: float = 30.0  # first wait when something outside must recover (restart_after_wait)
    outage_max_s: float = 900.0  # longest such wait
    outage_restarts: int = 20  # restarts without progress while something outside is down
    jitter: float = 0.0  # a wait is stretched by up to this share, so that many runs do not return at once


class PastInterruption(Struct, frozen=True, kw_only=True):
    """One interruption as the policy remembers it. `best_step` is the highest step finished before it."""

    class_: str
    action: Action
    best_step: int
    signature: str = ""
    planned: bool = False
    rank: int | None = None
    node: str = ""
    attempt: int = -1
    t: float = 0.0


class History(Struct, frozen=True, kw_only=True):
    """What happened before: earlier interruptions, oldest first, and the highest step ever finished."""

    interruptions: tuple[PastInterruption, ...] = ()
    best_step: int = 0

    def since_progress(self) -> tuple[PastInterruption, ...]:
        """Earlier interruptions after which no new highest step was finished."""
        return tuple(past for past in self.interruptions if past.best_step >= self.best_step)

    def with_interruption(self, past: PastInterruption) -> History:
        """The history after one more interruption."""
        return replace(self, interruptions=(*self.interruptions, past), best_step=max(self.best_step, past.best_step))


class Decision(Struct, frozen=True, kw_only=True):
    """What to do, after which wait, and why. `given_up`: the budget, not the cause, ended the run."""

    action: Action
    reason: str
    wait_s: float = 0.0
    given_up: bool = False


def decide(verdict: Verdict, history: History, limits: Limits) -> Decision:
    """What the supervisor does about `verdict`. `history` does not contain this interruption yet."""
    cause = f"{verdict.class_}: {verdict.reason}" if verdict.reason else verdict.class_
    if verdict.action in ("finish", "stop_for_human"):
        return Decision(action=verdict.action, reason=cause)
    if verdict.planned or verdict.class_ in FREE_CLASSES:
        return Decision(
            action=verdict.action, reason=f"{cause}; not counted against the budget", wait_s=_free_wait(verdict, limits)
        )
    repeats = [past for past in history.since_progress() if not (past.planned or past.class_ in FREE_CLASSES)]
    spent = _spent(verdict, repeats, limits)
    if spent:
        return Decision(action="stop_for_human", reason=f"{cause}; {spent}", given_up=True)
    return _go_on(verdict, repeats, limits, cause)


def _spent(verdict: Verdict, repeats: list[PastInterruption], limits: Limits) -> str:
    """Why no budget is left; empty if there is some."""
    if verdict.action == "restart_after_wait":
        waited = _count(repeats, action="restart_after_wait")
        return _over(waited, limits.outage_restarts, "waits for something outside") if waited >= limits.outage_restarts else ""
    if verdict.class_ == "unknown":
        unknown = sum(past.class_ == "unknown" for past in repeats)
        if unknown >= limits.unknown_restarts:
            return _over(unknown, limits.unknown_restarts, "restarts after an unknown cause")
    own = len(repeats) - _count(repeats, action="restart_after_wait")
    return _over(own, limits.max_restarts, "restarts") if own >= limits.max_restarts else ""


def _over(count: int, limit: int, what: str) -> str:
    return f"crash loop: {count} {what} brought no new step (limit {limit})"


def _count(repeats: Iterable[PastInterruption], *, action: Action) -> int:
    return sum(past.action == action for past in repeats)


def _go_on(verdict: Verdict, repeats: list[PastInterruption], limits: Limits, cause: str) -> Decision:
    wait_s = _wait(verdict, repeats, limits)
    if not repeats:
        return Decision(action=verdict.action, reason=f"{cause}; first time since the last progress", wait_s=wait_s)
    again = f"{cause}; interruption {len(repeats) + 1} without a new step, {_budget(verdict, limits)} allowed"
    return Decision(action=verdict.action, reason=again, wait_s=wait_s)


def _budget(verdict: Verdict, limits: Limits) -> int:
    if verdict.action == "restart_after_wait":
        return limits.outage_restarts
    return min(limits.max_restarts, limits.unknown_restarts) if verdict.class_ == "unknown" else limits.max_restarts


def _wait(verdict: Verdict, repeats: list[PastInterruption], limits: Limits) -> float:
    """At once the first time, then doubling; an outage is given time from the first."""
    if verdict.action == "restart_after_wait":
        waited = _count(repeats, action="restart_after_wait")
        return _stretch(_doubled(limits.outage_wait_s, waited, limits.outage_max_s), verdict, len(repeats), limits)
    if not repeats:
        return 0.0
    return _stretch(_doubled(limits.backoff_s, len(repeats) - 1, limits.backoff_max_s), verdict, len(repeats), limits)


def _free_wait(verdict: Verdict, limits: Limits) -> float:
    return limits.outage_wait_s if verdict.action == "restart_after_wait" else 0.0


def _doubled(first_s: float, times: int, longest_s: float) -> float:
    return min(first_s * 2.0 ** min(times, 64), longest_s)


def _stretch(wait_s: float, verdict: Verdict, times: int, limits: Limits) -> float:
    """Jitter from the verdict's own text: different for different runs, the same when a decision is replayed."""
    seed = f"{verdict.reason} {verdict.first_failing_rank} {verdict.node} {times}".encode()
    return wait_s * (1.0 + limits.jitter * zlib.crc32(seed) / 2**32)
