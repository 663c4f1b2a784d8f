"""Every message between the processes of a run, in one place, because the unions below *are* the protocol.

    client  <-> coordinator   ClientRequest / ClientReply
    agent   <-> coordinator   ToAgent / ToCoordinator (one listener for clients and agents: the first frame tells which)
    agent   <-> zygote        ToZygote / FromZygote
    agent   <-> worker        ToWorkerProcess / FromWorkerProcess
    agent   <-> keeper        ToKeeperProcess / FromKeeperProcess

`payload` is opaque here: it belongs to whoever plugged in the delegate, the keeper and the workers' entry.

What the coordinator must not miss travels as `Numbered` and is kept by the agent until it was acknowledged, so a coordinator
that died between receiving and recording it is told again: at least once, hence handlers must not mind a repetition.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from recovery.events import ProcessKind
from recovery.evidence import Evidence
from recovery.heartbeat import Beat


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages: immutable, strict, told apart by their class name."""


class WorkerSpec(Message, frozen=True, kw_only=True):
    """One worker to start."""

    rank: int
    entry: str
    """`module:function`, called with the WorkerContext."""
    args: dict[str, Any] = {}
    """For the entry function; the agent adds `port` when there is a rendezvous."""
    env: dict[str, str] = {}
    memfds: tuple[str, ...] = ()
    """Names of the agent's memory areas this worker gets."""


# coordinator -> agent


class Welcome(Message, frozen=True, kw_only=True):
    """The coordinator accepts this agent: the link is up."""

    epoch: int


class Ping(Message, frozen=True, kw_only=True):
    """The coordinator is alive: renews the lease."""


class Ack(Message, frozen=True, kw_only=True):
    """Everything up to and including this number is on record."""

    seq: int


class Prepare(Message, frozen=True, kw_only=True):
    """Have these memory areas (name -> bytes): missing ones are allocated, same-sized ones keep their content."""

    memfds: dict[str, int]


class Release(Message, frozen=True, kw_only=True):
    """Give these memory areas back."""

    names: tuple[str, ...]


class StartAttempt(Message, frozen=True, kw_only=True):
    """Start workers. `memo` is kept and handed to a coordinator that re-adopts them."""

    attempt: int
    epoch: int
    workers: tuple[WorkerSpec, ...]
    rendezvous: bool = False
    meet: tuple[str, int] | None = None
    """Where another node's agent listens for this attempt; None: this agent opens the port, and says where (Meeting)."""
    ports: tuple[int, int] | None = None
    """First and last of the ports of which rank 0 opens one itself; None: the agent opens one, and rank 0 gets the listener."""
    memo: bytes = b""


class StopWorkers(Message, frozen=True, kw_only=True):
    """SIGTERM, and SIGKILL after `grace_s`; a grace of 0 kills at once."""

    reason: str
    grace_s: float


class SetControl(Message, frozen=True, kw_only=True):
    """What every worker reads at its next step. Workers of attempts up to `leave` finish their step, save and leave."""

    stop: bool
    save: int
    leave: int = -1


class ToKeeper(Message, frozen=True, kw_only=True):
    """For the keeper."""

    payload: bytes


class ToWorker(Message, frozen=True, kw_only=True):
    """For one worker."""

    rank: int
    payload: bytes


class CollectEvidence(Message, frozen=True, kw_only=True):
    """Gather what is known; `dump_stacks` first asks every living worker to write its stacks into its log."""

    id: int
    dump_stacks: bool = False


class Shutdown(Message, frozen=True, kw_only=True):
    """Stop everything on this node and leave. `over`: the run is; otherwise a fresh agent may come and ask to be admitted."""

    reason: str
    over: bool = True


# agent -> coordinator


class WorkerInfo(Message, frozen=True, kw_only=True):
    """A worker of the current attempt as its agent knows it. `status` is None while it lives, or if nobody can know."""

    rank: int
    pid: int
    ended: bool = False
    status: int | None = None
    ours: bool = False
    t: float = 0.0


class AgentHello(Message, frozen=True, kw_only=True):
    """The agent's first frame: who it is and all it holds, so that a new coordinator can go on with it."""

    node: str
    pid: int
    boot_id: str
    started: int = 0
    """Of the process, in ticks since boot: a pid may be used again."""
    attempt: int = -1
    epoch: int = 0
    workers: tuple[WorkerInfo, ...] = ()
    memfds: dict[str, int] = {}
    memo: bytes = b""
    stop: bool = False
    save: int = 0
    leave: int = -1


class Prepared(Message, frozen=True, kw_only=True):
    """The memory areas are there. `kept` names those whose content survived."""

    names: tuple[str, ...]
    kept: tuple[str, ...]


class PrepareFailed(Message, frozen=True, kw_only=True):
    """They are not, and why, for the user to read."""

    reason: str


class Spawned(Message, frozen=True, kw_only=True):
    """A worker has said hello."""

    attempt: int
    rank: int
    pid: int


class Started(Message, frozen=True, kw_only=True):
    """A helper of the agent (keeper, zygote) runs; `restarted` after its predecessor's death."""

    kind: ProcessKind
    pid: int
    restarted: bool


class Exited(Message, frozen=True, kw_only=True):
    """A process ended. `status`: exit code, minus the signal, None if nobody can know; `ours`: by a signal of ours."""

    kind: ProcessKind
    pid: int
    status: int | None
    t: float
    rank: int | None = None
    attempt: int = -1
    ours: bool = False


class Signalled(Message, frozen=True, kw_only=True):
    """The agent sent a signal to a process of its own."""

    kind: ProcessKind
    pid: int
    signal: int
    reason: str
    t: float
    rank: int | None = None
    attempt: int = -1


class Meeting(Message, frozen=True, kw_only=True):
    """The port on which the ranks of an attempt meet is open, at this address of the node of rank 0."""

    attempt: int
    host: str
    port: int


class Failing(Message, frozen=True, kw_only=True):
    """A worker ran into an exception and is about to exit."""

    rank: int
    attempt: int
    error: str


class FromWorker(Message, frozen=True, kw_only=True):
    """From a worker's entry function."""

    rank: int
    attempt: int
    payload: bytes


class FromKeeper(Message, frozen=True, kw_only=True):
    """From the keeper."""

    payload: bytes


class EvidenceCollected(Message, frozen=True, kw_only=True):
    """Answer to CollectEvidence."""

    id: int
    evidence: Evidence


class Pong(Message, frozen=True, kw_only=True):
    """The agent is alive, and hears us: answer to Ping."""


class Heartbeats(Message, frozen=True, kw_only=True):
    """The progress page, about once a second."""

    beats: tuple[Beat, ...]


class Refused(Message, frozen=True, kw_only=True):
    """The agent cannot carry out a command: a protocol error of the coordinator, or no room, and why."""

    reason: str


Lasting = Exited | Signalled | Failing | FromWorker | FromKeeper | Spawned | Started | Meeting | Refused
"""What the coordinator must not miss."""


class Numbered(Message, frozen=True, kw_only=True):
    """A message that is kept until it is acknowledged."""

    seq: int
    message: Lasting


# clients


class ClientRequest(Message, frozen=True, kw_only=True):
    """`ftrain status|save|stop` from another terminal."""

    kind: str
    args: dict[str, Any] = {}


class ClientReply(Message, frozen=True, kw_only=True):
    """The answer; `error` in words if it is not `ok`."""

    ok: bool
    data: dict[str, Any] = {}
    error: str = ""


# agent <-> zygote


class Fork(Message, frozen=True, kw_only=True):
    """Fork a worker. Its descriptors come with the frame, named in order by `fd_names`."""

    attempt: int
    epoch: int
    rank: int
    index: int
    """Record of the heartbeat page that this worker writes."""
    entry: str
    args: dict[str, Any]
    env: dict[str, str]
    fd_names: tuple[str, ...]
    agent_pid: int
    error_file: str
    batch: int = 1
    """How many requests come in a row, this one the first of them or further on."""


class ZygoteReady(Message, frozen=True, kw_only=True):
    """Everything is imported, one thread is running: forks are cheap and safe from now on."""

    pid: int
    seconds: float


class Forked(Message, frozen=True, kw_only=True):
    """The worker exists, and is being adopted by the agent."""

    attempt: int
    rank: int
    pid: int


class ForkFailed(Message, frozen=True, kw_only=True):
    """The kernel refused (memory, number of processes)."""

    attempt: int
    rank: int
    reason: str


# agent <-> worker, agent <-> keeper


class WorkerHello(Message, frozen=True, kw_only=True):
    """The worker is adopted, will die with the agent, and enters its function now. `rings`: it rings the bell whenever its
    socket should be read, so that nobody has to listen to it."""

    pid: int
    rings: bool = False


class Payload(Message, frozen=True, kw_only=True):
    """Opaque, from or to a worker's entry function or the keeper."""

    payload: bytes


class WorkerToKeeper(Message, frozen=True, kw_only=True):
    """From a worker, for the keeper of its node."""

    payload: bytes


class WorkerFailing(Message, frozen=True, kw_only=True):
    """An exception left the entry function; the error file is written."""

    error: str


class KeeperMemfds(Message, frozen=True, kw_only=True):
    """Memory areas, by name and size, with their descriptors attached: all at the keeper's start, then each new one."""

    memfds: dict[str, int]


class KeeperForget(Message, frozen=True, kw_only=True):
    """These memory areas are being given back."""

    names: tuple[str, ...]


class ToKeeperFromWorker(Message, frozen=True, kw_only=True):
    """What a worker sent to the keeper."""

    rank: int
    attempt: int
    payload: bytes


AttemptCommand = Prepare | Release | StartAttempt | StopWorkers | CollectEvidence | Shutdown
ToAgent = Welcome | Ping | Ack | AttemptCommand | SetControl | ToKeeper | ToWorker
ToCoordinator = AgentHello | Numbered | Prepared | PrepareFailed | EvidenceCollected | Pong | Heartbeats | ClientRequest
FromCoordinatorToClient = ClientReply
ToZygote = Fork
FromZygote = ZygoteReady | Forked | ForkFailed
ToWorkerProcess = Payload
FromWorkerProcess = WorkerHello | Payload | WorkerToKeeper | WorkerFailing
ToKeeperProcess = KeeperMemfds | KeeperForget | Payload | ToKeeperFromWorker
FromKeeperProcess = Payload
