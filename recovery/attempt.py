"""One attempt as the coordinator sees it: who lives, who is failing, who makes no progress. Facts and pure questions about
them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from recovery.deadlines import Deadlines
from recovery.delegate import DeadWorker
from recovery.evidence import Evidence
from recovery.heartbeat import Beat
from recovery.messages import AgentHello, Exited
from recovery.stragglers import Stragglers

STOPS = (-signal.SIGINT, -signal.SIGTERM)


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """One worker. `status` None and `ended`: nobody can know how."""

    rank: int
    node: str = ""
    pid: int = 0
    ended: bool = False
    status: int | None = None
    ours: bool = False
    t: float = 0.0
    """Wall-clock time of its end, by its own node's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A rank that made no progress for too long."""

    rank: int
    age_s: float
    step: int
    phase: str

    def describe(self) -> str:
        """In words."""
        where = f"step {self.step}, {self.phase}" if self.phase else "not one report since its start"
        return f"no progress of rank {self.rank} for {self.age_s:.1f} s ({where})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why an attempt is over although the run is not."""

    agent_lost: bool = False
    stalled: tuple[Stalled, ...] = ()


class AgentLostError(Exception):
    """The agent died, and with it everything on its node."""


class CannotStartError(Exception):
    """An attempt cannot be started at all, and trying again would not help; the message is for the user."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The workers of one attempt. Times are of the monotonic clock."""

    number: int
    workers: dict[int, WorkerState]
    began: float = field(default_factory=time.monotonic)
    changed: float = field(default_factory=time.monotonic)
    """Last time a worker ended or began to fail."""
    failing: dict[int, str] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    beats_at: dict[int, float] = field(default_factory=dict)
    """When each rank was last heard of: nodes tell at times of their own."""
    stragglers: Stragglers = field(default_factory=Stragglers)
    warm: bool = False
    """Whether a step of it was finished."""
    in_trouble: bool = False
    """Whether some worker ended badly, or is about to. Kept, because it is asked after each message of any of thousands."""

    @classmethod
    def of(cls, number: int, ranks: Iterable[int], nodes: Mapping[int, str] = {}) -> Attempt:
        """About to be started; `nodes`: rank -> node."""
        return cls(number=number, workers={rank: WorkerState(rank=rank, node=nodes.get(rank, "")) for rank in ranks})

    @classmethod
    def adopted(cls, *hellos: AgentHello, ranks: int = 0) -> Attempt:
        """Started by an earlier coordinator. Ranks below `ranks` that no agent knows of are lost with their node."""
        workers = {rank: WorkerState(rank=rank, ended=True) for rank in range(ranks)}
        for hello in hellos:
            for it in hello.workers:
                worker = WorkerState(rank=it.rank, node=hello.node, pid=it.pid, ended=it.ended)
                worker.status, worker.ours, worker.t = it.status, it.ours, it.t
                workers[it.rank] = worker
        bad = any(worker.ended and worker.status != 0 for worker in workers.values())
        return cls(number=hellos[0].attempt, workers=workers, warm=True, in_trouble=bad)

    @property
    def nodes(self) -> dict[int, str]:
        """Rank -> node, as far as known."""
        return {rank: worker.node for rank, worker in self.workers.items() if worker.node}

    def exited(self, message: Exited) -> None:
        """A worker ended."""
        worker = self.workers.get(message.rank if message.rank is not None else -1)
        if worker is not None:
            worker.ended, worker.status, worker.ours, worker.t = True, message.status, message.ours, message.t
            self.in_trouble = self.in_trouble or message.status != 0
            self.changed = time.monotonic()

    def fails(self, rank: int, error: str) -> None:
        """A worker said that it is about to end."""
        self.failing[rank] = error
        self.in_trouble = True
        self.changed = time.monotonic()

    def kill_groups(self) -> None:
        """End what the workers of a dead agent started: the kernel ended the workers, but not their children."""
        for worker in self.workers.values():
            if worker.pid > 0 and not worker.ended:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)

    def lost(self, nodes: Collection[str] | None = None) -> None:
        """The agents of these nodes (None: of all) are dead, and so are their workers."""
        for worker in self.workers.values():
            if not worker.ended and (nodes is None or worker.node in nodes):
                worker.ended, worker.status, worker.ours = True, None, False
                self.in_trouble = True

    def report(self, beats: Iterable[Beat]) -> None:
        """The progress page of a node."""
        for beat in beats:
            if beat.attempt == self.number:
                self.beats[beat.rank] = beat
                self.beats_at[beat.rank] = time.monotonic()

    @property
    def all_ended(self) -> bool:
        """Whether no worker is left."""
        return all(worker.ended for worker in self.workers.values())

    @property
    def all_well(self) -> bool:
        """Whether every worker left with 0."""
        return all(worker.ended and worker.status == 0 for worker in self.workers.values())

    def told_to_stop(self, t: float) -> bool:
        """Whether none of the workers ended badly before `t` (wall clock), unless by a signal that asks for a stop."""
        bad = (worker for worker in self.workers.values() if worker.ended and worker.status != 0)
        return all(worker.status in STOPS or worker.t >= t for worker in bad)

    def dead(self) -> tuple[DeadWorker, ...]:
        """How they ended."""
        ended = (worker for worker in self.workers.values() if worker.ended)
        return tuple(DeadWorker(rank=it.rank, pid=it.pid, status=it.status, ours=it.ours) for it in ended)

    def describe(self) -> dict[str, Any]:
        """The workers for people: rank -> pid, status, progress."""
        return {str(rank): self._describe(worker) for rank, worker in self.workers.items()}

    def _describe(self, worker: WorkerState) -> dict[str, Any]:
        beat = self.beats.get(worker.rank)
        progress = {"step": beat.step, "phase": beat.phase, "age_s": round(self._age_s(beat), 2)} if beat is not None else {}
        return {"pid": worker.pid, "ended": worker.ended, "status": worker.status, **progress}

    def _age_s(self, beat: Beat, now: float | None = None) -> float:
        """Since the rank said so: until the agent looked, and since then. Steps are told meanwhile, beats are looked at once a
        second."""
        now = time.monotonic() if now is None else now
        return beat.age_s + (now - self.beats_at.get(beat.rank, now))

    def complete(self, gathered: Evidence, said: tuple[str, ...], node: str) -> Evidence:
        """What the agent gathered, with what only the supervisor knows. Statuses are as gathered: before our own teardown; of
        ranks whose agent did not answer in time, as they were told, and then our teardown is told apart."""
        unsaid = tuple(f"[rank{rank}]: {error}" for rank, error in self.failing.items()) if not gathered.log else ()
        untold = [worker for worker in self.workers.values() if str(worker.rank) not in gathered.exit]
        deaths = sorted((worker for worker in untold if worker.ended and worker.status is not None), key=lambda it: it.t)
        return replace(
            gathered,
            exit={**{str(it.rank): it.status for it in untold}, **gathered.exit},
            ours=(*gathered.ours, *(str(it.rank) for it in untold if it.ours)),
            log=gathered.log + unsaid,
            scheduler=gathered.scheduler + said,
            order=self._in_order((*gathered.order, *(str(it.rank) for it in deaths))),
            nodes={str(rank): worker.node or node for rank, worker in self.workers.items()},
        )

    def _in_order(self, order: tuple[str, ...]) -> tuple[str, ...]:
        """Deaths as one node told them; those of several nodes by their times."""
        if len(set(self.nodes.values())) < 2:
            return order
        return tuple(sorted(order, key=lambda rank: self.workers[int(rank)].t if int(rank) in self.workers else 0.0))

    def by_progress(self) -> tuple[int, ...]:
        """Living ranks, the least advanced first."""
        living = [rank for rank, worker in self.workers.items() if not worker.ended]
        return tuple(sorted(living, key=lambda rank: (_progress(self.beats.get(rank)), rank)))

    def stalled(self, now: float, *, hang_s: float, start_s: float, learned: Deadlines | None = None) -> tuple[Stalled, ...]:
        """Living ranks without progress for longer than allowed, the least advanced first: a peer only waits for it."""
        deadlines = learned or Deadlines(floor_s=hang_s)
        found = []
        for rank, worker in self.workers.items():
            beat = self.beats.get(rank)
            age_s = now - self.began if beat is None else self._age_s(beat, now)
            warm = self.warm or learned is None
            allowed_s = deadlines.allowed_s(beat, warm=warm, hang_s=hang_s, start_s=start_s)
            if not worker.ended and age_s > allowed_s:
                found.append((beat, Stalled(rank=rank, age_s=age_s, step=beat.step if beat else -1, phase=_phase(beat))))
        return tuple(stalled for _, stalled in sorted(found, key=lambda it: (_progress(it[0]), it[1].rank)))


def _phase(beat: Beat | None) -> str:
    return beat.phase if beat is not None else ""


def _progress(beat: Beat | None) -> tuple[int, int, int]:
    return (beat.step, beat.collective, beat.count) if beat is not None else (-1, -1, -1)
