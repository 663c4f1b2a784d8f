"""The coordinator: one per run, the only process that decides, and one that may die at any moment.

It reads as a story: take the run, find or start the agent, then attempt after attempt until the run is over. Each wait in the
story handles whatever arrives (deaths, payloads, clients, signals) in one thread; handlers (recovery.desk) only note facts,
the story acts on them. Every decision is in the ledger before it is carried out, so a successor knows what was meant; what
the agent holds (workers, memory, unacknowledged messages) it hears from the agent itself, and the same workers keep stepping.

What a training run is, it does not know: see recovery.delegate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from recovery import events, paths
from recovery.agent_record import living_agent
from recovery.attempt import AgentLostError, Attempt, CannotStartError, Trouble
from recovery.classify import warm
from recovery.codes import ExitCode
from recovery.deadlines import Deadlines
from recovery.delegate import AttemptEndInfo, Delegate
from recovery.desk import Desk
from recovery.endings import Ending, ending_of, unsaved
from recovery.evidence import Evidence
from recovery.inquiry import Case, blame, judge
from recovery.journal import EventWriter, Journal
from recovery.launch import STOP_SIGNALS, accept_stop_signals
from recovery.loop import Loop
from recovery.messages import (
    CollectEvidence,
    EvidenceCollected,
    Prepare,
    Prepared,
    PrepareFailed,
    Refused,
    Release,
    SetControl,
    Shutdown,
    StartAttempt,
    StopWorkers,
)
from recovery.owner import HeldError, Owner, claim
from recovery.policy import Limits
from recovery.reception import Reception
from recovery.spec import CoordinatorSpec
from recovery.state import RunState

log = logging.getLogger("recovery.coordinator")

OpenLedger = Callable[[int], tuple[EventWriter, RunState]]
TICK_S = 0.25


class Coordinator:
    """One life of a coordinator. Main thread only; `run` once."""

    def __init__(
        self,
        delegate: Delegate,
        spec: CoordinatorSpec,
        open_ledger: OpenLedger,
        limits: Limits,
        *,
        on_event: Callable[[events.Event], None] | None = None,
    ) -> None:
        """`open_ledger(epoch)` gives the writer and the fold of what the ledger held before; called once the run is ours."""
        self.delegate = delegate
        self.spec = spec
        self.limits = limits
        self.loop = Loop()
        self.desk = Desk(self.loop, delegate, spec.node, spec.stop_s, Deadlines(floor_s=spec.hang_floor_s), limits)
        self.desk.elastic.capacity[spec.node] = spec.places
        self.agent = self.desk.agent
        self._open_ledger = open_ledger
        self._on_event = on_event
        self._evidence_id = 0
        self._verdicts = 0

    # the story

    def run(self) -> Ending:
        """Own the run and carry it to its end, as far as this process can."""
        try:
            held = claim(self.spec.local_dir, take_over=self.spec.take_over)
        except HeldError as error:
            return Ending(code=ExitCode.HELD, outcome="failed", reason=str(error))
        try:
            return self._run_owned(held.previous)
        finally:
            held.release()
            self.loop.close()

    def _run_owned(self, previous: Owner | None) -> Ending:
        path = paths.coordinator_socket(self.spec.local_dir)
        reception = Reception(self.loop, path, self.agent.offered, self.desk.on_client)
        try:
            self._begin(previous)
            ending = self._live()
            ended = events.RunEnded(t=time.time(), outcome=ending.outcome, reason=ending.reason)
            self.desk.journal.append(ended)
            return ending
        except Exception:  # a fault of ours or of the delegate must not leave workers that nobody watches
            log.exception("the coordinator fails")
            self.agent.kill()
            raise
        finally:
            reception.close()
            self.delegate.close()
            if self.desk.journal is not None:
                self.desk.journal.close()

    def _begin(self, previous: Owner | None) -> None:
        living = living_agent(self.spec.local_dir)
        began = self.delegate.begin(self.desk.links(), resumed=living is not None)
        self.desk.journal = Journal(*self._open_ledger(self.delegate.epoch), self._on_event)
        self.desk.journal.extend(began)
        if previous is not None:  # its record was left behind: it did not live to take it away
            died = events.ProcessDied(t=time.time(), kind="coordinator", pid=previous.pid, status=None, node=previous.host)
            self.desk.journal.append(died)
        self.loop.on_signal(STOP_SIGNALS, self.desk.on_signal)
        accept_stop_signals()
        if living is None or not self.agent.adopt(living, self.delegate.epoch):
            self._new_agent()
        warm()  # the classifier's tables are read now, while the agent starts, and not when a restart waits for the verdict
        self.loop.every(TICK_S, self.desk.tick)
        self.loop.every(min(1.0, self.spec.lease_s / 5), self.agent.ping)

    def _new_agent(self) -> None:
        self.agent.start(self.spec.for_agent(), self.delegate.epoch)

    def _live(self) -> Ending:
        previous: AttemptEndInfo | None = None
        while True:
            try:
                result = self._one_attempt(previous)
            except CannotStartError as error:
                return self._leave(Ending(code=ExitCode.CONFIG, outcome="failed", reason=str(error)))
            if isinstance(result, Ending):
                return self._leave(result)
            if isinstance(result, AttemptEndInfo):
                previous = result
                continue
            case = self._conclude(result)
            previous = case.info
            on = self.desk.elastic.blame(case.verdict, case.decision)
            ending = ending_of(case.decision, case.verdict, stopping=self.desk.control.stop, num_nodes=1 + on)
            if ending is None and self.loop.wait_for(self._stop_asked, case.decision.wait_s):
                ending = self._stopped()
            if ending is not None:
                return self._leave(ending)

    def _stopped(self) -> Ending:
        by = self.desk.journal.state.stop_by
        return Ending(code=ExitCode.STOPPED, outcome="stopped", reason=f"stopped by {by}")

    def _stop_asked(self) -> bool:
        return self.desk.control.stop

    def _one_attempt(self, previous: AttemptEndInfo | None) -> Ending | Trouble | AttemptEndInfo:
        """Adopt what runs, or start what is planned; watch it to its end."""
        try:
            self._meet_agent()
            if self.desk.attempt is None:
                self._start(previous)
            return self._watch()
        except AgentLostError:
            return Trouble(agent_lost=True)

    # waiting

    def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait, handling whatever arrives; the agent's death ends every wait."""
        self.loop.wait_for(lambda: condition() or not self.agent.alive, timeout_s)
        if not self.agent.alive:
            raise AgentLostError
        return condition()

    def _ask(self, message: object, answers: tuple[type, ...], timeout_s: float) -> object | None:
        """Send a command and wait for one of its answers; None if there is none in time."""
        for kind in answers:
            self.desk.answers.pop(kind, None)
        self.agent.send(message)
        self._until(lambda: any(kind in self.desk.answers for kind in answers), timeout_s)
        return next((self.desk.answers[kind] for kind in answers if kind in self.desk.answers), None)

    # agent

    def _meet_agent(self) -> None:
        """Wait for the agent's hello; one that says nothing is killed, which is then its death."""
        if not self.agent.alive:
            self._new_agent()
        greeted = self.agent.hello
        if not self._until(lambda: self.agent.ready, self.spec.agent_s):
            self.agent.kill()
            self._until(lambda: False, self.spec.teardown_s)
        if greeted is None:
            self._take_stock()

    def _take_stock(self) -> None:
        """A first hello: adopt its workers if they are of the attempt the ledger knows as the last one started."""
        hello, desk = self.agent.hello, self.desk
        if hello is None:
            return
        if hello.memo:
            desk.journal.extend(self.delegate.on_agent_found(hello.memo))
        if hello.workers and hello.attempt >= desk.journal.state.attempt:  # before anything else is heard of them
            desk.attempt = desk.attempt or Attempt.adopted(hello)
            desk.journal.extend(self.delegate.on_adopted(hello.attempt, hello.memo))
        if hello.stop and not desk.control.stop:
            desk.request_stop("an earlier coordinator")
        desk.control = SetControl(stop=desk.control.stop, save=max(hello.save, desk.control.save), leave=hello.leave)
        self.agent.send(desk.control)
        self._ask(Prepare(memfds={}), (Prepared,), self.spec.prepare_s)  # everything kept for us has arrived before the answer

    # an attempt

    def _start(self, previous: AttemptEndInfo | None) -> None:
        hello, state = self.agent.hello, self.desk.journal.state
        number = max(state.attempt, hello.attempt if hello else -1) + 1
        plan = self.delegate.plan_attempt(number, previous)
        self.desk.journal.extend(plan.decided)
        if plan.release:
            self.agent.send(Release(names=plan.release))
        answer = self._ask(Prepare(memfds=plan.memfds), (Prepared, PrepareFailed), self.spec.prepare_s)
        if not isinstance(answer, Prepared):
            reason = answer.reason if isinstance(answer, PrepareFailed) else "the agent does not answer"
            raise CannotStartError(reason)
        started = events.AttemptStarted(
            t=time.time(),
            attempt=number,
            layout=plan.layout,
            ranks=len(plan.workers),
            source=plan.source,
            restored_step=plan.restored_step,
            nodes=(self.spec.node,),
        )
        self.desk.journal.append(started)
        self.desk.attempt = Attempt.of(number, [worker.rank for worker in plan.workers])
        self.agent.send(
            StartAttempt(
                attempt=number,
                epoch=self.delegate.epoch,
                workers=plan.workers,
                rendezvous=plan.rendezvous,
                memo=plan.memo,
            )
        )

    def _watch(self) -> Ending | Trouble | AttemptEndInfo:
        """Until all workers have left well, or something is wrong."""
        desk, attempt = self.desk, self._attempt()

        def over() -> bool:
            return attempt.all_well or attempt.in_trouble or Refused in desk.answers

        while not self._until(lambda: over() or desk.stop_overdue, TICK_S):
            limits = {"hang_s": self.spec.hang_s, "start_s": self.spec.start_s}
            stalled = attempt.stalled(time.monotonic(), **limits, learned=desk.deadlines)
            if stalled:
                return Trouble(stalled=stalled)
        if Refused in desk.answers:
            raise CannotStartError(f"the agent refused: {desk.answers.pop(Refused).reason}")
        if attempt.all_well:
            return self._left_well()
        if attempt.in_trouble:
            return Trouble()
        return self._stop_overdue()

    def _attempt(self) -> Attempt:
        assert self.desk.attempt is not None
        return self.desk.attempt

    def _left_well(self) -> Ending | Trouble | AttemptEndInfo:
        """All workers left with 0: they are done, they were asked to, or somebody stopped them behind our back."""
        if self.desk.leaving and not self.desk.control.stop and not self.delegate.at_end():
            return self._made_way()
        limit_s = self.spec.stop_s if self.desk.control.stop else self.spec.drain_s
        self._until(lambda: self.delegate.drained() or self.desk.hurry, limit_s)
        drained, finished, lost = self.delegate.drained(), self.delegate.finished(), self.delegate.lost()
        if drained and not finished and not lost and not self.desk.control.stop:
            return Trouble()
        self._end_attempt()
        if lost or not drained:
            reason = lost or f"the last state is not in storage after {limit_s:g} s of waiting"
            return Ending(code=ExitCode.STORAGE, outcome="failed", reason=reason)
        return Ending(code=ExitCode.DONE, outcome="finished") if finished else self._stopped()

    def _made_way(self) -> AttemptEndInfo:
        """Another layout takes over, from the state that the workers left in memory."""
        attempt = self._attempt()
        self._end_attempt()
        return AttemptEndInfo(
            attempt=attempt.number, workers=attempt.dead(), verdict=None, action="restart", agent_survived=True
        )

    def _stop_overdue(self) -> Ending:
        """They were asked to stop and do not."""
        why = "asked again" if self.desk.hurry else f"not stopped within {self.spec.stop_s:g} s"
        self._stop_workers(f"{why} after a stop was asked for")
        self._end_attempt()
        return Ending(code=ExitCode.STOPPED, outcome="stopped", reason=f"workers killed: {why}")

    def _stop_workers(self, reason: str) -> None:
        """SIGKILL, and wait until none is left. If one survives even that, the node is broken, and its agent goes."""
        attempt = self._attempt()
        if attempt.all_ended:
            return
        self.agent.send(StopWorkers(reason=reason, grace_s=0.0))
        if not self._until(lambda: attempt.all_ended, self.spec.teardown_s):
            log.error("workers survive SIGKILL: %s", [it.pid for it in attempt.workers.values() if not it.ended])
            self.agent.kill()
            self._until(lambda: False, self.spec.teardown_s)

    def _end_attempt(self) -> None:
        attempt, self.desk.attempt = self._attempt(), None
        journal = self.desk.journal
        journal.append(events.AttemptEnded(t=time.time(), attempt=attempt.number, step=journal.state.step))

    # trouble

    def _conclude(self, trouble: Trouble) -> Case:
        """Collect, tear down, classify, decide; everything is in the ledger when this returns, nothing is done yet."""
        evidence = Evidence()
        if not trouble.agent_lost:
            try:
                evidence = self._investigate(trouble)
            except AgentLostError:
                trouble = Trouble(agent_lost=True, stalled=trouble.stalled)
        if trouble.agent_lost:
            evidence = self._mourn()
        attempt = self.desk.attempt
        if attempt is not None:
            self._end_attempt()
        self._verdicts += 1
        case = judge(
            self.desk.journal,
            evidence,
            self.limits,
            attempt=attempt,
            verdict_id=f"e{self.delegate.epoch}-v{self._verdicts}",
            agent_survived=not trouble.agent_lost,
            incidents=self.spec.local_dir / "incidents",
        )
        log.info("attempt %d: %s; %s: %s", case.info.attempt, case.verdict.class_, case.decision.action, case.decision.reason)
        return case

    def _investigate(self, trouble: Trouble) -> Evidence:
        """Wait a moment for what the peers say, ask the agent for everything it knows, end those who still live."""
        attempt = self._attempt()
        said = tuple(f"supervisor: {stalled.describe()}" for stalled in trouble.stalled)
        ranks = attempt.by_progress()
        if trouble.stalled:
            first = trouble.stalled[0]
            since = time.time() - first.age_s
            reason = f"{first.describe()}; {len(trouble.stalled)} of {len(attempt.workers)} ranks stalled"
            suspected = events.Suspected(t=time.time(), attempt=attempt.number, reason=reason, since=since, rank=first.rank)
            self.desk.journal.append(suspected)
        else:
            self._until(lambda: self._settled(attempt), self.spec.settle_s)
        self._evidence_id += 1
        request = CollectEvidence(id=self._evidence_id, dump_stacks=bool(trouble.stalled))
        answer = self._ask(request, (EvidenceCollected,), self.spec.evidence_s)
        self._stop_workers("another rank failed" if not trouble.stalled else "no progress")
        gathered = answer.evidence if isinstance(answer, EvidenceCollected) else Evidence(notes=("the agent did not answer",))
        if trouble.stalled:
            said = (blame(self.desk.journal, attempt.number, ranks, gathered), *said)
        return attempt.complete(gathered, said, self.spec.node)

    def _settled(self, attempt: Attempt) -> bool:
        return attempt.all_ended or time.monotonic() - attempt.changed > self.spec.quiet_s

    def _mourn(self) -> Evidence:
        """The agent is dead, and its workers with it. A successor is started at once: it warms up while we think."""
        self.desk.journal.extend(self.delegate.on_agent_lost())
        self._new_agent()
        status = self.desk.agent_status
        line = f"supervisor: the agent of node {self.spec.node} died with status {status}"
        attempt = self.desk.attempt
        if attempt is None:
            return Evidence(exit={"agent": status}, scheduler=(line,))
        attempt.kill_groups()
        attempt.lost()
        return attempt.complete(Evidence(), (line,), self.spec.node)

    # the end

    def _leave(self, ending: Ending) -> Ending:
        """Give what is on its way to storage its time, then end the agent."""
        if self.agent.alive:
            self.delegate.leaving(stopped=ending.code is ExitCode.STOPPED)
            self.loop.wait_for(lambda: self.delegate.drained() or self.desk.hurry or not self.agent.alive, self.spec.stop_s)
            ending = ending if self.delegate.drained() else unsaved(ending)
        self.agent.will_leave()
        self.agent.send(Shutdown(reason=f"the run is over: {ending.outcome}"))
        if not self.loop.wait_for(lambda: not self.agent.alive, self.spec.teardown_s):
            self.agent.kill()
            self.loop.wait_for(lambda: not self.agent.alive, self.spec.teardown_s)
        return ending
