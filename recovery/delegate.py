"""What the coordinator does not know, it asks its delegate: the one seam between supervision and what is supervised.

The recovery package knows processes, attempts and verdicts; it knows no checkpoint, no layout, no tensor. Whoever composes a
run subclasses Delegate: it plans each attempt, understands the payloads of workers and keeper, and says when the run is done.

Called by the coordinator's one thread only. **Every method must return quickly** (well under a second): while it runs, nobody
answers a death, a client or an agent's lease. Slow work (storage) belongs in a thread of the delegate's own, which calls
`links.wake()` when it has a result; the coordinator then calls `tick`, which hands the result over.

The events that the methods return are appended to the ledger, in order, by the coordinator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from recovery.events import Action, Event, Verdict
from recovery.heartbeat import Beat
from recovery.messages import WorkerSpec
from recovery.places import Place
from recovery.state import RunState

__all__ = ["AttemptEndInfo", "AttemptPlan", "DeadWorker", "Delegate", "Links", "Saved", "WorkerSpec"]

Source = Literal["init", "memory", "peer", "local", "storage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """One attempt, ready to be started."""

    layout: str
    """In words, for the ledger and the live view."""
    workers: tuple[WorkerSpec, ...]
    source: Source
    restored_step: int = 0
    """Finished updates in the state the workers begin with."""
    memfds: dict[str, int]
    """Memory areas (name -> bytes) the agent must hold; same-sized ones keep their content."""
    release: tuple[str, ...] = ()
    """Memory areas that are not needed any more."""
    rendezvous: bool = True
    """Whether the workers need a listening port to meet (`host` and `port` in their args, the listener in rank 0)."""
    ports: tuple[int, int] | None = None
    """First and last of the ports of which rank 0 opens one itself, if it cannot take a listener."""
    decided: tuple[Event, ...] = ()
    """For the ledger, before anything of this plan is carried out."""
    memo: bytes = b""
    """Kept by the agent, given to `on_adopted` of the next coordinator if this one dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadWorker:
    """How a worker of the last attempt ended; `ours`: by a signal of ours, so it says nothing."""

    rank: int
    pid: int
    status: int | None
    ours: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEndInfo:
    """How the attempt before ended."""

    attempt: int
    workers: tuple[DeadWorker, ...]
    verdict: Verdict | None
    """None if nothing went wrong."""
    action: Action
    """What was decided: after `roll_back` the next attempt must not begin with the newest state."""
    agent_survived: bool
    """Whether the agent, and with it the memory tier, is still the same one."""
    differently: tuple[str, ...] = ()
    """How the next attempt should differ from this one (recovery.policy.Change); what a delegate cannot do, it leaves."""
    skips: tuple[tuple[int, int], ...] = ()
    """First and last update of each range of data that the run passes over, by decisions so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What storage has of a run, and what it might have had: steps."""

    step: int | None = None
    """Of the newest checkpoint that counts."""
    held: int = 0
    """Of the newest state that was whole in some memory, and was no part of a history that was given up."""
    done: int = 0
    """The newest finished one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the delegate may do to the run, from the coordinator's thread only, `wake` apart."""

    to_keeper: Callable[[bytes], None]
    to_worker: Callable[[int, bytes], None]
    request_stop: Callable[[str], None]
    """Ask for a stop at the next step boundary, saying who asks."""
    request_save: Callable[[], None]
    wake: Callable[[], None]
    """Have `tick` called at once; safe from any thread."""
    stop_workers: Callable[[str, float], None] = lambda reason, grace_s: None
    """(reason, seconds): SIGTERM for all workers, and SIGKILL after so long."""
    release: Callable[[tuple[str, ...]], None] = lambda names: None
    """Give memory areas back before the next attempt is planned."""
    leave_out: Callable[[int, str, str], None] = lambda rank, class_, reason: None
    """Have the place of a rank left out at the next step boundary, if the run can do without it: rank, class, reason."""
    start_again: Callable[[str], None] = lambda reason: None
    """(reason): have the workers make way for new ones of the same layout, which go on from the state they leave in memory."""
    places: Callable[[], tuple[Place, ...]] = lambda: ()
    """Where ranks may run now."""


class Delegate(ABC):
    """The supervised side of a run. See the module's docstring for who calls when."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of the epoch this coordinator holds; known from the end of `begin` on."""

    @abstractmethod
    def begin(self, links: Links, *, resumed: bool) -> Sequence[Event]:
        """Take the epoch. `resumed`: an agent of an earlier coordinator lives and may still have workers stepping."""

    def recall(self, state: RunState) -> None:
        """What the ledger held before `begin`: the only memory that outlives a coordinator."""
        return

    def ready(self, previous: AttemptEndInfo | None) -> bool:
        """Whether the next attempt can be planned. Raises what makes it impossible.

        What takes long before that (storage) is begun at the first call, and its end told by `links.wake`.
        """
        return True

    @abstractmethod
    def plan_attempt(self, attempt: int, previous: AttemptEndInfo | None) -> AttemptPlan:
        """What to start next; `previous` is None for the first attempt of this coordinator that follows no other."""

    def can_do_with_less(self) -> bool:
        """The memory areas of the attempt just planned do not fit on some node: whether it needs fewer if planned again."""
        return False

    @abstractmethod
    def on_worker(self, rank: int, attempt: int, payload: bytes) -> Sequence[Event]:
        """A payload of a worker. May be repeated after a coordinator's death."""

    @abstractmethod
    def on_keeper(self, payload: bytes) -> Sequence[Event]:
        """A payload of the keeper. May be repeated after a coordinator's death."""

    @abstractmethod
    def on_agent_lost(self) -> Sequence[Event]:
        """The agent of some node died, and with it the keeper there and its part of the memory tier."""

    @abstractmethod
    def finished(self) -> bool:
        """Whether the run has reached its end (asked when all workers have left with 0 and nothing is on its way any more)."""

    def at_end(self) -> bool:
        """Whether the workers that have left with 0 had nothing more to do (else they made way for another layout)."""
        return True

    def ends_when_stopped(self) -> bool:
        """Whether the workers know of a stop by a signal only, so that they may end in any way once one is asked for: that is
        the stop, and no interruption. (Those that are to save first, and fail to, are interrupted.)"""
        return False

    def makes_way(self) -> bool:
        """Whether the workers that have left with 0 did so by themselves, for an attempt of another kind that is to follow."""
        return False

    def place_of(self, rank: int) -> Place | None:
        """Where a rank of the newest attempt runs, or ran; None if it is not known."""
        return None

    def choose_layout(self, places: Sequence[Place], why: str) -> Sequence[Event]:
        """The layout of the attempts to come, on `places`: LayoutChosen (and what belongs to it) if ranks must move or be cut
        in another way, nothing if all may stay. Raises ValueError, and changes nothing, if no layout fits.
        """
        raise ValueError("this run cannot change its layout")

    def resize(self, args: Mapping[str, Any], places: Sequence[Place]) -> Sequence[Event]:
        """The same, when a person asks for other ranks or sizes. Raises ValueError in words if that is not possible."""
        raise ValueError("this run cannot change its layout")

    def num_nodes(self) -> int:
        """How many nodes the next attempt needs."""
        return 1

    def on_agent_found(self, memo: bytes) -> Sequence[Event]:
        """An earlier coordinator's agent lives; `memo` is of the last attempt it was given, its workers may be dead."""
        return ()

    def leaving(self, *, keep: bool) -> None:  # noqa: B027 (most delegates have nothing to do)
        """The agent is about to be shut down, after `drained`; `keep`: what only memory holds is to go to storage before."""

    def saved(self) -> Saved:
        """What storage has of the run that is being left."""
        return Saved()

    def on_adopted(self, attempt: int, memo: bytes) -> Sequence[Event]:
        """Workers of `attempt`, started by an earlier coordinator with this memo, are alive and keep stepping."""
        return ()

    def beats(self, beats: Sequence[Beat]) -> Sequence[Beat]:
        """The progress page as it was just read, with what else the delegate knows of the ranks' progress."""
        return beats

    def on_keeper_started(self, *, restarted: bool) -> Sequence[Event]:
        """A keeper process runs; after `restarted` it knows nothing of what was sent to its predecessor."""
        return ()

    def on_node_returned(self, node: str) -> Sequence[Event]:
        """A node that could not be reached for a while calls again, its processes the same: what was sent to them meanwhile, or
        shortly before, may be lost.
        """
        return ()

    def tick(self, now: float) -> Sequence[Event]:
        """Called a few times a second and after `links.wake()`."""
        return ()

    def cannot_save(self) -> str:
        """Why nobody can ask for a save; empty if the workers see such a request."""
        return ""

    def drained(self) -> bool:
        """Whether nothing is on its way to storage any more; the agent is shut down only then."""
        return True

    def lost(self) -> str:
        """Why the last state will never reach storage; empty if it has, or may yet. Asked when all workers have left with 0."""
        return ""

    def status(self) -> dict[str, Any]:
        """For `ftrain status`: plain JSON values."""
        return {}

    def close(self) -> None:  # noqa: B027 (most delegates have nothing to close)
        """The run is over, whatever its outcome."""
