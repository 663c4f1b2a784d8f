"""What a drill does to a run, when, and what the supervisor ought to make of it. Pure: seeded, no clock, no process.

Strikes come at random, as failures do (exponential gaps), but each kind in its turn before any comes again: a short drill
should have seen as much as it can.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from ftrain.config import Fault, FaultKind, FaultPoint
from recovery.events import AttemptStarted, CheckpointCommitted, Event, steps_of
from recovery.report import InterruptionRow

NONE = "none"  # no interruption: the workers step on


class Kind(Struct, frozen=True, kw_only=True):
    """One kind of strike. `about`: what happens, in a line for a person; `classes`: verdicts that are right; `target`: whose
    process is struck; `store`: nobody's, the run's storage is; `inside`: a process of the run does it to itself, at the named
    point `at` (`ftrain.faults`), in the words of `text`.
    """

    name: str
    about: str
    target: str
    what: str
    classes: frozenset[str]
    at: FaultPoint = "step"
    text: str = ""
    least_step: int = 1  # before that the run would not notice


ECC = "CUDA error: uncorrectable ECC error encountered"
KINDS: tuple[Kind, ...] = (
    Kind(
        name="worker-kill",
        about="a rank is killed, as the kernel does when memory runs out (SIGKILL)",
        target="worker",
        what="SIGKILL",
        classes=frozenset({"unknown"}),
    ),
    Kind(
        name="worker-segv",
        about="a rank crashes in native code (SIGSEGV)",
        target="worker",
        what="SIGSEGV",
        classes=frozenset({"process_crash"}),
    ),
    Kind(
        name="worker-abort",
        about="a rank gives up, as a failed assertion of a library does (SIGABRT)",
        target="worker",
        what="SIGABRT",
        classes=frozenset({"process_crash"}),
    ),
    Kind(
        name="worker-stop",
        about="a rank stands still and does not answer: the others hang (SIGSTOP)",
        target="worker",
        what="SIGSTOP",
        classes=frozenset({"collective_timeout"}),
    ),
    Kind(
        name="keeper-kill",
        about="the process that stores checkpoints is killed; the ranks step on",
        target="keeper",
        what="SIGKILL",
        classes=frozenset({NONE}),
    ),
    Kind(
        name="zygote-kill",
        about="the process that new ranks are forked from is killed; the ranks step on",
        target="zygote",
        what="SIGKILL",
        classes=frozenset({NONE}),
    ),
    Kind(
        name="coordinator-kill",
        about="the supervisor itself is killed; the ranks step on",
        target="coordinator",
        what="SIGKILL",
        classes=frozenset({NONE}),
    ),
    Kind(
        name="agent-kill",
        about="the process that starts and watches the ranks is killed, and they with it: a lost node",
        target="agent",
        what="SIGKILL",
        classes=frozenset({"unknown"}),
    ),
    Kind(
        name="exception",
        about="a rank raises a Python exception in a step",
        target="inside",
        what="raise",
        classes=frozenset({"software_error"}),
    ),
    Kind(
        name="loop",
        about="a rank is caught in an endless loop in a step: the others hang",
        target="inside",
        what="loop",
        classes=frozenset({"collective_timeout"}),
    ),
    Kind(
        name="lock",
        about="a rank waits for a lock that nobody frees: the others hang",
        target="inside",
        what="lock",
        classes=frozenset({"collective_timeout"}),
    ),
    Kind(
        name="nan",
        about="the gradients of a step are not finite",
        target="inside",
        what="nan",
        classes=frozenset({NONE}),
        at="gradients",
    ),
    Kind(
        name="flip",
        about="one bit of a gradient is flipped: silent corruption",
        target="inside",
        what="flip",
        classes=frozenset({NONE}),
        at="gradients",
        least_step=20,
    ),
    Kind(
        name="keeper-upload",
        about="the process that stores checkpoints is killed in the middle of an upload",
        target="inside",
        what="kill",
        classes=frozenset({NONE}),
        at="upload",
    ),
    Kind(
        name="mismatch",
        about="a rank enters a collective that the others do not: all of them hang",
        target="inside",
        what="part",
        classes=frozenset({"collective_timeout"}),
        at="gradients",
    ),
    Kind(
        name="gpu-error",
        about="a rank reports an uncorrectable memory error of its GPU",
        target="inside",
        what="raise",
        classes=frozenset({"gpu_memory_error"}),
        text=ECC,
    ),
    Kind(
        name="sigterm",
        about="`ftrain run` is asked to leave, as by a scheduler (SIGTERM); the drill starts it again",
        target="parent",
        what="SIGTERM",
        classes=frozenset({NONE}),
    ),
    Kind(
        name="corrupt-newest",
        about="a bit of the newest checkpoint is flipped, and the node is lost with what it has in memory",
        target="agent",
        what="damage",
        classes=frozenset({"unknown"}),
    ),
    Kind(
        name="store-outage",
        about="for some seconds nothing can be written to the checkpoints' folder (needs root)",
        target="store",
        what="read-only",
        classes=frozenset({NONE}),
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS}
TABLE_5 = {
    "gpu-error": 148 + 72 + 19 + 17 + 6,  # faulty GPU, HBM3, SRAM, system processor, thermal
    "exception": 54 + 2,  # software bug, dependency
    "worker-stop": 35 + 7,  # switch or cable, NIC: a rank that does not answer
    "sigterm": 32,  # host maintenance
    "loop": 4,  # NCCL watchdog timeouts, of unknown cause: two ways to hang
    "lock": 3,
    "flip": 3,  # silent data corruption: two ways to show
    "nan": 3,
    "agent-kill": 3 + 3 + 2 + 2 + 2 + 2,  # SSD, power supply, chassis, IO board, CPU, memory: the node is gone
}
"""The unplanned interruptions of Llama 3's 54 days (Table 5, by count), as this machine can show them."""


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

    @property
    def right(self) -> bool:
        """Whether the supervisor took it for what it was."""
        return self.class_ in BY_NAME[self.kind].classes


def plan(
    kinds: Sequence[str],
    *,
    seed: int,
    seconds: float,
    mean_gap_s: float,
    ranks: int,
    weights: Mapping[str, float] | None = None,
) -> list[Strike]:
    """The strikes of a drill. At least one, so that the shortest drill shows something. `weights`: drawn by these shares,
    instead of each in its turn.
    """
    rng = random.Random(seed)
    strikes: list[Strike] = []
    turn: list[str] = []
    now = rng.expovariate(1.0 / mean_gap_s)
    while now < seconds or not strikes:
        if not turn:
            turn = list(kinds)
            rng.shuffle(turn)
        kind = turn.pop() if weights is None else rng.choices(list(weights), list(weights.values()))[0]
        strikes.append(Strike(after_s=min(now, seconds), kind=kind, rank=rng.randrange(ranks)))
        now += rng.expovariate(1.0 / mean_gap_s)
    return strikes


def inside(strikes: Sequence[Strike]) -> tuple[Fault, ...]:
    """The strikes that processes of the run make on themselves, in their order."""
    return tuple(
        Fault(kind=cast(FaultKind, kind.what), at=kind.at, step=kind.least_step, rank=strike.rank, text=kind.text)
        for strike in strikes
        if (kind := BY_NAME[strike.kind]).target == "inside"
    )


def last_checkpoints(told: Sequence[Event], every: int) -> dict[int, float]:
    """The periodic checkpoints that the last attempt made itself, and when the step of each was finished (unix time).

    What an attempt before it had begun to upload may be committed later than the strike: that is no proof of a recovery.
    """
    ended: dict[int, float] = {}
    committed: list[int] = []
    attempt: int | None = None
    for event in told:
        if isinstance(event, AttemptStarted):
            attempt, ended, committed = event.attempt, {}, []
        elif event.attempt == attempt:
            ended.update({record.step: record.t_end for record in steps_of(event)})
            if isinstance(event, CheckpointCommitted) and event.step % every == 0:
                committed.append(event.step)
    return {step: ended[step] for step in committed if step in ended}


def provable(checkpoints: Mapping[int, float], struck: Sequence[Struck]) -> int | None:
    """The first of these checkpoints whose step was finished after every strike; None: not yet."""
    last = max((strike.t for strike in struck), default=0.0)
    return min((step for step, t in checkpoints.items() if t > last), default=None)


def match(struck: Sequence[Struck], rows: Sequence[InterruptionRow]) -> tuple[list[Struck], list[InterruptionRow]]:
    """Each strike with the interruption that it led to, and the interruptions that no strike explains.

    A strike leads to the first interruption between it and the next one, if there is one: the drill waits for that, and for new
    progress, before it strikes again.
    """
    left = sorted(rows, key=lambda row: row.t)
    matched: list[Struck] = []
    struck = sorted(struck, key=lambda strike: strike.t)
    for number, strike in enumerate(struck):
        until = struck[number + 1].t if number + 1 < len(struck) else float("inf")
        row = next((row for row in left if strike.t - 0.5 <= row.t < until), None)
        if row is not None:
            left.remove(row)
        matched.append(_with(strike, row))
    return matched, left


def _with(strike: Struck, row: InterruptionRow | None) -> Struck:
    if row is None:
        return replace(strike, class_=NONE, action=NONE)
    return replace(strike, class_=row.class_, action=row.action, steps_lost=row.steps_lost, down_s=row.down_s)


def confusion(struck: Sequence[Struck]) -> dict[str, dict[str, int]]:
    """Kind of strike -> class -> how often."""
    counts: dict[str, Counter[str]] = {}
    for strike in struck:
        counts.setdefault(strike.kind, Counter())[strike.class_] += 1
    return {kind: dict(sorted(classes.items())) for kind, classes in sorted(counts.items())}
