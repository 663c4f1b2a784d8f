"""What a run did with its time, what interrupted it, and what that cost: all of it from the ledger, nothing from memory.

Two rules. The books add up or there is no report (`recovery.accounts` raises ReportError). And shares are of counts and
reconcile: the causes table counts every interruption exactly once, planned ones apart, so that the printed shares sum to 100 %
(the best known published table of this kind does not). This module computes rows; `recovery.report_text` is their plain form,
and the command line may draw them prettier.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from recovery.accounts import NS, Accounts, Bucket, ReportError
from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointPassedOver,
    Decided,
    Event,
    InterruptionClassified,
    LayoutChosen,
    PhaseBegan,
    ProcessDied,
    Ready,
    Relabelled,
    RunEnded,
    RunStarted,
    StepRecord,
    StopRequested,
    StorageNotice,
    Suspected,
    TierCommitted,
    steps_of,
)
from recovery.gaps import SegmentsMissing
from recovery.report_rows import (
    FORMULA,
    AttemptRow,
    CauseRow,
    CheckpointRows,
    InterruptionRow,
    LayoutRow,
    MissingRow,
    PhaseRow,
    Report,
    SkipRow,
)
from recovery.state import RunState, apply

__all__ = [
    "AttemptRow",
    "CauseRow",
    "CheckpointRows",
    "InterruptionRow",
    "Report",
    "ReportBuilder",
    "ReportError",
    "mtbf_interval",
    "of_script",
    "report",
]

STOPPED = "user_interrupt"


def report(events: Iterable[Event], until_s: float | None = None) -> Report:
    """The report of a whole ledger, up to `until_s` (by default: its last event)."""
    builder = ReportBuilder()
    for event in events:
        builder.add(event)
    return builder.build(until_s)


def of_script(event: Event) -> bool:
    """Whether this is the start of a supervised command, of whose state nothing is known but what it tells."""
    return isinstance(event, RunStarted) and "command" in (event.config or {})


def mtbf_interval(count: int, running_s: float) -> tuple[float, float | None]:
    """95 % interval of the mean time between failures after `count` of them in `running_s`; the upper end may be unknown.

    `running_s` is wall time less the time in which nobody had started the run, for what does not run is not interrupted, and
    less the time of which nothing is recorded.
    Exact Poisson interval (Garwood 1936): the rates for which seeing at most, and at least, `count` has probability 2.5 %.
    """
    most = _poisson_rate(count, 0.025)
    least = _poisson_rate(count - 1, 0.975) if count > 0 else 0.0
    return running_s / most, (running_s / least if least > 0 else None)


def _poisson_rate(count: int, probability: float) -> float:
    """The rate at which P(X <= count) equals `probability`, by bisection (P falls as the rate grows)."""
    low, high = 0.0, 10.0 + 2.0 * (count + 1) + 10.0 * math.sqrt(count + 1)
    for _ in range(200):
        middle = (low + high) / 2
        terms = (math.exp(k * math.log(middle) - middle - math.lgamma(k + 1)) for k in range(count + 1))
        low, high = (middle, high) if math.fsum(terms) > probability else (low, middle)
    return (low + high) / 2


class ReportBuilder:
    """One pass over the ledger: `add` each event, `build` as often as wanted."""

    def __init__(self) -> None:
        self._state = RunState()
        self._accounts = Accounts()
        self._attempts: dict[int, AttemptRow] = {}
        self._layouts: list[LayoutRow] = []
        self._phases: list[PhaseRow] = []
        self._skips: list[SkipRow] = []
        self._missing: list[MissingRow] = []
        self._interruptions: dict[str, InterruptionRow] = {}
        self._open: list[InterruptionRow] = []  # interruptions after which the ranks are not ready yet
        self._sign_t: float | None = None  # first sign of the interruption that is not classified yet
        self._only_suspected = False
        self._asked = False  # to stop, in this attempt
        self._script = False
        self._checkpoints = CheckpointRows()
        self._hours: dict[int, list[float]] = {}  # hour -> [tokens, seconds]

    def add(self, event: Event) -> None:
        """One more event, in the ledger's order."""
        before, lost_before = self._state.step, self._accounts.steps_lost if isinstance(event, Ready) else 0
        fresh = [record for record in steps_of(event) if not self._accounts.knows(event.attempt, record.step)]
        self._accounts.add(event)
        self._state = apply(self._state, event)
        match event:
            case AttemptStarted():
                self._asked = False
                self._attempts[event.attempt] = AttemptRow(
                    attempt=event.attempt,
                    t=event.t,
                    layout=event.layout,
                    ranks=event.ranks,
                    source=event.source,
                    restored_step=None if self._script else event.restored_step,
                    phase=self._state.training_phase,
                )
            case RunStarted() | StopRequested() | AttemptEnded() | RunEnded():
                self._ends(event)
            case Ready():
                fresh_lost = self._accounts.steps_lost - lost_before
                self._ready(event, fresh_lost if event.assumed else max(0, before - event.step))
            case LayoutChosen():
                self._layouts.append(LayoutRow(**{name: getattr(event, name) for name in LayoutRow.__struct_fields__}))
            case PhaseBegan():
                self._phases.append(PhaseRow(**{name: getattr(event, name) for name in PhaseRow.__struct_fields__}))
            case SegmentsMissing():
                self._sign_t = None  # what came of it is not recorded
                self._missing.append(_missing(event))
            case ProcessDied() | Suspected():
                self._sign(event)
            case InterruptionClassified() | Decided() | Relabelled():
                self._trouble(event)
                if isinstance(event, Decided) and event.skip is not None:
                    first, last = event.skip
                    self._skips.append(SkipRow(t=event.t, attempt=event.attempt, first=first, last=last))
            case CheckpointCommitted() | CheckpointFailed() | CheckpointPassedOver() | TierCommitted() | StorageNotice():
                self._checkpoint(event)
        self._steps(event.attempt, fresh)

    def build(self, until_s: float | None) -> Report:
        """The report up to `until_s` (None: the last event). ReportError if the books do not add up."""
        books = self._accounts.close(until_s)
        rows = list(self._interruptions.values())
        unplanned = sum(not row.planned for row in rows)
        wall_s = books.wall_ns / NS
        running_s = wall_s - books.seconds(Bucket.ABSENT) - books.seconds(Bucket.UNRECORDED)
        low_s, high_s = mtbf_interval(unplanned, running_s)
        return Report(
            run_id=self._state.run_id,
            outcome=self._state.outcome,
            outcome_reason=self._state.outcome_reason,
            phase=str(self._state.phase),
            started_t=self._state.started_t,
            wall_s=wall_s,
            step=self._state.step,
            steps_finished=self._accounts.steps_finished,
            steps_lost=self._accounts.steps_lost,
            at_least=self._accounts.at_least,
            tokens=self._state.tokens,
            tokens_again=self._accounts.tokens_lost,
            loss=self._state.loss,
            eval_loss=self._state.eval_loss,
            effective_time=books.effective,
            formula=FORMULA,
            buckets={str(bucket): books.seconds(bucket) for bucket in Bucket},
            attempts=list(self._attempts.values()),
            interruptions=rows,
            causes=_causes(rows),
            mtbf_s=running_s / unplanned if unplanned else None,
            mtbf_low_s=low_s,
            mtbf_high_s=high_s,
            checkpoints=self._checkpoints,
            tokens_per_s_by_hour={hour: tokens / s for hour, (tokens, s) in sorted(self._hours.items()) if s > 0},
            layouts=list(self._layouts),
            phases=list(self._phases),
            skips=list(self._skips),
            missing=list(self._missing),
        )

    def _ready(self, event: Ready, lost: int) -> None:
        if row := self._attempts.get(event.attempt):
            row.restored_step, row.proof = None if event.assumed else event.step, event.proof
            row.start_s = event.t - row.t
        if earlier := self._attempts.get(event.attempt - 1):
            earlier.steps_lost = lost
        for at, interruption in enumerate(self._open):
            interruption.absent_s = self._accounts.absent_s(interruption.t, event.t)
            interruption.down_s = event.t - interruption.t - interruption.absent_s
            interruption.steps_lost = lost if at == 0 else 0  # those that followed struck before anything was done again
        self._open.clear()

    def _ends(self, event: RunStarted | StopRequested | AttemptEnded | RunEnded) -> None:
        """An attempt that ends after somebody has asked for it ends by that. A scheduler's wish has its own verdict."""
        row = self._attempts.get(event.attempt)
        match event:
            case RunStarted():
                self._script = of_script(event)
                self._asked = self._asked and event.readopted
            case StopRequested():
                self._asked = True
            case AttemptEnded() if self._asked and row and not row.ended_by:
                row.ended_by = STOPPED
            case RunEnded(outcome="finished"):  # it had come to its end when it was asked
                newest = self._attempts.get(self._state.attempt)
                if newest and newest.ended_by == STOPPED:
                    newest.ended_by = ""

    def _sign(self, event: ProcessDied | Suspected) -> None:
        expected = isinstance(event, ProcessDied) and (event.ours or event.status == 0 or event.kind not in ("worker", "agent"))
        if self._sign_t is None and not expected:
            self._sign_t = event.t
            self._only_suspected = isinstance(event, Suspected)

    def _trouble(self, event: InterruptionClassified | Decided | Relabelled) -> None:
        if isinstance(event, InterruptionClassified):
            self._classified(event)
        elif row := self._interruptions.get(event.verdict_id):
            if isinstance(event, Decided):
                row.action, row.decision, row.wait_s = event.action, event.reason, event.wait_s
            else:
                row.relabelled_from = row.relabelled_from or row.class_
                row.class_, row.planned = event.class_, event.planned
                row.component = event.component or row.component

    def _classified(self, event: InterruptionClassified) -> None:
        verdict = event.verdict
        row = InterruptionRow(
            verdict_id=event.verdict_id,
            t=event.t if self._sign_t is None else self._sign_t,
            attempt=event.attempt,
            class_=verdict.class_,
            component=verdict.component,
            planned=verdict.planned,
            first_failing_rank=verdict.first_failing_rank,
            node=verdict.node,
            confidence=verdict.confidence,
            reason=verdict.reason,
            evidence=verdict.evidence,
        )
        self._sign_t = None
        self._interruptions[event.verdict_id] = row
        self._open.append(row)
        if attempt := self._attempts.get(event.attempt):
            attempt.ended_by = verdict.class_

    def _checkpoint(
        self, event: CheckpointCommitted | CheckpointFailed | CheckpointPassedOver | TierCommitted | StorageNotice
    ) -> None:
        rows = self._checkpoints
        match event:
            case CheckpointCommitted():
                rows.committed += 1
                rows.newest_step = event.step
                rows.nbytes += event.nbytes
                rows.seconds += event.seconds
                rows.retries += event.retries
            case TierCommitted():
                rows.tiers[event.tier] = rows.tiers.get(event.tier, 0) + 1
            case StorageNotice():
                rows.notices.append({"t": event.t, "step": event.step, "topic": event.topic, "text": event.text})
            case CheckpointFailed():
                rows.failed.append({"t": event.t, "step": event.step, "reason": event.reason})
            case CheckpointPassedOver():
                rows.passed_over.append({"t": event.t, "step": event.step, "reason": event.reason})

    def _steps(self, attempt: int, fresh: Sequence[StepRecord]) -> None:
        for record in fresh:
            if self._only_suspected and self._sign_t is not None and record.t_end > self._sign_t:
                self._sign_t = None  # a suspicion that did not come true
            hour = self._hours.setdefault(int(record.t_begin // 3600 % 24), [0.0, 0.0])
            hour[0] += record.tokens
            hour[1] += max(0.0, record.t_end - record.t_begin)
            if row := self._attempts.get(attempt):
                steps = self._accounts.told_as(attempt, record.step)
                row.steps += len(steps)
                row.first_step = steps[0] if row.first_step is None else row.first_step
                row.last_step = record.step


def _missing(event: SegmentsMissing) -> MissingRow:
    until = None if event.attempt < 0 else event.t
    return MissingRow(segments=event.segments, since=event.since, until=until, text=event.sentence())


def _causes(rows: Sequence[InterruptionRow]) -> list[CauseRow]:
    """Counts by component and class, commonest first, planned ones after; shares within planned and unplanned."""
    counts = Counter((row.planned, row.component, row.class_) for row in rows)
    totals = Counter(row.planned for row in rows)
    order = sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0]))
    return [
        CauseRow(component=component, class_=class_, planned=planned, count=count, share=count / totals[planned])
        for (planned, component, class_), count in order
    ]
