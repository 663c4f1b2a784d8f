"""From a verdict to what is done about it: a pure function of (verdict, history, limits), with its reason in words.

Pure, so that the supervisor, the tests and the planner's failure simulation run the very same code, and so that a decision can
stand in the ledger before it is carried out and be replayed from the ledger afterwards.

Two costs shape the rules. A false stop costs until a person looks, which has no bound; a false restart costs one restart. So
the default is to go on, and what stops a run must be known: a cause that cannot go away by itself, or proof that trying again
does not help. That proof is the lack of *progress* (no new highest step), never time: a run that fails every hour and moves on
is healthy, a run that restarts for ever at the same step is not. And a retry that differs from the last one finds out more than
the same thing again.

Each rule is a function of the facts that answers or passes; `RULES` is their order, the first answer holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from recovery.events import Action, Verdict

# What is nobody's fault and says nothing about the next attempt: never counted against a budget.
FREE_CLASSES = frozenset({"preemption", "time_limit", "host_maintenance"})
# What the program itself does: at the same step again, it will do it for ever.
PROGRAM_CLASSES = frozenset({"cuda_program_error", "process_crash", "software_error", "data_error", "numeric_divergence"})
NETWORK_CLASSES = frozenset({"network_link", "network_timeout", "rendezvous"})

Change = Literal["more_evidence", "from_storage", "older_checkpoint"]


class Limits(Struct, frozen=True, kw_only=True):
    """How patient the supervisor is. Times in seconds."""

    max_restarts: int = 3  # restarts without a new highest step before giving up
    unknown_restarts: int = 2  # the same, of interruptions nobody can explain
    same_failure: int = 2  # times the program may fail alike at the same step: one confirmation, then a person
    backoff_s: float = 1.0  # first wait after a repeated failure, doubled each time
    backoff_max_s: float = 60.0  # longest such wait
    outage_wait_s: float = 30.0  # first wait when something outside must recover (restart_after_wait)
    outage_max_s: float = 900.0  # longest such wait
    outage_restarts: int = 20  # restarts without progress while something outside is down
    jitter: float = 0.0  # a wait is stretched by up to this share, so that many runs do not return at once
    quarantine_s: float = 3600.0  # a blamed node is left out for this long, doubled with each further blame
    quarantine_max_s: float = 7 * 86_400.0  # longest such time
    flap_s: float = 300.0  # a network fault is held against a place only if it comes twice within this time
    breaker_share: float = 0.25  # more nodes than this share are never left out at once: then it is not the nodes
    straggler: Literal["report", "restart", "exclude"] = "report"  # what is done about a rank that is slow for long
    straggler_factor: float = 1.5  # so many times the median's computing time make a straggler
    straggler_windows: int = 3  # in so many windows of steps in a row
    skip_updates: int = 0  # updates whose data may be passed over in the whole run, where data or code make no sense
    layout_hold_s: float = 60.0  # a layout is kept at least this long before what is back by itself makes it grow again


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
    skipped: bool = False  # the next attempt reads other data


class Doubted(Struct, frozen=True, kw_only=True):
    """Updates whose results make no sense. `again`: from the same step on as in an earlier attempt, on the same data."""

    first: int
    last: int
    again: bool
    passed_over: int = 0  # updates whose data the run has passed over so far


class History(Struct, frozen=True, kw_only=True):
    """What happened before: earlier interruptions, oldest first, and the highest step ever finished."""

    interruptions: tuple[PastInterruption, ...] = ()
    best_step: int = 0

    def since_progress(self) -> tuple[PastInterruption, ...]:
        """Earlier interruptions after which no new highest step was finished, on the data that are read now."""
        first = max((number for number, past in enumerate(self.interruptions, start=1) if past.skipped), default=0)
        return tuple(past for past in self.interruptions[first:] if past.best_step >= self.best_step)

    def with_interruption(self, past: PastInterruption) -> History:
        """The history after one more interruption."""
        return replace(self, interruptions=(*self.interruptions, past), best_step=max(self.best_step, past.best_step))


class Decision(Struct, frozen=True, kw_only=True):
    """What to do, after which wait, and why. `given_up`: the budget, not the cause, ended the run.

    `differently`: how this attempt should differ from the one that failed; a delegate that cannot do one of them leaves it.
    """

    action: Action
    reason: str
    wait_s: float = 0.0
    given_up: bool = False
    differently: tuple[str, ...] = ()
    skip: tuple[int, int] | None = None  # first and last update whose data are passed over from now on


class Facts(Struct, frozen=True, kw_only=True):
    """What every rule sees. `repeats`: counted interruptions since the last progress, without this one."""

    verdict: Verdict
    history: History
    limits: Limits
    repeats: tuple[PastInterruption, ...]
    cause: str
    doubted: Doubted | None = None


Rule = Callable[[Facts], Decision | None]


def decide(
    verdict: Verdict,
    history: History,
    limits: Limits,
    rules: Sequence[Rule] | None = None,
    *,
    doubted: Doubted | None = None,
    now_t: float | None = None,
) -> Decision:
    """What the supervisor does about `verdict`. `history` does not contain this interruption yet. `now_t`: unix time; without
    it a network fault is taken for one that has come before.
    """
    cause = f"{verdict.class_}: {verdict.reason}" if verdict.reason else verdict.class_
    if now_t is not None and _alone(verdict, history, limits, now_t):
        cause += f"; of a network fault the second within {limits.flap_s:g} s (recovery.flap_s) is held against a place"
        verdict = replace(verdict, action="restart")
    facts = Facts(
        verdict=verdict,
        history=history,
        limits=limits,
        repeats=tuple(past for past in history.since_progress() if not _free(past.planned, past.class_)),
        cause=cause,
        doubted=doubted,
    )
    answers = (rule(facts) for rule in (RULES if rules is None else rules))
    return next((answer for answer in answers if answer is not None), go_on(facts))


def _alone(verdict: Verdict, history: History, limits: Limits, now_t: float) -> bool:
    """Whether it is a network fault that would cost a place, and the first there for a while: it names two ends and proves
    neither guilty, and links that flap come back (published practice: tolerate it twice in five minutes).
    """
    if verdict.class_ not in NETWORK_CLASSES or verdict.action != "restart_exclude_node":
        return False
    here = (verdict.node, verdict.first_failing_rank)
    faults = [past for past in history.interruptions if past.class_ in NETWORK_CLASSES and (past.node, past.rank) == here]
    return not any(now_t - past.t <= limits.flap_s for past in faults)


def end_as_told(facts: Facts) -> Decision | None:
    """A verdict that ends the run ends it."""
    if facts.verdict.action not in ("finish", "stop_for_human"):
        return None
    return Decision(action=facts.verdict.action, reason=facts.cause)


def free_of_charge(facts: Facts) -> Decision | None:
    """What was planned, or came from outside, is followed without counting it."""
    verdict = facts.verdict
    if not _free(verdict.planned, verdict.class_):
        return None
    wait_s = facts.limits.outage_wait_s if verdict.action == "restart_after_wait" else 0.0
    return Decision(action=verdict.action, reason=f"{facts.cause}; not counted against the budget", wait_s=wait_s)


def outage(facts: Facts) -> Decision | None:
    """Something outside must recover: waiting is the remedy, so it has more patience, and longer waits."""
    if facts.verdict.action != "restart_after_wait":
        return None
    limits = facts.limits
    waited = _waits(facts.repeats)
    if waited >= limits.outage_restarts:
        return _give_up(facts, f"{waited} waits for something outside", limits.outage_restarts)
    wait_s = _stretch(_doubled(limits.outage_wait_s, waited, limits.outage_max_s), facts)
    again = f"wait {waited + 1} of {limits.outage_restarts} for something outside"
    return Decision(action="restart_after_wait", reason=f"{facts.cause}; {again}", wait_s=wait_s)


def unexplained(facts: Facts) -> Decision | None:
    """What nobody can explain has its own, smaller budget: it is the likeliest to come again."""
    unknown = _unknown(facts.repeats)
    if facts.verdict.class_ != "unknown" or unknown < facts.limits.unknown_restarts:
        return None
    return _give_up(facts, f"{unknown} restarts after an unknown cause", facts.limits.unknown_restarts)


def skip_data(facts: Facts) -> Decision | None:
    """The same steps on the same data made no sense twice: it is the data or the code. If that was declared, and as long as the
    declared number of updates lasts, their data are passed over.
    """
    found, limits = facts.doubted, facts.limits
    if facts.verdict.class_ != "numeric_divergence" or found is None or not found.again:
        return None
    count = found.last - found.first + 1
    if found.passed_over + count > limits.skip_updates:
        return None
    which = f"update {found.first}" if count == 1 else f"updates {found.first} to {found.last}"
    used = f"{found.passed_over + count} of {limits.skip_updates} that recovery.skip_updates allows"
    reason = f"{facts.cause}; the same when done again, so data or code: the data of {which} are passed over ({used})"
    return Decision(action="roll_back", reason=reason, skip=(found.first, found.last))


def same_again(facts: Facts) -> Decision | None:
    """The program failed alike at the same step before: another retry would only show it once more."""
    verdict, limits = facts.verdict, facts.limits
    if verdict.class_ not in PROGRAM_CLASSES or not verdict.signature:
        return None
    alike = sum(past.signature == verdict.signature and past.best_step == facts.history.best_step for past in facts.repeats)
    if alike < limits.same_failure:
        return None
    return _give_up(
        facts, f"{alike} restarts from the same failure ({verdict.signature}) at the same step", limits.same_failure
    )


def crash_loop(facts: Facts) -> Decision | None:
    """However the causes alternate: enough attempts without a new step."""
    own = len(facts.repeats) - _waits(facts.repeats)
    return _give_up(facts, f"{own} restarts", facts.limits.max_restarts) if own >= facts.limits.max_restarts else None


def go_on(facts: Facts) -> Decision:
    """At once the first time; after that with doubling waits, and each time differently."""
    verdict, repeats, limits = facts.verdict, facts.repeats, facts.limits
    if not repeats:
        return Decision(action=verdict.action, reason=f"{facts.cause}; first time since the last progress")
    differently = _differently(len(repeats))
    again = f"interruption {len(repeats) + 1} without a new step ({_counted(facts)}); next try with {' and '.join(differently)}"
    return Decision(
        action=verdict.action,
        reason=f"{facts.cause}; {again}",
        wait_s=_stretch(_doubled(limits.backoff_s, len(repeats) - 1, limits.backoff_max_s), facts),
        differently=differently,
    )


def _counted(facts: Facts) -> str:
    """Which restart this is by each limit that it counts against."""
    repeats, limits = facts.repeats, facts.limits
    said = f"restart {len(repeats) - _waits(repeats) + 1} of {limits.max_restarts}"
    if facts.verdict.class_ != "unknown":
        return said
    return f"{said}, {_unknown(repeats) + 1} of {limits.unknown_restarts} after an unknown cause"


RULES: tuple[Rule, ...] = (end_as_told, free_of_charge, outage, unexplained, skip_data, same_again, crash_loop)


def _differently(repeats: int) -> tuple[Change, ...]:
    """More evidence first; then the state may be what is wrong: not from memory, then an older one."""
    changes: tuple[Change, ...] = ("more_evidence", "from_storage", "older_checkpoint")
    return changes[:repeats] if repeats < len(changes) else changes


def _free(planned: bool, class_: str) -> bool:
    return planned or class_ in FREE_CLASSES


def _waits(repeats: Iterable[PastInterruption]) -> int:
    return sum(past.action == "restart_after_wait" for past in repeats)


def _unknown(repeats: Iterable[PastInterruption]) -> int:
    return sum(past.class_ == "unknown" for past in repeats)


def _give_up(facts: Facts, what: str, limit: int) -> Decision:
    reason = f"{facts.cause}; crash loop: {what} brought no new step (limit {limit})"
    return Decision(action="stop_for_human", reason=reason, given_up=True)


def _doubled(first_s: float, times: int, longest_s: float) -> float:
    return min(first_s * 2.0 ** min(times, 64), longest_s)


def _stretch(wait_s: float, facts: Facts) -> float:
    """Jitter from the verdict's own text: different for different runs, the same when a decision is replayed."""
    verdict = facts.verdict
    seed = f"{verdict.reason} {verdict.first_failing_rank} {verdict.node} {len(facts.repeats)}".encode()
    return wait_s * (1.0 + facts.limits.jitter * zlib.crc32(seed) / 2**32)
