"""How fast a run has been at each of its sizes, and when it will be done at that pace.

Scaling out is done in steps, and each step is judged by real tokens a second, not by the plan: one row a size (a layout in a
phase), in the order in which they were used, and with the proof that the run went on from the very state that was saved. The
end is predicted from the newest size's median step and corrected by the effective time so far, because the failures of the
past are the best guess for those to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from ftrain.course import Begun, Cursor, updates_left
from ftrain.data.reading import Consumed, consumed
from ftrain.phases import effective
from ftrain.units import plural
from ftrain.view.measured import warm
from ftrain.view.numbers import median, show
from ftrain.view.record import Recorded
from recovery.durations import format_duration
from recovery.report import AttemptRow

SEAMS = 3  # of one size, in a report for people


class Seam(Struct, frozen=True, kw_only=True):
    """Where an attempt went on with a saved state, and what showed that it is the one that was saved."""

    attempt: int
    step: int
    proof: str


class PaceRow(Struct, frozen=True, kw_only=True):
    """One size. `per_rank` is relative to the first one's: 1.0 is perfect scaling. `from_step`, `proof`: the state it began
    with, and what showed that this is the one that was saved (empty: there was nothing to load). `again`: its later seams.
    """

    layout: str
    ranks: int
    phase: int = 0
    steps: int
    tokens_per_update: int
    step_s: float
    tokens_per_s: float
    per_rank: float
    from_step: int = 0
    proof: str = ""
    again: tuple[Seam, ...] = ()


class Pace(Struct, frozen=True, kw_only=True):
    """All sizes, what is left, and what was read. `eta_s` is None without a config or a step."""

    rows: tuple[PaceRow, ...] = ()
    steps_left: int | None = None
    eta_s: float | None = None
    eta_how: str = "tokens left / those of an update x median step of the newest size / effective time so far"
    read: tuple[Consumed, ...] = ()


def pace(run: Recorded) -> Pace:
    """The pace of a run."""
    rows = list[PaceRow]()
    for row in _sizes(run):
        if row.step_s > 0:
            rows.append(_beside(row, rows[0] if rows else row))
    if run.config is None:
        return Pace(rows=tuple(rows))
    left, eta = max(0, run.config.run.steps - run.report.step), None
    if rows and run.steps[-1].record.sequences and run.report.effective_time > 0:
        newest = run.steps[-1].record.sequences * effective(run.config, rows[-1].phase).data.seq_len
        eta = updates_left(run.config, run.cursor, newest) * rows[-1].step_s / run.report.effective_time
    return Pace(rows=tuple(rows), steps_left=left, eta_s=eta, read=consumed(run.config, _read(run)))


def _read(run: Recorded) -> Cursor:
    """How far the updates of the final history have read. Not what the config says: it may have been another one before; and
    not what another run has read, with whose state this one began.
    """
    phases = {row.attempt: row.phase for row in run.report.attempts}
    read, firsts = Counter[int](), dict[int, int]()
    for done in run.steps:
        phase = phases[done.attempt]
        read[phase] += done.record.sequences
        firsts.setdefault(phase, done.record.step - 1)
    begun = (Begun(firsts.get(phase, 0), read[phase]) for phase in range(max(firsts, default=0) + 1))
    return Cursor(run.report.step, tuple(begun))


def _sizes(run: Recorded) -> Iterator[PaceRow]:
    """Each size as it was measured, in the order of their first use."""
    attempts = {row.attempt: row for row in run.report.attempts}
    for size in dict.fromkeys(_size(row) for row in run.report.attempts):
        steps = [done for done in run.steps if _size(attempts[done.attempt]) == size]
        step, tokens = median([done.seconds for done in warm(steps)]), median([done.record.tokens for done in steps])
        first, *later = (row for row in run.report.attempts if _size(row) == size)
        update = round(tokens.value) if tokens else 0
        phase, layout, ranks = size
        yield PaceRow(
            layout=layout,
            ranks=ranks,
            phase=phase,
            steps=len(steps),
            tokens_per_update=update,
            step_s=step.value if step else 0.0,
            tokens_per_s=update / step.value if step and step.value > 0 else 0.0,
            per_rank=1.0,
            from_step=first.restored_step or 0,
            proof=first.proof,
            again=tuple(Seam(attempt=row.attempt, step=row.restored_step or 0, proof=row.proof) for row in later if row.proof),
        )


def _size(row: AttemptRow) -> tuple[int, str, int]:
    return row.phase, row.layout, row.ranks


def _beside(row: PaceRow, first: PaceRow) -> PaceRow:
    """With its worth against the first size."""
    rate = first.tokens_per_s / first.ranks
    return replace(row, per_rank=row.tokens_per_s / row.ranks / rate if rate else 0.0)


def lines(found: Pace) -> list[str]:
    """As text: nothing for a run of one size that is done."""
    told: list[str] = []
    if len(found.rows) > 1:
        told.append("pace by size")
        told += [line for row in found.rows for line in (f"  {_line(row)}", *_again(row))]
    if len({it.seq_len for it in found.read}) > 1 or len(found.rows) > 1:
        told.append("data read")
        told += [
            f"  {it.path}: {plural(it.sequences, 'sequence')} of {it.seq_len} tokens = {show(it.tokens, 'tokens')} tokens"
            for it in found.read
        ]
    if found.steps_left and found.eta_s is not None:
        told.append(left_text(found))
    return told


def left_text(found: Pace) -> str:
    """How much longer, and by what it is reckoned."""
    return f"{plural(found.steps_left or 0, 'step')} left: {format_duration(found.eta_s or 0.0)} ({found.eta_how})"


def _again(row: PaceRow) -> Iterator[str]:
    """The newest of its later seams, and how many there are before them."""
    older = len(row.again) - SEAMS
    if older > 0:
        yield f"    {plural(older, 'more seam')} of this size: --json has their proofs"
    yield from (
        f"    attempt {seam.attempt}, of this size again, went on from step {seam.step}: {seam.proof}"
        for seam in row.again[-SEAMS:]
    )


def _line(row: PaceRow) -> str:
    phase = f"phase {row.phase}, " if row.phase else ""
    seam = f"went on from step {row.from_step}: {row.proof}" if row.proof else "from the beginning"
    return (
        f"{phase}{row.layout} ({plural(row.ranks, 'rank')}): {plural(row.steps, 'step')} of "
        f"{show(row.tokens_per_update, 'tokens')} tokens, {show(row.step_s, 's')} each, {show(row.tokens_per_s, 'tokens/s')}, "
        f"a rank at {100 * row.per_rank:.0f} % of the first size's; {seam}"
    )
