"""A run over days with failures, second by second but without stepping: what the supervisor's own decisions make of it.

What to do about a failure is asked of `recovery.policy.decide`, and which checkpoints still exist of `storage.retention`: the
code that will run, not a model of it. Everything else is arithmetic between two failures, so ten thousand node-years take
seconds. Every second of the wall clock lands in exactly one bucket.

What is assumed, and can be changed: a failure that leaves the host alive leaves its memory tier readable (from the same
machine or from others); one that takes the host away costs the way back to the last commit in storage. A machine that is
excluded comes back after its repair; meanwhile a spare takes its place, or the run goes on with fewer replicas.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, floor
from random import Random
from typing import TYPE_CHECKING

from ftrain.plan.failure_source import Failure

if TYPE_CHECKING:
    from recovery.policy import Decision, History, Limits, PastInterruption
    from storage.retention import RetentionPolicy

HOST_LOST = frozenset({"node_failure", "host_maintenance", "host_oom", "preemption"})
"""Classes after which a host's memory cannot be read any more."""

STRAGGLER = "straggler"
"""A machine that is slow but does not fail."""

BUCKETS = ("productive", "repeated", "saving", "detection", "waiting", "restarting", "loading", "slowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the run works and how long things take; seconds unless said otherwise."""

    step_s: float
    snapshot_steps: int
    """0: no memory tier."""
    every_steps: int
    stall_s: float
    upload_s: float
    nodes: int
    nodes_per_replica: int = 1
    detect_s: float = 1.0
    hang_s: float = 120.0
    """Until a rank that makes no progress is given up."""
    restart_s: float = 60.0
    """Processes and communicators, up to loading."""
    load_memory_s: float = 5.0
    load_storage_s: float = 120.0
    spares: int = 0
    repair_s: float = 86400.0
    human_s: float = 1800.0
    """Until a person has looked."""
    corruption_s: float = 3600.0
    """Until silent corruption is noticed, at most."""
    straggler_speed: float = 0.8
    """Speed of the whole run while one machine is slow."""
    straggler_s: float = 3600.0
    """Until a slow machine is found and replaced, at a step boundary."""
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of a run. The buckets add up to `wall_s`."""

    wall_s: float = 0.0
    step: int = 0
    buckets: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))
    count: Counter[str] = field(default_factory=Counter)
    lost: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds lost, by cause: detection to the step at which it failed."""
    restores: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    """For each cause, the policy's words at its first occurrence."""

    @property
    def effective(self) -> float:
        """Share of the time that ended up in the final history, at full speed."""
        return self.buckets["productive"] / self.wall_s if self.wall_s else 0.0


class Simulation:
    """One run under construction."""

    def __init__(
        self, rules: Rules, *, limits: Limits, actions: Mapping[str, str], retention: tuple[RetentionPolicy, ...]
    ) -> None:
        self._rules = rules
        self._limits = limits
        self._actions = actions
        self._retention = retention
        self._past: tuple[PastInterruption, ...] = ()  # since the last progress
        self._best_step = 0
        self._out = Outcome()
        self._random = Random(rules.seed)
        self._now = 0.0
        self._phases: list[tuple[str, float]] = []
        self._returns: list[float] = []  # ascending, as the next
        self._slow: list[float] = []
        self._restored = 0
        self._commit = 0
        self._copying = False
        """Whether the time ended within a save, which then is not complete."""
        saving_s = rules.every_steps * rules.step_s
        behind = max(1, ceil(rules.upload_s / saving_s)) if saving_s else 1
        self._every = rules.every_steps * behind  # one upload at a time: a slow store skips saves

    def run(self, failures: Iterable[Failure], *, seconds: float) -> Outcome:
        """Let the run go through `failures` until `seconds`."""
        for failure in failures:
            if failure.t >= seconds:
                break
            self._advance(failure.t)
            self._fail(failure)
        self._advance(seconds)
        self._out.wall_s = seconds
        return self._out

    # --- time ---------------------------------------------------------------------------------------------------------

    def _spend(self, bucket: str, seconds: float) -> None:
        self._out.buckets[bucket] += seconds
        self._now += seconds

    def _advance(self, until: float) -> None:
        """Recover if there is something to recover from, then train, at a speed that changes when machines come back."""
        while self._phases and self._now < until:
            bucket, left = self._phases.pop(0)
            spent = min(left, until - self._now)
            self._spend(bucket, spent)
            if spent < left:
                self._phases.insert(0, (bucket, left - spent))
        while self._now < until and not self._phases:
            self._welcome()
            speed = self._speed()
            self._train(min((until, *self._returns[:1], *self._slow[:1])), speed)
            if self._welcome() and self._speed() > speed:  # one came back, or a slow one was replaced: planned, between steps
                self._phases = [("restarting", self._rules.restart_s), ("loading", self._rules.load_memory_s)]
                self._advance(until)

    def _welcome(self) -> bool:
        """Machines whose repair has ended are there again; slow ones that were found leave for repair. Were there any?"""
        back, found = bisect_right(self._returns, self._now), bisect_right(self._slow, self._now)
        if not back and not found:
            return False
        del self._returns[:back]
        for t in self._slow[:found]:
            insort(self._returns, t + self._rules.repair_s)
        del self._slow[:found]
        return True

    def _speed(self) -> float:
        rules = self._rules
        machines = rules.nodes + rules.spares - len(self._returns)
        replicas = rules.nodes // rules.nodes_per_replica
        slowest = rules.straggler_speed if self._slow else 1.0
        return slowest * min(replicas, machines // rules.nodes_per_replica) / replicas

    def _train(self, until: float, speed: float) -> None:
        """Whole steps until a moment; what is left of a step that did not end is lost."""
        rules = self._rules
        if speed <= 0:
            self._spend("waiting", until - self._now)
            return
        step_s, available = rules.step_s / speed, until - self._now
        steps, saves = self._steps_in(available, step_s)
        self._out.step += steps
        self._spend("productive", steps * rules.step_s)
        self._spend("slowed", steps * (step_s - rules.step_s))
        left = until - self._now
        self._copying = saves * rules.stall_s > left
        self._spend("saving", min(saves * rules.stall_s, left))
        self._spend("repeated", max(0.0, until - self._now))

    def _steps_in(self, available: float, step_s: float) -> tuple[int, int]:
        """(steps, saves) that fit into a time; a save follows every multiple of the interval."""
        k = self._rules.snapshot_steps or self._rules.every_steps
        if not k:
            return floor(available / step_s), 0
        first = k - self._out.step % k
        if available < first * step_s:
            return floor(available / step_s), 0
        cycle = k * step_s + self._rules.stall_s
        rounds, rest = divmod(available - first * step_s, cycle)
        done = max(0.0, rest - self._rules.stall_s)
        return first + int(rounds) * k + min(k - 1, floor(done / step_s)), 1 + int(rounds)

    # --- failures -----------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        if failure.class_ == STRAGGLER:
            self._out.count[failure.name] += 1
            self._out.reasons.setdefault(
                failure.name, "run on more slowly until it is found, then replace it at a step boundary"
            )
            self._out.lost[failure.name] += self._rules.straggler_s * (1 - self._rules.straggler_speed)
            insort(self._slow, self._now + self._rules.straggler_s)
            return
        decision = self._decide(failure)
        self._out.count[failure.name] += 1
        self._out.reasons.setdefault(failure.name, f"{decision.action}: {decision.reason}")
        source, restored = self._restore_point(failure, decision)
        rules, lost = self._rules, self._out.step - restored
        self._out.buckets["productive"] -= lost * rules.step_s
        self._out.buckets["repeated"] += lost * rules.step_s
        self._out.step = self._restored = restored
        self._out.restores[source] += 1
        hang = failure.class_ in ("collective_timeout", "network_timeout")
        person = rules.human_s if failure.needs_human or decision.action == "stop_for_human" else 0.0
        self._phases = [
            ("detection", rules.hang_s if hang else rules.detect_s),
            ("waiting", decision.wait_s + person),
            ("restarting", rules.restart_s),
            ("loading", rules.load_memory_s if source == "memory" else rules.load_storage_s),
        ]
        self._out.lost[failure.name] += lost * rules.step_s + sum(seconds for _, seconds in self._phases)
        if decision.action == "restart_exclude_node":
            insort(self._returns, self._now + rules.repair_s)

    def _decide(self, failure: Failure) -> Decision:
        """Ask the supervisor's own policy."""
        from recovery.policy import History, PastInterruption

        best = self._best_step = max(self._best_step, self._out.step)
        past = tuple(p for p in self._past if p.best_step >= best)
        action = self._actions.get(failure.class_, "restart")
        if past:
            decision = _asked(failure, action, History(interruptions=past, best_step=best), self._limits)
        else:
            decision = _first(failure, action, self._limits)
        new = PastInterruption(class_=failure.class_, action=decision.action, best_step=best, node=failure.node, t=self._now)
        self._past = (*past, new)
        return decision

    def _restore_point(self, failure: Failure, decision: Decision) -> tuple[str, int]:
        """From where and from which step the run goes on."""
        rules, step = self._rules, self._out.step
        if decision.action == "roll_back":
            onset = self._random.random() * rules.corruption_s
            self._commit = self._kept_before(max(0, step - floor(onset / rules.step_s)))
            return "storage", self._commit
        if rules.snapshot_steps and failure.class_ not in HOST_LOST:
            newest = step // rules.snapshot_steps - (1 if self._copying else 0)
            return "memory", max(self._restored, newest * rules.snapshot_steps)
        return "storage", self._committed(step)

    def _committed(self, step: int) -> int:
        """The newest multiple of the storage interval whose upload had ended when `step` was reached."""
        if self._every:
            uploaded = (step - floor(self._rules.upload_s / self._rules.step_s)) // self._every * self._every
            self._commit = max(self._commit, uploaded)
        return self._commit

    def _kept_before(self, step: int) -> int:
        """The newest checkpoint at or before `step` that retention still keeps."""
        from storage.retention import CheckpointFacts, kept_steps

        every, newest = self._every, self._committed(self._out.step)
        if not every:
            return 0
        steps = range(newest, max(-1, newest - 400 * every), -every)
        facts = [CheckpointFacts(s, self._now - (newest - s) * self._rules.step_s, None) for s in steps if s > 0]
        kept = kept_steps(self._retention, facts, now_s=self._now)
        return max((s for s in kept if s <= step), default=0)


def _asked(failure: Failure, action: str, history: History, limits: Limits) -> Decision:
    """What the supervisor's policy decides."""
    from recovery.events import Verdict
    from recovery.policy import decide

    verdict = Verdict(
        class_=failure.class_,
        component=failure.component,
        action=action,  # type: ignore[arg-type]  # the table's actions are checked when it is loaded
        reason=failure.name,
        node=failure.node,
    )
    return decide(verdict, history, limits)


@lru_cache(maxsize=65_536)
def _first(failure: Failure, action: str, limits: Limits) -> Decision:
    """The same where nothing has happened since the last progress, which is most of the time: a pure function of the failure,
    asked once for all the variants that go through it again."""
    from recovery.policy import History

    return _asked(failure, action, History(), limits)
