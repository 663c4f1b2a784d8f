"""The agents of many machines as one: what the coordinator says to "the agent" goes to the nodes it concerns, and their answers
come back as one.

An agent comes by itself (the scheduler places it) and is admitted: as a member of the attempt that an earlier coordinator left
behind, if it still holds workers of it, else as a node that waits to be used. It never starts anything by itself. One that
comes with workers of an attempt that is over is a zombie: it is sent away, and may come again with empty hands.

A node is *lost* when nothing that ran on it can still run:
- its connection was ended from its side (the kernel closes the sockets of a dead process) and it does not call again; its
  workers died with it;
- or it is silent. Then the coordinator hangs up, so that no renewal can reach it any more, and waits until the agent's own
  lease is over: by then the agent has killed its workers. Each machine measures time by its own clock.
What protects the checkpoints is neither, but the epoch and the attempt: only the coordinator commits, and only for its attempt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from recovery.agent_link import OnDeath, OnMessage
from recovery.line import Line
from recovery.loop import Loop, Port
from recovery.messages import (
    AgentHello,
    CollectEvidence,
    EvidenceCollected,
    Meeting,
    Ping,
    Prepare,
    Prepared,
    PrepareFailed,
    SetControl,
    Shutdown,
    StartAttempt,
    ToWorker,
    Welcome,
)
from recovery.spec import FleetSpec
from recovery.together import Together, merged_evidence

log = logging.getLogger(__name__)

SILENT_SHARE = 1 / 3  # of the lease: how long an agent may say nothing before it is hung up on
MARGIN_S = 1.0  # beyond the lease: an agent looks at its own only now and then
ANSWER_S = 1.2  # for evidence; whoever has not answered by then is left out, with a note


@dataclass(slots=True, kw_only=True)
class Member:
    """One admitted agent. Times are of the monotonic clock; `away` is why and since when it cannot be reached."""

    node: str
    line: Line
    heard: float
    ended_at: float | None = None
    silent_at: float | None = None
    leaving: bool = False


class Fleet:
    """All agents of a run. Offers what recovery.agent_link.AgentLink offers. Used by the coordinator's thread."""

    status: int | None = None
    """Of a dead agent: nobody here can know."""

    def __init__(self, loop: Loop, spec: FleetSpec, lease_s: float, on_message: OnMessage, on_death: OnDeath) -> None:
        """Nobody is there yet. `joined` is called with the node whenever one is admitted, `returned` when one calls again that
        could not be told anything for a while; set them before anybody can come.
        """
        self.spec = spec
        self.joined: Callable[[str], None] = lambda node: None
        self.returned: Callable[[str], None] = lambda node: None
        self._loop, self._lease_s = loop, lease_s
        self._on_message, self._on_death = on_message, on_death
        self._members: dict[str, Member] = {}
        self._lost: dict[str, str] = {}  # members of the attempt, not buried yet
        self._nodes: dict[int, str] = {}  # rank -> node of the attempt
        self._areas: dict[str, set[str]] = {}  # node -> memory areas it needs
        self._waiting: StartAttempt | None = None  # for the port on which the ranks meet
        self._together: dict[type, Together] = {}
        self._control: SetControl | None = None
        self._expected: tuple[int, int] | None = None  # attempt and ranks that an earlier coordinator left behind
        self._epoch = 0
        self._began = time.monotonic()
        self._over = False

    # what is there

    @property
    def alive(self) -> bool:
        """Whether no node of the attempt is lost."""
        return not self._lost

    @property
    def gone(self) -> bool:
        """Whether no agent is left."""
        return not self._members

    @property
    def quiet(self) -> bool:
        """Whether some node of the attempt is not heard of: until it is lost or back, no lack of progress means anything."""
        return any(not member.line.connected for member in self._crew())

    @property
    def parting(self) -> bool:
        """Whether some node of the attempt hung up on us: it calls again in a moment, or is lost."""
        return any(member.ended_at is not None for member in self._crew())

    @property
    def hellos(self) -> tuple[AgentHello, ...]:
        """The newest hello of each agent."""
        return tuple(member.line.hello for member in self._members.values() if member.line.hello is not None)

    def _crew(self) -> list[Member]:
        """The members that have ranks of the attempt."""
        return [self._members[node] for node in dict.fromkeys(self._nodes.values()) if node in self._members]

    def available(self, left_out: Sequence[str] = ()) -> tuple[str, ...]:
        """Nodes that can be used now, in the order of their names."""
        ready = (node for node, member in self._members.items() if member.line.connected and node not in left_out)
        return tuple(sorted(ready, key=natural))

    def expect(self, attempt: int, ranks: int) -> None:
        """An earlier coordinator started this attempt, and the ledger does not know its end."""
        self._expected = (attempt, ranks)

    def ready(self, needed: int, left_out: Sequence[str] = ()) -> bool:
        """Whether the next attempt can begin, or the one that still steps can be taken over, or what is left of it."""
        return not self.expecting if self._held() else len(self.available(left_out)) >= needed

    @property
    def expecting(self) -> bool:
        """Whether some agents of the expected attempt have come, and the others may: until their leases must be over."""
        held = self._held()
        if self._expected is None or not held or held >= set(range(self._expected[1])):
            return False
        return time.monotonic() - self._began <= self._lease_s + MARGIN_S

    def _held(self) -> set[int]:
        """Ranks of the expected attempt that the agents here know of."""
        if self._expected is None:
            return set()
        crews = (hello for hello in self.hellos if hello.attempt == self._expected[0])
        return {worker.rank for hello in crews for worker in hello.workers}

    # coming and going

    def find(self) -> bool:
        """Whether an agent of an earlier coordinator lives: that they say themselves."""
        return False

    def give_up(self) -> None:
        """The run will not be ours: agents that an earlier coordinator left behind end with their leases."""

    def begin(self, epoch: int) -> None:
        """Who comes from now on is let in under this epoch."""
        self._epoch = epoch

    def offered(self, port: Port, hello: AgentHello) -> None:
        """An agent calls. That it belongs to this run, TLS has proven."""
        if hello.epoch > self._epoch:
            log.warning(
                "the agent of %s knows epoch %d, ours is %d: another coordinator is at work",
                hello.node,
                hello.epoch,
                self._epoch,
            )
            port.close()
            return
        known = self._members.get(hello.node)
        if known is not None and _same_process(known.line.hello, hello):
            self._take(known, port, hello)
            self.returned(hello.node)
            return
        reason = self._objection(known, hello)
        if reason:
            log.warning("the agent of %s (pid %d) is sent away: %s", hello.node, hello.pid, reason)
            port.take_over(lambda frame: None, lambda: None)
            port.send(Welcome(epoch=self._epoch))
            port.send(Shutdown(reason=reason, over=self._over))
            return
        if known is not None:
            self._lose(known, "its agent was replaced by another process")
        self._admit(port, hello)

    def _objection(self, known: Member | None, hello: AgentHello) -> str:
        """Why a newcomer must not stay; empty if it may."""
        if self._over:
            return "the run is over"
        if known is not None and known.line.connected:
            return f"process {known.line.hello.pid if known.line.hello else 0} serves node {hello.node} already"
        living = any(not worker.ended for worker in hello.workers)
        if living and (self._nodes or self._expected is None or hello.attempt != self._expected[0]):
            return f"it still has workers of attempt {hello.attempt}, which is over"
        return ""

    def _admit(self, port: Port, hello: AgentHello) -> None:
        def on_message(message: Any) -> None:
            member.heard = time.monotonic()
            self._heard(node, message)

        node = hello.node
        line = Line(self._loop, on_message, lambda: self._hung_up(member))
        member = Member(node=node, line=line, heard=time.monotonic())
        self._members[node] = member
        log.info("node %s has joined (agent: process %d)", node, hello.pid)
        self._take(member, port, hello)
        self.joined(node)

    def _take(self, member: Member, port: Port, hello: AgentHello) -> None:
        member.heard, member.ended_at, member.silent_at = time.monotonic(), None, None
        member.line.take(port, hello, self._epoch)
        if self._control is not None:
            member.line.send(self._control)

    def _hung_up(self, member: Member) -> None:
        now = time.monotonic()
        if member.leaving:
            self._lose(member, "it was told to leave")
        elif getattr(member.line.ended, "by_peer", False):
            member.ended_at = now
        else:
            member.silent_at = now

    def ping(self) -> None:
        """Renew the leases, and see who is silent."""
        now = time.monotonic()
        for member in list(self._members.values()):
            if member.line.connected and now - member.heard > self._lease_s * SILENT_SHARE:
                member.line.look()  # it may be us who stood still
            if member.line.connected:
                if now - member.heard > self._lease_s * SILENT_SHARE:
                    log.warning("node %s is silent for %.1f s", member.node, now - member.heard)
                    member.line.hang_up()
                    member.silent_at = now
                else:
                    member.line.send(Ping())
            elif member.ended_at is not None and now - member.ended_at > min(self.spec.rejoin_s, self._lease_s):
                self._lose(member, f"its connection ended and it has not called again for {now - member.ended_at:.1f} s")
            elif member.silent_at is not None and now - member.silent_at > self._lease_s + MARGIN_S:
                self._lose(
                    member, f"it was silent for {now - member.heard:.1f} s, longer than its lease of {self._lease_s:g} s"
                )

    def _lose(self, member: Member, reason: str) -> None:
        """Nothing of it runs any more."""
        member.line.hang_up()
        self._members.pop(member.node, None)
        if member.node in self._nodes.values():
            self._lost[member.node] = f"supervisor: node {member.node} was lost: {reason}"
        log.warning("node %s is lost: %s", member.node, reason)
        hello = member.line.hello
        self._on_death(member.node, hello.pid if hello is not None else 0, None, member.leaving)

    def miss(self, nodes: Sequence[str]) -> None:
        """These had ranks of the attempt that was taken over, and have not called again in a lease."""
        reason = "it has not called again since an earlier coordinator died"
        self._lost |= {node: f"supervisor: node {node} was lost: {reason}" for node in nodes}

    def bury(self) -> dict[str, str]:
        """The nodes of the attempt that were lost since the last call, and what is known of it."""
        lost, self._lost = self._lost, {}
        self._nodes = {rank: node for rank, node in self._nodes.items() if node not in lost}
        return lost

    # an attempt

    def place(self, nodes: Mapping[int, str], areas: Mapping[int, Sequence[str]] = {}) -> None:
        """Rank -> node of the attempt to come, and the memory areas that each rank uses."""
        self._nodes = dict(nodes)
        self._expected = None
        self._areas = {node: set() for node in nodes.values()}
        for rank, names in areas.items():
            self._areas[nodes[rank]] |= set(names)
        self._lost = {node: f"supervisor: node {node} was lost" for node in self._areas if node not in self._members}

    def _start(self, start: StartAttempt) -> None:
        """The node of the first rank opens the port; the others are told where it is."""
        self._epoch = start.epoch  # a run that went back has a later one than it began with
        self._waiting = start if start.rendezvous else None
        first = self._nodes[min(worker.rank for worker in start.workers)]
        for node in dict.fromkeys(self._nodes.values()):
            if node == first or not start.rendezvous:
                self._to(node, self._part(start, node))

    def _part(self, start: StartAttempt, node: str) -> StartAttempt:
        return replace(start, workers=tuple(worker for worker in start.workers if self._nodes[worker.rank] == node))

    def _met(self, node: str, meeting: Meeting) -> None:
        start, self._waiting = self._waiting, None
        if start is None or start.attempt != meeting.attempt:
            self._waiting = start
            return
        for other in dict.fromkeys(self._nodes.values()):
            if other != node:
                self._to(other, replace(self._part(start, other), meet=(meeting.host, meeting.port)))

    # talking

    def send(self, message: object) -> None:
        """To whom it concerns; dropped where nobody is connected (whoever needs an answer has a time limit)."""
        match message:
            case StartAttempt():
                self._start(message)
            case ToWorker(rank=rank):
                self._to(self._nodes.get(rank, ""), message)
            case Prepare(memfds=memfds):
                asked = [member.node for member in self._crew()]
                self._together[Prepared] = Together(asked, lambda parts: self._on_message(_prepared(parts), ""))
                for node in asked:
                    needed = self._areas.get(node, set())
                    self._to(node, Prepare(memfds={name: size for name, size in memfds.items() if name in needed}))
            case CollectEvidence(id=number):
                self._collect(message, number)
            case _:
                self._control = message if isinstance(message, SetControl) else self._control
                for member in self._members.values():
                    member.line.send(message)

    def _to(self, node: str, message: object) -> None:
        if node in self._members:
            self._members[node].line.send(message)

    def _collect(self, message: CollectEvidence, number: int) -> None:
        def done(parts: Mapping[str, Any]) -> None:
            found = {node: part.evidence for node, part in parts.items()}
            self._on_message(EvidenceCollected(id=number, evidence=merged_evidence(found, asked)), "")

        asked = [member.node for member in self._crew()]
        together = Together(asked, done)
        self._together[EvidenceCollected] = together
        self._loop.after(ANSWER_S, together.finish)
        for node in asked:
            self._to(node, message)

    def _heard(self, node: str, message: Any) -> None:
        match message:
            case Prepared() | EvidenceCollected() if type(message) in self._together:
                self._together[type(message)].answer(node, message)
            case PrepareFailed(reason=reason):
                self._on_message(PrepareFailed(reason=f"node {node}: {reason}"), node)
            case Meeting():
                self._met(node, message)
            case _:
                self._on_message(message, node)

    # the end

    def will_leave(self) -> None:
        """Their ends are expected from now on."""
        self._over = True
        for member in self._members.values():
            member.leaving = True

    def kill(self) -> None:
        """Have no more to do with those who have ranks: they are told to end everything, and count as lost."""
        for member in self._crew() or list(self._members.values()):
            member.line.send(Shutdown(reason="the coordinator gives this attempt up", over=self._over))
            self._lose(member, "it was given up")

    def describe(self) -> dict[str, Any]:
        """For people: what each node does."""
        ranks = {
            member.node: [rank for rank, node in self._nodes.items() if node == member.node]
            for member in self._members.values()
        }
        return {"nodes": {node: {"ranks": ranks[node], "connected": it.line.connected} for node, it in self._members.items()}}

    def close(self) -> None:
        """Hang up on everybody."""
        for member in self._members.values():
            member.line.hang_up()


def _same_process(known: AgentHello | None, hello: AgentHello) -> bool:
    return known is not None and (known.pid, known.boot_id, known.started) == (hello.pid, hello.boot_id, hello.started)


def _prepared(parts: Mapping[str, Any]) -> Prepared:
    names = tuple(name for part in parts.values() for name in part.names)
    return Prepared(names=names, kept=tuple(name for part in parts.values() for name in part.kept))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """n2 comes before n10."""
    words: list[str] = []
    for letter in name:
        if words and words[-1].isdigit() == letter.isdigit():
            words[-1] += letter
        else:
            words.append(letter)
    return tuple((0, int(word), "") if word.isdigit() else (1, 0, word) for word in words)
