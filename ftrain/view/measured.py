"""What a run measured, boiled down to one number a question: the step, the tokens, the waiting, the memory.

Of steps the median counts, and the first step of each attempt not at all: it builds programs, faults pages in and, on a GPU,
compiles kernels. Of ranks the worst counts: it is the one that all others wait for, or that runs out of memory first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftrain.view.numbers import Median, median
from ftrain.view.record import Done, Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a run; None where nothing was recorded."""

    step: Median | None
    tokens_per_update: int | None
    ranks: int
    wait: float | None = None
    """Share of a step that the worst rank waits for other pipeline stages."""
    exposed: float | None = None
    """Share of a step that the worst rank communicates without computing meanwhile."""
    peak_memory: int | None = None
    """Bytes of the fullest rank."""
    traffic: float | None = None
    """Bytes that the busiest rank sent in an update."""

    @property
    def tokens_per_s(self) -> float | None:
        """Over all ranks."""
        if self.step is None or not self.tokens_per_update or not self.step.value:
            return None
        return self.tokens_per_update / self.step.value


def measured(run: Recorded) -> Measured:
    """The measurements of a run's newest layout: earlier layouts had other steps."""
    attempts = run.report.attempts
    layout = attempts[-1].layout if attempts else ""
    of_layout = {row.attempt for row in attempts if row.layout == layout}
    steps = [done for done in run.steps if done.attempt in of_layout]
    tokens = median([done.record.tokens for done in steps])
    return Measured(
        step=median([done.seconds for done in warm(steps)]),
        tokens_per_update=round(tokens.value) if tokens else None,
        ranks=attempts[-1].ranks if attempts else 1,
    )


def warm(steps: list[Done]) -> Iterator[Done]:
    """The steps without the first of each attempt."""
    seen: set[int] = set()
    for done in steps:
        if done.attempt in seen:
            yield done
        seen.add(done.attempt)
