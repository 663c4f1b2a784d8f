"""The coordinator's desk: whatever arrives is noted here, in the ledger and in the facts that the story waits for.

Nothing here decides. A handler may be told the same thing twice (after the death of an earlier coordinator) and must not mind.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from recovery import events
from recovery.agent_link import AgentLink
from recovery.attempt import Attempt
from recovery.deadlines import Deadlines
from recovery.delegate import Delegate, Links
from recovery.elastic import KINDS, Elastic
from recovery.fleet import Fleet, natural
from recovery.journal import Journal
from recovery.loop import Loop
from recovery.messages import (
    ClientReply,
    ClientRequest,
    EvidenceCollected,
    Exited,
    Failing,
    FromKeeper,
    FromWorker,
    Heartbeats,
    Prepared,
    PrepareFailed,
    Refused,
    Release,
    SetControl,
    Signalled,
    Spawned,
    Started,
    StopWorkers,
    ToKeeper,
    ToWorker,
)
from recovery.policy import Limits
from recovery.spec import CoordinatorSpec

log = logging.getLogger(__name__)

IMPATIENT_S = 1.0
VOLLEY_S = 0.5  # who ends a whole job signals its processes one after the other, and not always us first


class Desk:
    """Facts and their recording. Until the run is ours there is no journal, and a stop is all that is heard."""

    def __init__(self, loop: Loop, delegate: Delegate, spec: CoordinatorSpec, limits: Limits) -> None:
        """Nothing is known yet."""
        self.attempt: Attempt | None = None
        self.elastic = Elastic(self, delegate, limits)
        self._limits = limits
        self.deadlines = Deadlines(floor_s=spec.hang_floor_s)
        self.agent = self._agents(loop, spec)
        self.control = SetControl(stop=False, save=0)
        self.stop_asked: float | None = None
        self._stop_t = math.inf  # the same on the wall clock, by which the ends of workers are told
        self.hurry = False
        self.ticks = 0
        """How often somebody has looked around."""
        self.answers: dict[type, Any] = {}
        self._journal: Journal | None = None
        self._early: list[events.Event] = []  # for the journal, once there is one
        self._loop = loop
        self._delegate = delegate
        self._stop_s = spec.stop_s
        self._told: set[tuple[str, str, int, int]] = set()
        self._asked_by: dict[int, float] = {}
        self._save_owed: int | None = None  # the step at which one was asked for; one of this step or a later one is the answer

    def _agents(self, loop: Loop, spec: CoordinatorSpec) -> AgentLink | Fleet:
        """One machine's agent, or those of many; the places of a node are known while it is there."""
        if spec.fleet is None:
            self.elastic.capacity[spec.node] = spec.places
            return AgentLink(loop, spec.for_agent(), self.on_message, self.on_agent_death)
        fleet = Fleet(loop, spec.fleet, spec.lease_s, self.on_message, self._on_node_death)
        fleet.joined = lambda node: self._on_node_joined(node, spec.places)
        fleet.returned = self._on_node_returned
        return fleet

    def _on_node_joined(self, node: str, places: int) -> None:
        """A spare for now; a run that had to shrink may grow again."""
        capacity = self.elastic.capacity
        known = {**capacity, node: places}
        capacity.clear()
        capacity.update({name: known[name] for name in sorted(known, key=natural)})
        if self.attempt is not None:
            self.elastic.node_joined(node)

    def _on_node_returned(self, node: str) -> None:
        log.info("node %s has called again", node)
        if self.ours:
            self.journal.extend(self._delegate.on_node_returned(node))

    def _on_node_death(self, node: str, pid: int, status: int | None, ours: bool) -> None:
        self.elastic.capacity.pop(node, None)
        self.on_agent_death(node, pid, status, ours)

    def links(self) -> Links:
        """What the delegate may do."""
        return Links(
            to_keeper=lambda payload: self.agent.send(ToKeeper(payload=payload)),
            to_worker=lambda rank, payload: self.agent.send(ToWorker(rank=rank, payload=payload)),
            request_stop=self.request_stop,
            request_save=self.request_save,
            wake=lambda: self._loop.call_soon(self.tick),
            stop_workers=lambda reason, grace_s: self.agent.send(StopWorkers(reason=reason, grace_s=grace_s)),
            release=lambda names: self.agent.send(Release(names=names)),
            leave_out=lambda *blame: self._loop.call_soon(lambda: self.elastic.leave_out(*blame)),
            start_again=lambda reason: self._loop.call_soon(lambda: self.elastic.start_again(reason)),
            places=lambda: self.elastic.places,
        )

    @property
    def ours(self) -> bool:
        """Whether the run is ours: its ledger is open."""
        return self._journal is not None

    @property
    def journal(self) -> Journal:
        """Of a run that is ours."""
        assert self._journal is not None, "the run is not ours yet"
        return self._journal

    def own(self, journal: Journal, began: Sequence[events.Event]) -> None:
        """The run is ours: what its beginning was, and what was asked before."""
        self._journal = journal
        journal.extend((*began, *self._early))

    def _note(self, event: events.Event) -> None:
        if self.ours:
            self.journal.append(event)
        else:
            self._early.append(event)

    def tick(self) -> None:
        """The delegate's turn, and another try at what the ledger did not take; not before the run is ours."""
        if not self.ours:
            return
        self.ticks += 1
        self.journal.write()
        told = self._delegate.tick(time.time())
        self._has_stepped(self.attempt, told)  # a script that only logs its steps tells them here
        self.journal.extend(told)
        self.elastic.tick()

    # what people and schedulers ask for

    def on_signal(self, number: int) -> None:
        """A stop; asked again, not in the same volley, it means at once. A scheduler's warning and its SIGTERM are not "again":
        the time in between is for the save that the warning asked for."""
        now = time.monotonic()
        before = self._asked_by.setdefault(number, now)
        if number == signal.SIGINT and self.stop_asked is not None:
            before = min(before, self.stop_asked)
        self.hurry = self.hurry or now - before > IMPATIENT_S
        self.request_stop(signal.Signals(number).name)

    def request_stop(self, by: str) -> None:
        """Finish the step, save, leave."""
        if self.stop_asked is None:
            self.stop_asked, self._stop_t = time.monotonic(), time.time()
            self._note(events.StopRequested(t=self._stop_t, by=by))
        self._set(replace(self.control, stop=True))

    def request_save(self) -> None:
        """Save once more, soon. If the workers die before they do, those that follow are asked again."""
        self._save_owed = self.journal.state.step
        self._set(replace(self.control, save=self.control.save + 1))

    def _set(self, control: SetControl) -> None:
        self.control = control
        self.agent.send(control)

    def ask_to_leave(self, attempt: int) -> None:
        """Workers of attempts up to this one make way for another layout."""
        self._set(replace(self.control, leave=max(attempt, self.control.leave)))

    @property
    def running(self) -> int | None:
        """The attempt whose workers live."""
        return self.attempt.number if self.attempt is not None else None

    @property
    def leaving(self) -> bool:
        """Whether the workers that live are to make way."""
        return self.attempt is not None and self.control.leave >= self.attempt.number

    @property
    def in_trouble(self) -> bool:
        """Whether some worker ended badly, or is about to, and no stop that was asked for explains it, nor may yet."""
        attempt = self.attempt
        if attempt is None or not attempt.in_trouble or not self._delegate.ends_when_stopped():
            return attempt is not None and attempt.in_trouble
        if self.stop_asked is None and attempt.told_to_stop(math.inf):
            return time.monotonic() - attempt.changed > VOLLEY_S
        return not attempt.told_to_stop(self._stop_t)

    @property
    def stopped(self) -> bool:
        """Whether all workers have ended, not all of them well, because a stop was asked for: nothing is to be found out."""
        attempt = self.attempt
        ended = self.stop_asked is not None and attempt is not None and attempt.all_ended and not attempt.all_well
        return ended and not self.in_trouble

    @property
    def stop_overdue(self) -> bool:
        """Whether the workers have had their time to stop."""
        return self.hurry or (self.stop_asked is not None and time.monotonic() - self.stop_asked > self._stop_s)

    def on_client(self, request: ClientRequest) -> ClientReply | None:
        """`ftrain status|save|stop|drain|admit|resize`. None: the answer must wait until the run is ours. A stop
        need not: storage may be away for an hour.
        """
        if not self.ours and request.kind != "stop":
            return None
        match request.kind:
            case "status":
                return ClientReply(ok=True, data=self.status())
            case "save" if reason := self._delegate.cannot_save():
                return ClientReply(ok=False, error=reason)
            case "save":
                self.request_save()
            case "stop":
                self.request_stop(str(request.args.get("by", "ftrain stop")))
            case kind if kind in KINDS:
                return self.elastic.on_client(request)
            case kind:
                return ClientReply(ok=False, error=f"unknown request {kind!r}; known: status, save, stop, {', '.join(KINDS)}")
        saves = not self._delegate.cannot_save()
        return ClientReply(ok=True, data={"step": self.journal.state.step, "saves": saves} if self.ours else {})

    def status(self) -> dict[str, Any]:
        """The run as it stands, in plain JSON values."""
        state, attempt = self.journal.state, self.attempt
        last = state.last_decision
        decision = {"action": last.action, "reason": last.reason, "attempt": last.attempt} if last else None
        slowest = attempt.stragglers.slowest if attempt is not None else None
        return {
            "phase": str(state.phase),
            "epoch": state.epoch,
            "attempt": state.attempt,
            "attempts": state.attempts,
            "layout": state.layout,
            "step": state.step,
            "loss": state.loss,
            "eval_loss": state.eval_loss,
            "snapshot_step": state.snapshot_step,
            "committed_step": state.committed_step,
            "interruptions": len(state.interruptions),
            "last_decision": decision,
            **self.agent.describe(),
            "stopping": self.control.stop,
            "workers": attempt.describe() if attempt is not None else {},
            "slowest": slowest.describe() if slowest is not None else None,
            **self.elastic.describe(),
            "run": self._delegate.status(),
        }

    # what the agent tells

    def on_message(self, message: Any, node: str) -> None:
        """Everything but its hello; `node`: whose agent says so, empty for an answer of all together."""
        match message:
            case FromWorker(rank=rank, attempt=attempt, payload=payload):
                self._told_by_worker(attempt, self._delegate.on_worker(rank, attempt, payload))
            case FromKeeper(payload=payload):
                self.journal.extend(self._delegate.on_keeper(payload))
            case Heartbeats(beats=beats) if self.attempt is not None:
                self.attempt.report(self._delegate.beats(beats))
                self._watch_pace(self.attempt)
            case Exited():
                self._exited(message, node)
            case Signalled():
                self._signalled(message)
            case Started():
                self._started(message)
            case Failing(rank=rank, attempt=attempt, error=error):
                self._failing(rank, attempt, error)
            case Spawned(attempt=attempt, rank=rank, pid=pid) if self._is_current(attempt):
                self._current().workers[rank].pid = pid
            case Prepared() | PrepareFailed() | EvidenceCollected() | Refused():
                self.answers[type(message)] = message

    def _watch_pace(self, attempt: Attempt) -> None:
        """A straggler is told; what else is done is a matter of policy."""
        factor, windows = self._limits.straggler_factor, self._limits.straggler_windows
        found = attempt.stragglers.see(attempt.beats.values(), factor=factor, windows=windows)
        if found is not None:
            now, reason = time.time(), found.describe()
            log.warning("%s", reason)
            told = events.Straggler(t=now, attempt=attempt.number, rank=found.rank, ratio=found.ratio, reason=reason)
            self.journal.append(told)
            self.elastic.on_straggler(found.rank, reason)

    def _has_stepped(self, attempt: Attempt | None, told: Sequence[events.Event]) -> None:
        """From its first finished step on, an attempt may be silent no longer than a step takes."""
        if attempt is not None and not attempt.warm:
            attempt.warm = any(event.attempt == attempt.number for event in told for _ in events.steps_of(event))

    def _told_by_worker(self, attempt: int, told: Sequence[events.Event]) -> None:
        if self._is_current(attempt):
            self._has_stepped(self._current(), told)
        self.deadlines.learn(told)
        self.journal.extend(told)
        if self._save_owed is not None and any(isinstance(event, events.Ready) for event in told):
            self._ask_again_for_the_save(self._save_owed)

    def _ask_again_for_the_save(self, owed: int) -> None:
        """New workers take what was asked before they came as done."""
        self._save_owed = None
        committed = self.journal.state.committed_step
        if committed is None or committed < owed:
            self.request_save()

    def _is_current(self, attempt: int) -> bool:
        return self.attempt is not None and attempt == self.attempt.number

    def _current(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _exited(self, message: Exited, node: str) -> None:
        if message.kind == "worker" and self._is_current(message.attempt):
            self._current().exited(message)
        told = (node, message.kind, message.attempt, message.rank if message.rank is not None else message.pid)
        if told in self._told:
            return
        self._told.add(told)
        self.journal.append(
            events.ProcessDied(
                t=message.t,
                attempt=message.attempt,
                kind=message.kind,
                pid=message.pid,
                status=message.status,
                rank=message.rank,
                node=node,
                ours=message.ours,
            )
        )

    def _signalled(self, message: Signalled) -> None:
        sent = events.SignalSent(
            t=message.t,
            attempt=message.attempt,
            pid=message.pid,
            kind=message.kind,
            signal=message.signal,
            reason=message.reason,
            rank=message.rank,
        )
        self.journal.append(sent)

    def _started(self, message: Started) -> None:
        log.info("%s started, pid %d%s", message.kind, message.pid, " (again)" if message.restarted else "")
        if message.kind == "keeper":
            self.journal.extend(self._delegate.on_keeper_started(restarted=message.restarted))

    def _failing(self, rank: int, attempt: int, error: str) -> None:
        log.warning("rank %d of attempt %d fails: %s", rank, attempt, error)
        if self._is_current(attempt):
            self._current().fails(rank, error)

    def on_agent_death(self, node: str, pid: int, status: int | None, ours: bool) -> None:
        """The agent is gone, whoever ended it."""
        died = events.ProcessDied(t=time.time(), kind="agent", pid=pid, status=status, node=node, ours=ours)
        self._note(died)
