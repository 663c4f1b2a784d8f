"""An attempt is over although the run is not: what happened, and what is to be done. Collect, tear down, classify, decide.

Whoever is dead is buried first: a lost node takes its workers along, but those on other nodes still live, fail one after the
other because their peers are gone, and know most of what happened.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from msgspec.structs import replace

from recovery import events
from recovery.attempt import AgentLostError, Attempt, Trouble
from recovery.delegate import Delegate
from recovery.desk import Desk
from recovery.evidence import NO_AGENT, Evidence
from recovery.handling import Handling
from recovery.inquiry import Case, blame, judge, keep, steps_done
from recovery.messages import CollectEvidence, EvidenceCollected
from recovery.policy import Limits
from recovery.spec import CoordinatorSpec

log = logging.getLogger("recovery.coordinator")


class Inquest:
    """Of one coordinator. Main thread only."""

    def __init__(self, desk: Desk, delegate: Delegate, spec: CoordinatorSpec, limits: Limits, handling: Handling) -> None:
        """Nothing has happened yet."""
        self._desk, self._delegate, self._spec = desk, delegate, spec
        self._limits, self._handling = limits, handling
        self._evidence_id = 0
        self._verdicts = 0

    def conclude(self, trouble: Trouble) -> Case:
        """Everything is in the ledger when this returns, nothing is done yet."""
        lost: dict[str, str] = {}
        while True:
            try:
                evidence = self._understand(trouble, lost)
                break
            except AgentLostError:
                trouble = Trouble(agent_lost=True, stalled=trouble.stalled)
        attempt = self._desk.attempt
        if attempt is not None:
            self._handling.end_attempt()
            evidence = replace(evidence, steps=steps_done(self._desk.journal.state))
        self._verdicts += 1
        verdict_id = f"e{self._delegate.epoch}-v{self._verdicts}"
        keep(self._spec.local_dir / "incidents", verdict_id, evidence)
        case = judge(
            self._desk.journal,
            evidence,
            self._limits,
            attempt=attempt,
            verdict_id=verdict_id,
            agent_survived=not lost,
            spared=lambda verdict, decision: "" if lost else self._desk.elastic.spared(verdict, decision),
        )
        log.info("attempt %d: %s; %s: %s", case.info.attempt, case.verdict.class_, case.decision.action, case.decision.reason)
        return case

    def _understand(self, trouble: Trouble, lost: dict[str, str]) -> Evidence:
        """All there is to know; more nodes may be lost meanwhile, and are added to `lost`."""
        dead = self._desk.agent.bury()
        if dead:
            self._mourn(dead)
            lost.update(dead)
        attempt, lines = self._desk.attempt, tuple(lost.values())
        if attempt is None:
            return Evidence(exit={"agent": self._desk.agent.status} if lost else {}, scheduler=lines)
        if lost and attempt.all_ended:
            return attempt.complete(Evidence(), lines, self._spec.node)
        return self._investigate(attempt, trouble, lines)

    def _mourn(self, dead: Mapping[str, str]) -> None:
        """Their workers are dead with them."""
        self._desk.journal.extend(self._delegate.on_agent_lost())
        attempt = self._desk.attempt
        if attempt is None:
            return
        if self._spec.fleet is None:  # elsewhere these pids are other processes
            attempt.kill_groups()
        attempt.lost(dead)

    def _investigate(self, attempt: Attempt, trouble: Trouble, lines: tuple[str, ...]) -> Evidence:
        """Wait a moment for what the peers say, ask the agents for everything they know, end those who still live."""
        said = tuple(f"supervisor: {stalled.describe()}" for stalled in trouble.stalled)
        ranks = attempt.by_progress()
        if trouble.stalled:
            self._suspect(attempt, trouble)
        else:
            self._handling.until(lambda: self._settled(attempt), self._spec.settle_s)
        self._evidence_id += 1
        decision = self._desk.journal.state.last_decision
        more = decision is not None and "more_evidence" in decision.differently and decision.attempt == attempt.number - 1
        request = CollectEvidence(id=self._evidence_id, dump_stacks=more or bool(trouble.stalled))
        answer = self._handling.ask(request, (EvidenceCollected,), self._spec.evidence_s)
        self._handling.until(lambda: not self._desk.agent.parting)  # the ranks of a dying node may die before it
        self._handling.stop_workers("another rank failed" if not trouble.stalled else "no progress")
        gathered = answer.evidence if isinstance(answer, EvidenceCollected) else Evidence(notes=(NO_AGENT,))
        if trouble.stalled:
            issued = {rank: beat.collective for rank, beat in attempt.beats.items()}
            said = (blame(self._desk.journal, attempt.number, ranks, gathered, issued), *said)
        return attempt.complete(gathered, (*lines, *said), self._spec.node)

    def _suspect(self, attempt: Attempt, trouble: Trouble) -> None:
        first = trouble.stalled[0]
        since = time.time() - first.age_s
        reason = f"{first.describe()}; {len(trouble.stalled)} of {len(attempt.workers)} ranks stalled"
        suspected = events.Suspected(t=time.time(), attempt=attempt.number, reason=reason, since=since, rank=first.rank)
        self._desk.journal.append(suspected)

    def _settled(self, attempt: Attempt) -> bool:
        return attempt.all_ended or time.monotonic() - attempt.changed > self._spec.quiet_s
