"""What is known of a run, as a fold over its events.

The coordinator keeps no state that a successor could not rebuild: it applies each event it appends to a RunState, and the
next coordinator gets the very same RunState by reading the ledger. That is only true if the fold is a pure function of the
events, in order, whatever the cut between "read" and "seen live"; the tests hold it to that. The state is small and does not
grow with the number of steps; the books of the time do, and live in `recovery.accounts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from recovery.accounts import Bucket, Buckets, ReportError, buckets
from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Decided,
    EpochTaken,
    Evaluated,
    Event,
    InterruptionClassified,
    PhaseBegan,
    PlaceLost,
    PlaceReturned,
    ProcessDied,
    Ready,
    Relabelled,
    RunEnded,
    RunStarted,
    SnapshotCompleted,
    StopRequested,
    Suspected,
    TierCommitted,
    steps_of,
)
from recovery.gaps import SegmentsMissing
from recovery.places import Out, Place
from recovery.policy import Doubted, History, PastInterruption

__all__ = ["Bucket", "Buckets", "Phase", "ReportError", "RunState", "apply", "buckets", "fold"]


class Phase(StrEnum):
    """Where a run is in its life."""

    NEW = "new"  # nothing has happened
    STARTING = "starting"  # a supervisor is there, the ranks are not ready
    RUNNING = "running"  # all ranks step
    INTERRUPTED = "interrupted"  # something died or hangs; not decided yet
    WAITING = "waiting"  # decided, the next attempt is not started yet
    STOPPING = "stopping"  # a stop was asked for or decided
    ENDED = "ended"  # no supervisor


class Onset(Struct, frozen=True, kw_only=True):
    """Since when the results of an attempt are in doubt."""

    attempt: int
    step: int  # the first one
    reason: str
    until: int | None = None  # the last one
    skips: int = 0  # ranges of data that had been passed over by then
    void: bool = False  # decided: the run goes back to before it
    open: bool = True  # until it has: a later attempt begins before it


class RunState(Struct, frozen=True, kw_only=True):
    """The run after the events seen so far."""

    run_id: str = ""
    config_fingerprint: str = ""
    phase: Phase = Phase.NEW
    epoch: int = 0
    started_t: float = 0.0  # first launch
    last_t: float = 0.0
    events: int = 0
    attempts: int = 0
    attempt: int = -1
    layout: str = ""
    ranks: int = 0
    source: str = ""
    pids: dict[int, int] = {}
    nodes: tuple[str, ...] = ()  # of the newest attempt, in the order of their ranks
    step: int = 0  # of the history as it stands
    ready_step: int | None = None  # of the state all ranks of this attempt began with; None: they are not ready
    best_step: int = 0  # highest ever finished
    loss: float | None = None
    eval_loss: float | None = None
    tokens: int = 0  # of all finished steps, lost ones included
    snapshot_step: int = 0
    committed_step: int | None = None
    committed_t: float | None = None
    copied: tuple[int, int] | None = None  # (attempt, step) whose copies are whole in the memory of other nodes
    interruptions: tuple[PastInterruption, ...] = ()
    verdict_ids: tuple[str, ...] = ()
    last_decision: Decided | None = None
    onsets: tuple[Onset, ...] = ()  # the earliest of each attempt
    skips: tuple[tuple[int, int], ...] = ()  # first and last update of each range of data that is passed over
    training_phase: int = 0  # of a training in phases
    out: tuple[Out, ...] = ()  # places that are taken away
    blames: tuple[str, ...] = ()  # places, once for each time that a verdict took them away
    stop_by: str = ""
    outcome: str = ""
    outcome_reason: str = ""

    @property
    def history(self) -> History:
        """What the policy needs to know of the past."""
        return History(interruptions=self.interruptions, best_step=self.best_step)

    def doubted(self, attempt: int) -> Doubted | None:
        """Whether the results of an attempt are in doubt, and whether they were before, from the same step on the same data."""
        mine = next((onset for onset in self.onsets if onset.attempt == attempt), None)
        if mine is None:
            return None
        others = (onset for onset in self.onsets if onset.attempt != attempt)
        again = any((onset.step, onset.skips) == (mine.step, mine.skips) for onset in others)
        passed = sum(last - first + 1 for first, last in self.skips)
        return Doubted(first=mine.step, last=max(mine.step, mine.until or 0), again=again, passed_over=passed)


def fold(events: Iterable[Event], state: RunState | None = None) -> RunState:
    """The state after `events`, starting from `state` or from nothing."""
    state = state if state is not None else RunState()
    for event in events:
        state = apply(state, event)
    return state


def apply(state: RunState, event: Event) -> RunState:
    """The state after one more event. Pure."""
    state = replace(state, last_t=max(state.last_t, event.t), events=state.events + 1)
    match event:
        case RunStarted() | EpochTaken() | StopRequested() | RunEnded():
            return _apply_run(state, event)
        case AttemptStarted() | Ready() | AttemptEnded():
            return _apply_attempt(state, event)
        case SnapshotCompleted() | CheckpointCommitted() | Evaluated() | TierCommitted():
            return _apply_saved(state, event)
        case PlaceLost() | PlaceReturned():
            return _apply_place(state, event)
        case PhaseBegan():
            return replace(state, training_phase=event.phase)
        case ProcessDied() | Suspected() | InterruptionClassified() | Decided() | Relabelled():
            return _apply_trouble(state, event)
        case SegmentsMissing():
            return replace(state, attempt=max(state.attempt, event.attempt))  # whose number is not given to another one
    return _apply_steps(state, event)


def _apply_run(state: RunState, event: RunStarted | EpochTaken | StopRequested | RunEnded) -> RunState:
    match event:
        case RunStarted():
            return replace(
                state,
                run_id=event.run_id,
                config_fingerprint=event.config_fingerprint,
                epoch=event.epoch,
                started_t=state.started_t if state.phase is not Phase.NEW else event.t,
                phase=state.phase if event.readopted else Phase.STARTING,
                stop_by="",
                outcome="",
                outcome_reason="",
            )
        case EpochTaken():
            return replace(state, epoch=event.epoch, committed_step=_still_committed(state.committed_step, event.starts_from))
        case StopRequested():
            return replace(state, phase=Phase.STOPPING, stop_by=event.by)
        case RunEnded():
            step = state.step if event.step is None else event.step
            return replace(state, phase=Phase.ENDED, step=step, outcome=event.outcome, outcome_reason=event.reason)


def _still_committed(newest: int | None, starts_from: int | None) -> int | None:
    """The newest commit that counts in an epoch. (Not every run says from where its epochs start.)"""
    return newest if newest is None or starts_from is None else min(newest, starts_from)


def _apply_attempt(state: RunState, event: AttemptStarted | Ready | AttemptEnded) -> RunState:
    match event:
        case AttemptStarted():
            return replace(
                state,
                phase=Phase.STARTING,
                attempts=state.attempts + 1,
                attempt=event.attempt,
                layout=event.layout,
                ranks=event.ranks,
                source=event.source,
                pids=event.pids,
                nodes=event.nodes,
                ready_step=None,
                onsets=tuple(_unless_before(onset, event) for onset in state.onsets),
            )
        case Ready():
            return replace(state, phase=_unless_stopping(state, Phase.RUNNING), step=event.step, ready_step=event.step)
        case AttemptEnded():
            return replace(state, pids={})


def _apply_place(state: RunState, event: PlaceLost | PlaceReturned) -> RunState:
    place = Place(node=event.node, slot=event.slot)
    others = tuple(entry for entry in state.out if not place.covers(entry.place))
    if isinstance(event, PlaceReturned):
        return replace(state, out=others)
    blames = (*state.blames, str(place)) if event.until is not None else state.blames
    return replace(state, out=(*others, Out(place=place, reason=event.reason, until=event.until)), blames=blames)


def _apply_saved(state: RunState, event: SnapshotCompleted | CheckpointCommitted | Evaluated | TierCommitted) -> RunState:
    match event:
        case SnapshotCompleted():
            return replace(state, snapshot_step=event.step)
        case CheckpointCommitted():
            return replace(state, committed_step=event.step, committed_t=event.t)
        case Evaluated():
            return replace(state, eval_loss=event.loss)
        case TierCommitted():
            return replace(state, copied=(event.attempt, event.step)) if event.tier == "peer" else state


def _apply_trouble(state: RunState, event: ProcessDied | Suspected | InterruptionClassified | Decided | Relabelled) -> RunState:
    match event:
        case ProcessDied():
            fatal = event.kind in ("worker", "agent") and not event.ours and event.status != 0
            return replace(state, phase=_unless_stopping(state, Phase.INTERRUPTED)) if fatal else state
        case Suspected():
            return replace(_doubted(state, event), phase=_unless_stopping(state, Phase.INTERRUPTED))
        case InterruptionClassified():
            past = _remembered(event, state.best_step)
            ids = (*state.verdict_ids, event.verdict_id)
            return replace(state, interruptions=(*state.interruptions, past), verdict_ids=ids)
        case Decided():
            phase = Phase.STOPPING if event.action in ("finish", "stop_for_human") else Phase.WAITING
            return replace(_with_action(state, event), phase=_unless_stopping(state, phase), last_decision=event)
        case Relabelled():
            return _relabelled(state, event)


def _apply_steps(state: RunState, event: Event) -> RunState:
    for record in steps_of(event):
        if event.attempt < state.attempt and record.step > state.step:
            continue  # told late: the history has already gone on without it
        if event.attempt == state.attempt and record.step <= state.step:
            continue  # told twice, by an agent that did not know whether the last coordinator had heard
        state = replace(
            state,
            step=max(state.step, record.step),
            best_step=max(state.best_step, record.step),
            loss=record.loss,
            tokens=state.tokens + record.tokens,
            phase=Phase.RUNNING if state.phase is Phase.INTERRUPTED else state.phase,
        )
    return state


def _unless_stopping(state: RunState, phase: Phase) -> Phase:
    return state.phase if state.phase in (Phase.STOPPING, Phase.ENDED) else phase


def _remembered(event: InterruptionClassified, best_step: int) -> PastInterruption:
    verdict = event.verdict
    return PastInterruption(
        class_=verdict.class_,
        action=verdict.action,
        best_step=best_step,
        signature=verdict.signature,
        planned=verdict.planned,
        rank=verdict.first_failing_rank,
        node=verdict.node,
        attempt=event.attempt,
        t=event.t,
    )


def _doubted(state: RunState, event: Suspected) -> RunState:
    if event.onset is None:
        return state
    if any(onset.attempt == event.attempt and (onset.void or onset.step <= event.onset) for onset in state.onsets):
        return state  # told twice and already acted upon, or in doubt since earlier
    others = tuple(onset for onset in state.onsets if onset.attempt != event.attempt)
    onset = Onset(attempt=event.attempt, step=event.onset, reason=event.reason, until=event.until, skips=len(state.skips))
    return replace(state, onsets=(*others, onset))


def _unless_before(onset: Onset, started: AttemptStarted) -> Onset:
    """No longer open once the run has gone back to before it: that is done when the next attempt is started."""
    back = onset.attempt < started.attempt and started.restored_step < onset.step
    return replace(onset, open=onset.open and not back)


def _with_action(state: RunState, event: Decided) -> RunState:
    """What was done about an interruption counts against the budget, not what the verdict would have liked."""
    if event.skip is not None:
        state = replace(state, skips=(*state.skips, event.skip))
    if event.action == "roll_back":
        onsets = (replace(onset, void=onset.void or onset.attempt == event.attempt) for onset in state.onsets)
        state = replace(state, onsets=tuple(onsets))
    if event.verdict_id not in state.verdict_ids:
        return state
    at = state.verdict_ids.index(event.verdict_id)
    past = list(state.interruptions)
    past[at] = replace(past[at], action=event.action, skipped=event.skip is not None)
    return replace(state, interruptions=tuple(past))


def _relabelled(state: RunState, event: Relabelled) -> RunState:
    if event.verdict_id not in state.verdict_ids:
        return state
    at = state.verdict_ids.index(event.verdict_id)
    past = list(state.interruptions)
    past[at] = replace(past[at], class_=event.class_, planned=event.planned)
    return replace(state, interruptions=tuple(past))
