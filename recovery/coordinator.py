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
from collections.abc import Callable, Sequence

from recovery import events, paths
from recovery.attempt import AgentLostError, Attempt, CannotStartError, Stalled, Trouble
from recovery.classify import warm
from recovery.codes import ExitCode
from recovery.delegate import AttemptEndInfo, Delegate, Saved
from recovery.desk import Desk
from recovery.endings import ONLY_NODE, Ending, as_saved, ending_of, keeps_memory, unstored
from recovery.handling import Handling
from recovery.inquest import Inquest
from recovery.inquiry import decided_before
from recovery.journal import EventWriter, Journal
from recovery.launch import STOP_SIGNALS, accept_stop_signals
from recovery.loop import Loop
from recovery.meanwhile import meanwhile
from recovery.messages import (
    Prepare,
    Prepared,
    PrepareFailed,
    Refused,
    Release,
    SetControl,
    Shutdown,
    StartAttempt,
)
from recovery.owner import HeldError, Owner, claim
from recovery.placement import assign, choose, left_out
from recovery.policy import Limits
from recovery.reception import Reception
from recovery.spec import CoordinatorSpec
from recovery.state import RunState

log = logging.getLogger("recovery.coordinator")

RENEW_S = 5.0  # at most, between renewals of a lease on this machine
OpenLedger = Callable[[int], tuple[EventWriter, RunState]]


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
        self.desk = Desk(self.loop, delegate, spec, limits)
        self.agent = self.desk.agent
        self._handling = Handling(self.loop, self.desk, spec)
        self._inquest = Inquest(self.desk, delegate, spec, limits, self._handling)
        self._open_ledger = open_ledger
        self._on_event = on_event
        self._nodes: tuple[str, ...] = ()  # of the newest attempt
        self._previous: AttemptEndInfo | None = None  # of an earlier coordinator, if the next attempt is not started yet
        self._met: set[int] = set()  # whose stock was taken
        self._resumed = False  # an earlier coordinator left agents behind

    @property
    def state(self) -> RunState:
        """What is known of the run; nothing as long as it is not ours."""
        return self.desk.journal.state if self.desk.ours else RunState()

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
        reception = Reception(self.loop, self.agent.offered, self.desk.on_client)
        reception.listen(paths.coordinator_socket(self.spec.local_dir))
        self.loop.every(min(1.0, self.spec.lease_s / 5), reception.ping)
        try:
            if self.spec.fleet is not None:
                reception.listen_to_nodes(self.spec.fleet, node=self.spec.node)
            if not self._begin(previous):
                return self._not_begun()
            reception.open()
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
            self.agent.close()
            self.delegate.close()
            if self.desk.ours:
                self.desk.journal.close()

    def _begin(self, previous: Owner | None) -> bool:
        """Whether the run is ours. Storage may be away, and agents must hear from us meanwhile, and people and schedulers be
        heard; if they wanted a stop and it is overdue, the run is left as it is.
        """
        resumed = self._resumed = self.agent.find() or (self.spec.fleet is not None and previous is not None)
        links = self.desk.links()
        self.loop.on_signal(STOP_SIGNALS, self.desk.on_signal)
        accept_stop_signals()

        def take() -> tuple[Sequence[events.Event], tuple[EventWriter, RunState]]:
            return self.delegate.begin(links, resumed=resumed), self._open_ledger(self.delegate.epoch)

        taken = meanwhile(self.loop, take, unless=lambda: self.desk.stop_overdue)
        if taken is None:
            return False
        began, (writer, state) = taken
        self.delegate.recall(state)
        self._previous = decided_before(state, agent_survived=resumed)
        self._nodes = state.nodes
        self.agent.expect(state.attempt, state.ranks)
        if previous is not None:  # its record was left behind: it did not live to take it away
            died = events.ProcessDied(t=time.time(), kind="coordinator", pid=previous.pid, status=None, node=previous.host)
            began = [*began, died]
        self.desk.own(Journal(writer, state, self._on_event), began)
        self.agent.begin(self.delegate.epoch)
        warm()  # the classifier's tables are read now, while the agent starts, and not when a restart waits for the verdict
        self.loop.every(self.spec.tick_s, self.desk.tick)
        longest_s = RENEW_S if self.spec.fleet is None else 1.0  # over a network it also shows who is silent
        self.loop.every(min(longest_s, self.spec.lease_s / 5), self.agent.ping)
        return True

    def _not_begun(self) -> Ending:
        """A stop that could not wait for storage any longer."""
        self.agent.give_up()
        self.loop.wait_for(lambda: self.agent.gone, self.spec.teardown_s)
        ending = Ending(code=ExitCode.STOPPED, outcome="stopped", reason="stopped before the run could be taken over")
        return as_saved(ending, Saved(), drained=not self._resumed)

    def _live(self) -> Ending:
        previous = self._previous
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
            case = self._inquest.conclude(result)
            previous = case.info
            # what a lost node held is gone by itself, and where there are many, another may come
            kept = self.desk.elastic.blame(case.verdict, case.decision) if case.info.agent_survived else ONLY_NODE
            num_nodes = 2 if not kept or self.spec.fleet is not None else 1
            ending = ending_of(case.decision, case.verdict, stopping=self.desk.control.stop, num_nodes=num_nodes, kept=kept)
            if ending is None and self.loop.wait_for(self._stop_asked, case.decision.wait_s):
                ending = self._stopped()
            if ending is not None:
                return self._leave(ending)

    def _stopped(self) -> Ending:
        by = self.desk.journal.state.stop_by
        return Ending(code=ExitCode.STOPPED, outcome="stopped", reason=f"stopped on request: {by}")

    def _stop_asked(self) -> bool:
        return self.desk.control.stop

    def _one_attempt(self, previous: AttemptEndInfo | None) -> Ending | Trouble | AttemptEndInfo:
        """Adopt what runs, or start what is planned; watch it to its end."""
        try:
            ending = self._meet_agents()
            if ending is not None:
                return ending
            if self.desk.attempt is None:
                self._handling.until(lambda: self.delegate.ready(previous) or self._stop_asked())
                if not self.delegate.ready(previous):
                    return self._stopped()
                self._start(previous)
            return self._watch()
        except AgentLostError:
            return Trouble(agent_lost=True)

    # agent

    def _meet_agents(self) -> Ending | None:
        """Wait for as many as are needed. On one machine that is one: if it says nothing it is killed, which is its death."""
        fleet, met = self.spec.fleet, self._met
        limit_s = self.spec.agent_s if fleet is None else fleet.patience_s
        if not self._handling.gathered(lambda: self._enough() or (fleet is not None and self._stop_asked()), limit_s):
            if fleet is not None:
                return self._too_few(limit_s)
            self.agent.kill()
            self._handling.until(lambda: False, self.spec.teardown_s)
        if fleet is not None and not self._enough():
            return self._stopped()
        self._met = {hello.pid for hello in self.agent.hellos} if fleet is None else {0}
        if self._met != met:
            self._take_stock()
        return None

    def _enough(self) -> bool:
        return self.agent.ready(self.delegate.num_nodes(), self._left_out())

    def _left_out(self) -> tuple[str, ...]:
        return left_out(self.desk.journal.state.out)

    def _too_few(self, waited_s: float) -> Ending | None:
        """Go on with what is there, if a layout fits; else somebody must find more machines. What becomes of a node that is
        merely silent is waited for first: it may still run its ranks."""
        self._handling.until(lambda: self._enough() or self._stop_asked() or not self.agent.quiet)
        if self._stop_asked():
            return self._stopped()
        there = len(self.agent.available(self._left_out()))
        reason = f"{there} of {self.delegate.num_nodes()} nodes are there after {waited_s:g} s"
        self.desk.elastic.capacity_changed(reason)
        return None if self._enough() else Ending(code=ExitCode.RETRY_ELSEWHERE, outcome="failed", reason=reason)

    def _take_stock(self) -> None:
        """First hellos: adopt their workers if they are of the attempt the ledger knows as the last one started."""
        hellos, desk, state = self.agent.hellos, self.desk, self.desk.journal.state
        if not hellos:
            return
        newest = max(hellos, key=lambda hello: hello.attempt)
        if newest.memo:
            desk.journal.extend(self.delegate.on_agent_found(newest.memo))
        crews = [hello for hello in hellos if hello.workers and hello.attempt == newest.attempt]
        if crews and newest.attempt >= state.attempt:  # before anything else is heard of them
            ranks = state.ranks if newest.attempt == state.attempt and self.spec.fleet is not None else 0
            desk.attempt = desk.attempt or Attempt.adopted(*crews, ranks=ranks)
            self.agent.place(desk.attempt.nodes)
            desk.journal.extend(self.delegate.on_adopted(newest.attempt, newest.memo))
        if any(hello.stop for hello in hellos) and not desk.control.stop:
            desk.request_stop("an earlier coordinator")
        save = max(desk.control.save, *(hello.save for hello in hellos))
        leave = max(hello.leave for hello in hellos)
        desk.control = SetControl(stop=desk.control.stop, save=save, leave=leave)
        self.agent.send(desk.control)
        # everything kept for us has arrived before the answer
        self._handling.ask(Prepare(memfds={}), (Prepared,), self.spec.prepare_s)
        if desk.attempt is not None:
            self.agent.miss([node for node in state.nodes if node not in {hello.node for hello in crews}])

    # an attempt

    def _start(self, previous: AttemptEndInfo | None) -> None:
        number = max(self.desk.journal.state.attempt, *(hello.attempt for hello in self.agent.hellos)) + 1
        try:
            plan = self.delegate.plan_attempt(number, previous)
        except ValueError as error:
            raise CannotStartError(str(error)) from error
        self.desk.journal.extend(plan.decided)
        nodes = self._seats(len(plan.workers))
        self._nodes = tuple(dict.fromkeys(nodes[rank] for rank in sorted(nodes)))
        self.agent.place(nodes, {worker.rank: worker.memfds for worker in plan.workers})
        if plan.release:
            self.agent.send(Release(names=plan.release))
        answer = self._handling.ask(Prepare(memfds=plan.memfds), (Prepared, PrepareFailed), self.spec.prepare_s)
        if isinstance(answer, PrepareFailed):
            if not self.delegate.can_do_with_less():
                raise CannotStartError(answer.reason)
            log.warning("planned again with less memory: %s", answer.reason)
            self._start(previous)
            return
        if answer is None:  # one that does not answer is no use to anybody, dead or not
            self.agent.kill()
            self._handling.until(lambda: False, self.spec.teardown_s)
            raise AgentLostError
        started = events.AttemptStarted(
            t=time.time(),
            attempt=number,
            layout=plan.layout,
            ranks=len(plan.workers),
            source=plan.source,
            restored_step=plan.restored_step,
            nodes=self._nodes,
        )
        self.desk.journal.append(started)
        self.desk.attempt = Attempt.of(number, [worker.rank for worker in plan.workers], nodes)
        self.agent.send(
            StartAttempt(
                attempt=number,
                epoch=self.delegate.epoch,
                workers=plan.workers,
                rendezvous=plan.rendezvous,
                ports=plan.ports,
                memo=plan.memo,
            )
        )

    def _seats(self, ranks: int) -> dict[int, str]:
        """Rank -> node: where the delegate has placed it, else node after node."""
        seats = {rank: place.node for rank in range(ranks) if (place := self.delegate.place_of(rank)) is not None}
        if len(seats) == ranks:
            return seats
        per_node = self.spec.fleet.ranks_per_node if self.spec.fleet is not None else ranks
        return assign(choose(self._nodes, self.agent.available(self._left_out()), self.delegate.num_nodes()), ranks, per_node)

    def _watch(self) -> Ending | Trouble | AttemptEndInfo:
        """Until all workers have left well, or something is wrong."""
        desk, attempt = self.desk, self._handling.attempt

        def over() -> bool:
            over = attempt.all_well or desk.in_trouble or desk.stopped
            return over or Refused in desk.answers or desk.stop_overdue

        while not self._handling.until_tick(over):
            if stalled := self._stalled(attempt):
                return Trouble(stalled=stalled)
        if Refused in desk.answers:
            raise CannotStartError(f"the agent refused: {desk.answers.pop(Refused).reason}")
        if attempt.all_well:
            return self._left_well()
        if desk.stopped:
            self._handling.end_attempt()
            return self._stopped()
        if desk.in_trouble:
            return Trouble()
        return self._stop_overdue()

    def _stalled(self, attempt: Attempt) -> tuple[Stalled, ...]:
        """Who makes no progress; nobody as long as some node is not heard of."""
        limits = {"hang_s": self.spec.hang_s, "start_s": self.spec.start_s}
        return () if self.agent.quiet else attempt.stalled(time.monotonic(), **limits, learned=self.desk.deadlines)

    def _left_well(self) -> Ending | Trouble | AttemptEndInfo:
        """All workers left with 0: they are done, they were asked to, or somebody stopped them behind our back."""
        makes_way = self.desk.leaving or self.delegate.makes_way()
        if makes_way and not self.desk.control.stop and not self.delegate.at_end():
            if self.spec.fleet is not None:  # where ranks move between nodes, only storage has the state of all of them
                self._handling.until(lambda: self.delegate.drained() or self.desk.hurry, self.spec.stop_s)
            return self._made_way()
        limit_s = self.spec.stop_s if self.desk.control.stop else self.spec.drain_s
        self._handling.until(lambda: self.delegate.drained() or self.desk.hurry, limit_s)
        drained, finished, lost = self.delegate.drained(), self.delegate.finished(), self.delegate.lost()
        if drained and not finished and not lost and not self.desk.control.stop:
            return Trouble()
        self._handling.end_attempt()
        if lost or not drained:
            return unstored(lost, limit_s, hurry=self.desk.hurry)
        return Ending(code=ExitCode.DONE, outcome="finished") if finished else self._stopped()

    def _made_way(self) -> AttemptEndInfo:
        """Another layout or phase takes over, from the state that the workers left in memory."""
        attempt = self._handling.attempt
        self._handling.end_attempt()
        return AttemptEndInfo(
            attempt=attempt.number, workers=attempt.dead(), verdict=None, action="restart", agent_survived=True
        )

    def _stop_overdue(self) -> Ending:
        """They were asked to stop and do not."""
        why = "asked again" if self.desk.hurry else f"not stopped within {self.spec.stop_s:g} s"
        self._handling.stop_workers(f"{why} after a stop was asked for")
        self._handling.end_attempt()
        return Ending(code=ExitCode.STOPPED, outcome="stopped", reason=f"workers killed: {why}")

    # the end

    def _leave(self, ending: Ending) -> Ending:
        """Give what is on its way to storage its time, then end the agent."""
        if not self.agent.gone:
            self.delegate.leaving(keep=keeps_memory(ending.code))
            self.loop.wait_for(lambda: self.delegate.drained() or self.desk.hurry or self.agent.gone, self.spec.stop_s)
        ending = as_saved(ending, self.delegate.saved(), drained=self.delegate.drained())
        self.agent.will_leave()
        self.agent.send(Shutdown(reason=f"the run is over: {ending.outcome}"))
        if not self.loop.wait_for(lambda: self.agent.gone, self.spec.teardown_s):
            self.agent.kill()
            self.loop.wait_for(lambda: self.agent.gone, self.spec.teardown_s)
        return ending
