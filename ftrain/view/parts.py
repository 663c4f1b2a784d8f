"""A run cut by the layouts it had: what is predicted of one layout is only ever laid beside what that layout did.

After a resize, or on what is left of lost GPUs, steps are longer, stages are others and ranks hold more. A table over all of it
would compare a plan with a mixture.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from ftrain.units import plural
from ftrain.view.record import Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The attempts of one layout, together; `run` is the run as if there were no others. Ascending by first use."""

    layout: str
    ranks: int
    micro_batch: int
    """0 where the ledger does not hold the config of this layout."""
    attempts: tuple[int, ...]
    run: Recorded

    @property
    def heading(self) -> str:
        """Which part of the run it is."""
        which = "attempt" if len(self.attempts) == 1 else "attempts"
        micro = f", micro-batches of {self.micro_batch}" if self.micro_batch else ""
        steps = f"steps {self.run.steps[0].record.step} to {self.run.steps[-1].record.step}" if self.run.steps else "no step"
        return f"{self.layout} on {plural(self.ranks, 'rank')}{micro} ({which} {', '.join(map(str, self.attempts))}: {steps})"


def parts(run: Recorded) -> list[Part]:
    """Each layout with its own steps, metrics and config. Layouts that finished nothing are left out, unless all did."""
    groups: dict[tuple[str, int, int], list[int]] = {}
    for row in run.report.attempts:
        config = run.configs.get(row.attempt)
        key = (row.layout, row.ranks, config.batch.micro_batch if config else 0)
        groups.setdefault(key, []).append(row.attempt)
    found = [_part(run, key, attempts) for key, attempts in groups.items()]
    return [part for part in found if part.run.steps] or found[-1:]


def _part(run: Recorded, key: tuple[str, int, int], attempts: list[int]) -> Part:
    """Of these attempts alone. A line of metrics may be written when the next layout is chosen already: its attempt counts."""
    rows = [row for row in run.report.attempts if row.attempt in attempts]
    steps = tuple(done for done in run.steps if done.attempt in attempts)
    only = replace(
        run,
        config=run.configs.get(steps[-1].attempt if steps else attempts[-1]),  # a later start may have failed with another
        report=structs.replace(run.report, attempts=rows),
        steps=steps,
        metrics=tuple({**line, "layout": key[0]} for line in run.metrics if line.get("attempt") in attempts),
    )
    return Part(layout=key[0], ranks=key[1], micro_batch=key[2], attempts=tuple(attempts), run=only)
