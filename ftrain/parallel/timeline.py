"""When each action of a schedule runs: the schedule object, put on a clock.

The planner reads bubbles from here instead of from formulas, so uneven stages, slow links and any new schedule are covered
by the same fifty lines; the closed formulas are what the tests compare with. Times may be integers, fractions or floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ftrain.parallel.schedule import Action, IllegalScheduleError, Kind, Schedule, dependencies, is_split, problems, walk

Time = int | float | Fraction
Duration = Callable[[Action], Time]


@dataclass(frozen=True, slots=True)
class Span:
    """One action on the clock: begin inclusive, end exclusive."""

    rank: int
    action: Action
    begin: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step. All ranks begin at 0; the step ends when the last of them does."""

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def length(self) -> Time:
        """From the first begin to the last end."""
        return max(span.end for span in self.spans)

    def busy(self, rank: int) -> Time:
        """Time in which a rank computes."""
        return sum((span.end - span.begin for span in self.spans if span.rank == rank), start=0)

    def total_busy(self) -> Time:
        """Computing time summed over the ranks."""
        return sum((span.end - span.begin for span in self.spans), start=0)

    def bubble_of_total(self) -> Time:
        """Idle share of the ranks' time: idle / (idle + compute)."""
        return 1 - _ratio(self.total_busy(), self.length * self.schedule.num_ranks)

    def bubble_of_compute(self) -> Time:
        """Idle time relative to compute: the other definition in use, and the larger number."""
        return _ratio(self.length * self.schedule.num_ranks - self.total_busy(), self.total_busy())


def _ratio(top: Time, bottom: Time) -> Time:
    return top / bottom if isinstance(top, float) or isinstance(bottom, float) else Fraction(top) / Fraction(bottom)


def even(*, forward: Time = 1, backward_input: Time = 1, backward_weight: Time = 1, num_chunks: int = 1) -> Duration:
    """Durations for equal stages: the given times are those of a whole rank, shared by its chunks."""
    whole = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward_input + backward_weight,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
    }
    parts = {kind: time // num_chunks if time % num_chunks == 0 else _ratio(time, num_chunks) for kind, time in whole.items()}
    return lambda action: parts[action.kind]


def averages(line: Timeline) -> Duration:
    """Durations as a timeline has them: the mean of each kind of action on each stage. To predict from what was measured."""
    times: dict[tuple[Kind, int], list[Time]] = {}
    for span in line.spans:
        times.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.begin)
    means = {key: _ratio(sum(values, start=0), len(values)) for key, values in times.items()}
    return lambda action: means[action.kind, action.stage]


def simulate(schedule: Schedule, duration: Duration, *, hop: Time = 0) -> Timeline:
    """Run the schedule on paper; `hop`: time from an action's end to the start of what waits for it on another rank."""
    split = is_split(schedule)
    free: list[Time] = [0] * schedule.num_ranks
    ended: dict[Action, Span] = {}

    def place(rank: int, action: Action) -> None:
        needs = (ended[need] for need in dependencies(action, num_stages=schedule.num_stages, split=split))
        begin = max([free[rank], *(need.end + (hop if need.rank != rank else 0) for need in needs)])
        free[rank] = begin + duration(action)
        ended[action] = Span(rank, action, begin, free[rank])

    if walk(schedule, place):
        raise IllegalScheduleError("; ".join(problems(schedule)))
    return Timeline(schedule, tuple(sorted(ended.values(), key=lambda span: (span.rank, span.begin))))
