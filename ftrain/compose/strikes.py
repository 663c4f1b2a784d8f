"""What a drill does to a run, when, and what the supervisor ought to make of it. Pure: seeded, no clock, no process.

Strikes come at random, as failures do (exponential gaps), but each kind in its turn before any comes again: a short drill
should have seen as much as it can.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import cast

from msgspec import Struct

from ftrain.config import Fault, FaultKind
from recovery.report import InterruptionRow

NONE = "none"  # no interruption: the workers step on
TOGETHER_S = 2.0  # strikes this close may be one interruption


class Kind(Struct, frozen=True, kw_only=True):
    """One kind of strike. `classes`: verdicts that are right; `target`: whose process is struck, or `inside`: a worker does
    it to itself, between two steps (`ftrain.faults`).
    """

    name: str
    target: str
    what: str
    classes: frozenset[str]


KINDS: tuple[Kind, ...] = (
    Kind(name="worker-kill", target="worker", what="SIGKILL", classes=frozenset({"unknown"})),
    Kind(name="worker-segv", target="worker", what="SIGSEGV", classes=frozenset({"process_crash"})),
    Kind(name="worker-abort", target="worker", what="SIGABRT", classes=frozenset({"process_crash"})),
    Kind(name="worker-stop", target="worker", what="SIGSTOP", classes=frozenset({"collective_timeout"})),
    Kind(name="keeper-kill", target="keeper", what="SIGKILL", classes=frozenset({NONE})),
    Kind(name="zygote-kill", target="zygote", what="SIGKILL", classes=frozenset({NONE})),
    Kind(name="coordinator-kill", target="coordinator", what="SIGKILL", classes=frozenset({NONE})),
    Kind(name="agent-kill", target="agent", what="SIGKILL", classes=frozenset({"unknown"})),
    Kind(name="exception", target="inside", what="raise", classes=frozenset({"software_error"})),
    Kind(name="loop", target="inside", what="loop", classes=frozenset({"collective_timeout"})),
    Kind(name="lock", target="inside", what="lock", classes=frozenset({"collective_timeout"})),
    Kind(name="nan", target="inside", what="nan", classes=frozenset({NONE})),
    Kind(name="corrupt-newest", target="agent", what="damage", classes=frozenset({"unknown"})),
)
BY_NAME = {kind.name: kind for kind in KINDS}


class Strike(Struct, frozen=True, kw_only=True):
    """At `after_s` of the drill, this to rank `rank` (if it is a worker that is struck)."""

    after_s: float
    kind: str
    rank: int


class Struck(Struct, frozen=True, kw_only=True):
    """A strike that was made: when (unix time), at which pid and step, and whether the class it led to is right."""

    kind: str
    t: float
    pid: int
    rank: int | None
    step: int
    class_: str = ""
    action: str = ""
    steps_lost: int = 0
    down_s: float | None = None
    together: bool = False  # another strike was so close that one verdict may be on both

    @property
    def right(self) -> bool:
        """Whether the supervisor took it for what it was."""
        return self.together or self.class_ in BY_NAME[self.kind].classes


def plan(kinds: Sequence[str], *, seed: int, seconds: float, mean_gap_s: float, ranks: int) -> list[Strike]:
    """The strikes of a drill. At least one, so that the shortest drill shows something."""
    rng = random.Random(seed)
    strikes: list[Strike] = []
    turn: list[str] = []
    now = rng.expovariate(1.0 / mean_gap_s)
    while now < seconds or not strikes:
        if not turn:
            turn = list(kinds)
            rng.shuffle(turn)
        strikes.append(Strike(after_s=min(now, seconds), kind=turn.pop(), rank=rng.randrange(ranks)))
        now += rng.expovariate(1.0 / mean_gap_s)
    return strikes


def inside(strikes: Sequence[Strike], *, steps: int, seconds: float) -> tuple[Fault, ...]:
    """The strikes that workers make on themselves, at the steps that the undisturbed run had reached by then."""
    return tuple(
        Fault(
            kind=cast(FaultKind, BY_NAME[strike.kind].what),
            at="gradients" if strike.kind == "nan" else "step",
            step=max(1, round(steps * strike.after_s / seconds)),
            rank=strike.rank,
        )
        for strike in strikes
        if BY_NAME[strike.kind].target == "inside"
    )


def match(struck: Sequence[Struck], rows: Sequence[InterruptionRow]) -> tuple[list[Struck], list[InterruptionRow]]:
    """Each strike with the interruption that it led to, and the interruptions that no strike explains.

    A strike leads to the first interruption between it and the next one, if there is one: the drill waits for new progress
    before it strikes again. What a worker does to itself does not wait; close upon another strike it may be part of that.
    """
    left = sorted(rows, key=lambda row: row.t)
    matched: list[Struck] = []
    struck = sorted(struck, key=lambda strike: strike.t)
    for number, strike in enumerate(struck):
        until = struck[number + 1].t if number + 1 < len(struck) else float("inf")
        row = next((row for row in left if strike.t - 0.5 <= row.t < until), None)
        if row is not None:
            left.remove(row)
        near = any(other is not strike and abs(other.t - strike.t) < TOGETHER_S for other in struck)
        matched.append(_with(strike, row, together=near))
    return matched, left


def _with(strike: Struck, row: InterruptionRow | None, *, together: bool) -> Struck:
    found = {name: getattr(strike, name) for name in ("kind", "t", "pid", "rank", "step")}
    if row is None:
        return Struck(**found, class_=NONE, action=NONE, together=together)
    return Struck(
        **found, class_=row.class_, action=row.action, steps_lost=row.steps_lost, down_s=row.down_s, together=together
    )


def confusion(struck: Sequence[Struck]) -> dict[str, dict[str, int]]:
    """Kind of strike -> class -> how often."""
    counts: dict[str, Counter[str]] = {}
    for strike in struck:
        counts.setdefault(strike.kind, Counter())[strike.class_] += 1
    return {kind: dict(sorted(classes.items())) for kind, classes in sorted(counts.items())}
