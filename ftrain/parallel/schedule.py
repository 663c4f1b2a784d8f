"""A pipeline schedule is data: for each pipeline rank, the actions it carries out, in order.

One object is checked, simulated, drawn and executed. An engine that computes its order as it goes can only be tested by
running it; a list can be proven legal and free of deadlock before a process is started, and what the planner draws is
what the engine does.

The model is cut into *virtual stages* 0 .. num_chunks * num_ranks - 1, in the order in which activations pass through.
A rank holds `num_chunks` of them. Which rank holds which is the schedule's placement:

    loop   stage s lives on rank s mod p                (GPipe, 1F1B, interleaved, ZB-H1)
    vee    down the ranks and up again: p=4: 0 1 2 3 3 2 1 0   (zero bubble V: the ends share a rank)

Micro-batches count from 0; so do ranks and stages. Time is simulated in `ftrain.parallel.timeline`.
Sources: GPipe arXiv 1811.06965; 1F1B and interleaved arXiv 2104.04473; zero bubble arXiv 2401.10241; V shapes arXiv 2405.15362.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeVar

T = TypeVar("T")
Placement = Literal["loop", "vee"]
AHEAD = 2
"""Messages that a rank on a host waits for at once (ADR 31)."""


class Kind(Enum):
    """What an action does. A schedule uses either BACKWARD, or BACKWARD_INPUT and BACKWARD_WEIGHT."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of the input and of the weights
    BACKWARD_INPUT = "I"  # of the input only: what the stage before waits for
    BACKWARD_WEIGHT = "W"  # of the weights: nobody waits for it before the update


@dataclass(frozen=True, slots=True, order=False)
class Action:
    """One piece of work on one micro-batch by one virtual stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch + 1}@{self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of every pipeline rank, in the order they are issued."""

    name: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Virtual stages over all ranks."""
        return self.num_ranks * self.num_chunks

    def rank_of(self, stage: int) -> int:
        """The rank that holds a virtual stage."""
        return rank_of(stage, num_ranks=self.num_ranks, placement=self.placement)


class IllegalScheduleError(ValueError):
    """A schedule that cannot be built as asked, or that would not run; the message lists every problem."""


def rank_of(stage: int, *, num_ranks: int, placement: Placement) -> int:
    """The rank that holds a virtual stage under a placement."""
    turn, position = divmod(stage, num_ranks)
    return num_ranks - 1 - position if placement == "vee" and turn % 2 else position


def dependencies(action: Action, *, num_stages: int, split: bool) -> tuple[Action, ...]:
    """What must have ended before `action` may start; `split`: the schedule splits its backward."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage else ()
    if action.kind is Kind.BACKWARD_WEIGHT:
        return (Action(Kind.BACKWARD_INPUT, stage, microbatch),)
    own = Action(Kind.FORWARD, stage, microbatch)
    if stage == num_stages - 1:
        return (own,)
    return (own, Action(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, stage + 1, microbatch))


def is_split(schedule: Schedule) -> bool:
    """Whether the schedule computes gradients of inputs and weights apart."""
    return any(action.kind is Kind.BACKWARD_INPUT for rank in schedule.actions for action in rank)


# --- builders ---------------------------------------------------------------------------------------------------------


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards: the simplest, and it holds every micro-batch's activations."""
    order = [*_all(Kind.FORWARD, num_microbatches), *_all(Kind.BACKWARD, num_microbatches)]
    ranks = [[Action(kind, rank, m) for kind, m in order] for rank in range(num_ranks)]
    return _loop("gpipe", num_ranks, num_microbatches, ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: a backward as soon as there is one, so that rank i holds at most min(m, p - i) micro-batches."""
    ranks = []
    for rank in range(num_ranks):
        warm = min(num_microbatches, num_ranks - 1 - rank)
        order = _alternate(list(range(num_microbatches)), list(range(num_microbatches)), warm)
        ranks.append([Action(kind, rank, m) for kind, m in order])
    return _loop("1f1b", num_ranks, num_microbatches, ranks)


def interleaved(num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B: each rank holds `num_chunks` thin stages, which divides the bubble by that number.

    Micro-batches go in groups of p through all chunks of a rank, so their number must be a multiple of p.
    """
    p, m, v = num_ranks, num_microbatches, num_chunks
    if v == 1:
        return one_f_one_b(p, m)
    require_groups(p, m)
    order = [(chunk, base + i) for base in range(0, m, p) for chunk in range(v) for i in range(p)]
    ranks = []
    for rank in range(p):
        forwards = [(chunk * p + rank, mb) for chunk, mb in order]
        backwards = [((v - 1 - chunk) * p + rank, mb) for chunk, mb in order]
        warm = min(len(order), 2 * (p - 1 - rank) + (v - 1) * p)
        ranks.append([Action(kind, stage, mb) for kind, (stage, mb) in _alternate(forwards, backwards, warm)])
    return _loop("interleaved", p, m, ranks, num_chunks=v)


def require_groups(num_ranks: int, num_microbatches: int) -> None:
    """Raises unless micro-batches come in whole groups of p, which interleaving needs."""
    p, m = num_ranks, num_microbatches
    if p == 1 or m % p:
        near = " or ".join(str(n) for n in sorted({max(1, m // p) * p, (m // p + 1) * p}))
        raise IllegalScheduleError(
            f"interleaved needs more than one pipeline rank and micro-batches in multiples of it: given {p} ranks and {m} "
            f"micro-batches; the nearest legal counts are {near}"
        )


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble H1: weight gradients fill what 1F1B leaves idle.

    Rank i starts with p - i forwards and lets at most i weight gradients wait, so that every rank holds what 1F1B's first
    rank holds, and the idle time of each shrinks from (p-1)(F+B+W) to (p-1)(F+B-W): if W is not the longest of the three, else
    to (p-1) max(F, B), because the first backward cannot come earlier (m >= 2p).
    """
    return _loop("zb-h1", num_ranks, num_microbatches, [_h1_rank(r, num_ranks, num_microbatches) for r in range(num_ranks)])


def _h1_rank(rank: int, p: int, m: int) -> list[Action]:
    line = _Line(m, stages=(rank,))
    line.add(Kind.FORWARD, 0, times=p - rank)
    for microbatch in range(m):
        line.add(Kind.BACKWARD_INPUT, 0)
        if microbatch >= rank:
            line.add(Kind.BACKWARD_WEIGHT, 0)
        line.add(Kind.FORWARD, 0)
    line.add(Kind.BACKWARD_WEIGHT, 0, times=m)
    return line.actions


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble on a V: the last stage lives beside the first, so the first backward starts where the batch entered.

    As much is held as under 1F1B (2p half stages); with F = B = W no rank idles between its first and its last action.
    Idle time does not grow with m, but with what makes the three unequal: on two ranks, each time that of a half stage, it is
    the longest of F, B, 2(B-W) and 2F-B-W (as long as W is at least half of B).
    """
    ranks = tuple(tuple(_vee_rank(r, num_ranks, num_microbatches)) for r in range(num_ranks))
    return Schedule(
        name="zb-v",
        num_ranks=num_ranks,
        num_chunks=2,
        num_microbatches=num_microbatches,
        placement="vee",
        actions=ranks,
    )


def _vee_rank(rank: int, p: int, m: int) -> list[Action]:
    """Chunk 0 goes down the ranks, chunk 1 comes back up; each phase stops adding where the micro-batches end."""
    line = _Line(m, stages=(rank, 2 * p - 1 - rank))
    line.add(Kind.FORWARD, 0, times=2 * (p - rank) - 1)
    for _ in range(rank):
        line.add(Kind.FORWARD, 1).add(Kind.FORWARD, 0)
    for _ in range(p - rank):
        line.add(Kind.FORWARD, 1).add(Kind.BACKWARD_INPUT, 1).add(Kind.BACKWARD_WEIGHT, 1)
    while line.left(Kind.FORWARD, 1):
        line.add(Kind.FORWARD, 0).add(Kind.BACKWARD_INPUT, 0).add(Kind.BACKWARD_WEIGHT, 0)
        line.add(Kind.FORWARD, 1).add(Kind.BACKWARD_INPUT, 1).add(Kind.BACKWARD_WEIGHT, 1)
    for _ in range(rank):
        line.add(Kind.BACKWARD_INPUT, 0).add(Kind.BACKWARD_INPUT, 1)
    for _ in range(p - rank):
        line.add(Kind.BACKWARD_INPUT, 0).add(Kind.BACKWARD_WEIGHT, 0)
    line.add(Kind.BACKWARD_INPUT, 1, times=m).add(Kind.BACKWARD_INPUT, 0, times=m)
    line.add(Kind.BACKWARD_WEIGHT, 1, times=m).add(Kind.BACKWARD_WEIGHT, 0, times=m)
    return line.actions


class _Line:
    """A rank's actions under construction: each (kind, chunk) takes its micro-batches in order, and stops after the last."""

    def __init__(self, num_microbatches: int, *, stages: tuple[int, ...]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._limit = num_microbatches
        self._next: Counter[tuple[Kind, int]] = Counter()

    def add(self, kind: Kind, chunk: int, *, times: int = 1) -> _Line:
        """Append up to `times` actions of this kind on this chunk."""
        for _ in range(min(times, self.left(kind, chunk))):
            self.actions.append(Action(kind, self._stages[chunk], self._next[kind, chunk]))
            self._next[kind, chunk] += 1
        return self

    def left(self, kind: Kind, chunk: int) -> int:
        """Micro-batches this kind of action has not taken yet."""
        return self._limit - self._next[kind, chunk]


NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def build(name: str, *, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule of that name. Refuses combinations that do not exist rather than building another one."""
    _check_request(name, num_ranks, num_microbatches, num_chunks)
    if name == "interleaved":
        return interleaved(num_ranks, num_microbatches, num_chunks)
    makers: dict[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v}
    return makers[name](num_ranks, num_microbatches)


def _check_request(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    if name not in NAMES:
        raise IllegalScheduleError(f"no schedule is called {name!r}; there are {', '.join(NAMES)}")
    if num_ranks < 1 or num_microbatches < 1:
        raise IllegalScheduleError(f"at least one rank and one micro-batch are needed: given {num_ranks}, {num_microbatches}")
    wanted = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2}.get(name)
    if wanted is not None and num_chunks not in (1, wanted):
        raise IllegalScheduleError(f"{name} has {wanted} virtual stage(s) a rank: given {num_chunks}; interleaved takes any")
    if name == "interleaved" and num_chunks < 2:
        raise IllegalScheduleError("interleaved needs at least 2 virtual stages a rank; with 1 it is 1f1b")


def _loop(name: str, p: int, m: int, ranks: list[list[Action]], *, num_chunks: int = 1) -> Schedule:
    actions = tuple(tuple(rank) for rank in ranks)
    return Schedule(name=name, num_ranks=p, num_chunks=num_chunks, num_microbatches=m, placement="loop", actions=actions)


def _all(kind: Kind, count: int) -> list[tuple[Kind, int]]:
    return [(kind, m) for m in range(count)]


def _alternate(forwards: list[T], backwards: list[T], warm: int) -> Iterator[tuple[Kind, T]]:
    """`warm` forwards, then one forward and one backward in turn, then the backwards that are left."""
    yield from ((Kind.FORWARD, item) for item in forwards[:warm])
    for forward, backward in zip(forwards[warm:], backwards, strict=False):
        yield Kind.FORWARD, forward
        yield Kind.BACKWARD, backward
    yield from ((Kind.BACKWARD, item) for item in backwards[len(forwards) - warm :])


# --- checks -----------------------------------------------------------------------------------------------------------


def problems(schedule: Schedule) -> list[str]:
    """Everything that makes a schedule illegal: missing, repeated or misplaced actions, and then a deadlock. Empty: legal."""
    found = [*_placement_problems(schedule), *_count_problems(schedule)]
    return found or _deadlock_problems(schedule)


def _placement_problems(schedule: Schedule) -> Iterator[str]:
    if len(schedule.actions) != schedule.num_ranks:
        yield f"{schedule.num_ranks} ranks, but {len(schedule.actions)} lists of actions"
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.stage < schedule.num_stages or schedule.rank_of(action.stage) != rank:
                yield f"rank {rank}: {action} belongs to a stage it does not hold"


def _count_problems(schedule: Schedule) -> Iterator[str]:
    """Each (stage, micro-batch) runs forward once and backward once, whole or in its two halves, and nothing else."""
    count = Counter(action for rank in schedule.actions for action in rank)
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    wanted = {
        Action(kind, stage, microbatch)
        for kind in ((Kind.FORWARD, *halves) if is_split(schedule) else (Kind.FORWARD, Kind.BACKWARD))
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
    yield from (f"missing: {action}" for action in sorted(wanted - count.keys(), key=str))
    yield from (f"not wanted: {action}" for action in sorted(count.keys() - wanted, key=str))
    yield from (f"{n} times: {action}" for action, n in count.items() if n > 1)


def _deadlock_problems(schedule: Schedule) -> list[str]:
    left = walk(schedule, lambda rank, action: None)
    if not left:
        return []
    waits = "; ".join(f"rank {rank} waits at {action}" for rank, action in left)
    return [f"deadlock: {waits}"]


def walk(schedule: Schedule, visit: Callable[[int, Action], None]) -> list[tuple[int, Action]]:
    """Visit every action once what it depends on has been visited, each rank in its order.

    Returns where each rank got stuck; an empty list means that the schedule runs to its end.
    """
    split = is_split(schedule)
    position = [0] * schedule.num_ranks
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions) and _ready(actions[position[rank]], done, schedule.num_stages, split):
                action = actions[position[rank]]
                visit(rank, action)
                done.add(action)
                position[rank] += 1
                moved = True
    return [
        (rank, actions[i]) for (rank, actions), i in zip(enumerate(schedule.actions), position, strict=True) if i < len(actions)
    ]


def _ready(action: Action, done: set[Action], num_stages: int, split: bool) -> bool:
    return all(needed in done for needed in dependencies(action, num_stages=num_stages, split=split))


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most (virtual stage, micro-batch) pairs whose activations it holds at once.

    Held from the forward until the backward, or until the weight gradient where the backward is split.
    """
    return tuple(_peak(actions) for actions in schedule.actions)


def _peak(actions: Iterable[Action]) -> int:
    held = peak = 0
    for action in actions:
        held += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0}.get(action.kind, -1)
        peak = max(peak, held)
    return peak
