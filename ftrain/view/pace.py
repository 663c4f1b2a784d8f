"""How fast a run has been under each of its layouts, and when it will be done at that pace.

Scaling out is done in steps, and each step is judged by real tokens a second, not by the plan: one row a layout, in the order
in which they were used. The end is predicted from the newest layout's median step and corrected by the effective time so far,
because the failures of the past are the best guess for those to come.
"""

from __future__ import annotations

from msgspec import Struct

from ftrain.view.measured import warm
from ftrain.view.numbers import median, show
from ftrain.view.record import Recorded


class PaceRow(Struct, frozen=True, kw_only=True):
    """One layout. `per_rank` is relative to the first layout's: 1.0 is perfect scaling."""

    layout: str
    ranks: int
    steps: int
    tokens_per_update: int
    step_s: float
    tokens_per_s: float
    per_rank: float


class Pace(Struct, frozen=True, kw_only=True):
    """All layouts, and what is left. `eta_s` is None without a config or a step."""

    rows: tuple[PaceRow, ...] = ()
    steps_left: int | None = None
    eta_s: float | None = None
    eta_how: str = "steps left x median step of the newest layout / effective time so far"


def pace(run: Recorded) -> Pace:
    """The pace of a run."""
    rows: list[PaceRow] = []
    attempts = {row.attempt: row for row in run.report.attempts}
    for layout in dict.fromkeys((row.layout, row.ranks) for row in run.report.attempts):
        steps = [done for done in run.steps if (attempts[done.attempt].layout, attempts[done.attempt].ranks) == layout]
        step = median([done.seconds for done in warm(steps)])
        if step is None or step.value <= 0:
            continue
        tokens = median([done.record.tokens for done in steps])
        update = round(tokens.value) if tokens else 0
        rate = update / step.value
        first = rows[0].tokens_per_s / rows[0].ranks if rows else rate / layout[1]
        rows.append(
            PaceRow(layout=layout[0], ranks=layout[1], steps=len(steps), tokens_per_update=update, step_s=step.value,
                    tokens_per_s=rate, per_rank=rate / layout[1] / first if first else 0.0)
        )  # fmt: skip
    left = max(0, run.config.run.steps - run.report.step) if run.config else None
    eta = None
    if left is not None and rows and run.report.effective_time > 0:
        eta = left * rows[-1].step_s / run.report.effective_time
    return Pace(rows=tuple(rows), steps_left=left, eta_s=eta)


def lines(found: Pace) -> list[str]:
    """As text: nothing for a run of one layout that is done."""
    told: list[str] = []
    if len(found.rows) > 1:
        told.append("pace by layout")
        told += [
            f"  {row.layout} ({row.ranks} ranks): {row.steps} steps of {show(row.tokens_per_update, 'tokens')} tokens, "
            f"{show(row.step_s, 's')} each, {show(row.tokens_per_s, 'tokens/s')}, a rank at {100 * row.per_rank:.0f} % of "
            "the first layout's"
            for row in found.rows
        ]
    if found.steps_left and found.eta_s is not None:
        told.append(f"{found.steps_left} steps left: {show(found.eta_s, 's')} ({found.eta_how})")
    return told
