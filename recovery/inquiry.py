"""From evidence to a recorded decision: verdict, then decision, each in the ledger before anybody acts on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from recovery import events
from recovery.attempt import Attempt
from recovery.classify import classify
from recovery.delegate import AttemptEndInfo
from recovery.events import Verdict
from recovery.evidence import Evidence
from recovery.hang import culprit, with_collectives
from recovery.journal import Journal
from recovery.policy import Decision, Limits, decide
from recovery.state import Phase, RunState

log = logging.getLogger(__name__)

Spared = Callable[[Verdict, Decision], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One interruption, understood and decided on."""

    verdict: Verdict
    decision: Decision
    info: AttemptEndInfo


def judge(
    journal: Journal,
    evidence: Evidence,
    limits: Limits,
    *,
    attempt: Attempt | None,
    verdict_id: str,
    agent_survived: bool,
    spared: Spared,
) -> Case:
    """Classify and decide. If an earlier coordinator did so for this attempt and died, its decision stands.

    `spared` answers why a place stays although the decision is to leave it out.
    """
    number = attempt.number if attempt is not None else journal.state.attempt
    verdict = classify(evidence)
    earlier = journal.state.last_decision
    if earlier is not None and attempt is not None and earlier.attempt == number:
        decision = Decision(
            action=earlier.action,
            reason=earlier.reason,
            wait_s=earlier.wait_s,
            differently=earlier.differently,
            skip=earlier.skip,
        )
    else:
        history, now_t = journal.state.history, time.time()
        decision = decide(verdict, history, limits, doubted=journal.state.doubted(number), now_t=now_t)
        if why := spared(verdict, decision):
            decision = replace(decision, reason=f"{decision.reason}; {why}")
        _record(journal, verdict, decision, number, verdict_id)
    info = AttemptEndInfo(
        attempt=number,
        workers=attempt.dead() if attempt is not None else (),
        verdict=verdict,
        action=decision.action,
        agent_survived=agent_survived,
        differently=decision.differently,
        skips=journal.state.skips,
    )
    return Case(verdict=verdict, decision=decision, info=info)


def keep(folder: Path, verdict_id: str, evidence: Evidence) -> None:
    """As a case that `ftrain classify` reads: an incident can be looked at again, and become a test. Costs nobody a restart."""
    try:
        folder.mkdir(exist_ok=True)
        case = msgspec.json.encode(replace(evidence, id=verdict_id))
        (folder / f"{verdict_id}.json").write_bytes(case)
    except OSError as error:
        log.warning("the evidence of %s is not kept: %s", verdict_id, error)


def blame(
    journal: Journal, attempt: int, ranks: Sequence[int], gathered: Evidence, issued: Mapping[int, int] | None = None
) -> str:
    """Nobody makes progress: who of `ranks` (the least advanced first) is to blame, on record and as a line of evidence."""
    found = with_collectives(culprit(ranks, gathered.log, gathered.scheduler), issued or {})
    now, reason = time.time(), f"{found.kind}: {found.reason}"
    journal.append(events.Suspected(t=now, attempt=attempt, reason=reason, since=now, rank=found.rank))
    return found.line()


def steps_done(state: RunState) -> int:
    """Steps finished in the current attempt: whether a program ever worked decides what its failure means."""
    return 0 if state.ready_step is None else max(0, state.step - state.ready_step)


def _record(journal: Journal, verdict: Verdict, decision: Decision, number: int, verdict_id: str) -> None:
    classified = events.InterruptionClassified(t=time.time(), attempt=number, verdict_id=verdict_id, verdict=verdict)
    decided = events.Decided(
        t=time.time(),
        attempt=number,
        action=decision.action,
        reason=decision.reason,
        wait_s=decision.wait_s,
        verdict_id=verdict_id,
        differently=decision.differently,
        skip=decision.skip,
    )
    journal.append(classified, decided)  # together: who dies between them would have it judged twice


def decided_before(state: RunState, *, agent_survived: bool) -> AttemptEndInfo | None:
    """What an earlier coordinator decided and did not live to carry out."""
    decision = state.last_decision
    if decision is None or decision.attempt != state.attempt or state.phase is not Phase.WAITING:
        return None
    return AttemptEndInfo(
        attempt=state.attempt,
        workers=(),
        verdict=None,
        action=decision.action,
        agent_survived=agent_survived,
        differently=decision.differently,
        skips=state.skips,
    )
