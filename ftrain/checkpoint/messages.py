"""What worker, keeper and coordinator tell each other about checkpoints. The supervisor relays these without looking inside."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from storage.manifest import PackManifest


class SnapshotReady(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Worker to keeper: a slot is complete; seal it, and store it if an upload is wanted (the slot's header says so)."""

    slot: str


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag="settled"):
    """Coordinator to keeper: this step is committed, or given up; its slots may be filled again."""

    attempt: int
    step: int


class StoreSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="store-snapshot"):
    """Coordinator to all keepers: put this snapshot into storage, as the run is being left, or as there is room now.

    `copies_of`: ranks whose nodes are lost; whoever has the copies of theirs stores those.
    """

    attempt: int
    step: int
    copies_of: list[int] = []


class Resend(msgspec.Struct, frozen=True, kw_only=True, tag="resend"):
    """Coordinator to keeper: a new coordinator is here; say again what is stored and not settled, then what is owed."""


class PackStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Keeper to coordinator: one rank's pack is in storage."""

    epoch: int
    attempt: int
    step: int
    rank: int
    world: int
    manifest: PackManifest
    progress: dict[str, Any]
    seconds: float
    tier: str = "storage"  # or local
    retries: int = 0  # requests that had to be sent again, since the last message


class PackFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Keeper to coordinator: one rank's pack could not be stored; nothing of it is left behind."""

    epoch: int
    attempt: int
    step: int
    rank: int
    world: int
    reason: str
    tier: str = "storage"
    no_space: bool = False  # storage had no room for it


class Buddies(msgspec.Struct, frozen=True, kw_only=True, tag="buddies"):
    """Coordinator to all keepers: each node's snapshots are copied to the next node of the ring (fewer than two: nowhere)."""

    ring: list[str]


class KeepSnapshots(msgspec.Struct, frozen=True, kw_only=True, tag="keep"):
    """Coordinator to all keepers: (attempt, step) that is whole on all buddies and must stay, and of the one to be copied now.

    `forget_after`: copies of later steps are no part of the history any more.
    """

    keep: tuple[int, int] | None
    copy: tuple[int, int] | None = None
    forget_after: int | None = None


class PeerCopied(msgspec.Struct, frozen=True, kw_only=True, tag="copied"):
    """Keeper to coordinator: a rank's snapshot is in the memory of another node too, its crcs checked there."""

    epoch: int
    attempt: int
    step: int
    rank: int
    world: int
    nbytes: int
    seconds: float
    buddy: str


class CopyFailed(msgspec.Struct, frozen=True, kw_only=True, tag="copy-failed"):
    """Keeper of `node` to coordinator: it is not, and the attempt at this step is over."""

    attempt: int
    step: int
    rank: int
    node: str
    reason: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Worker to coordinator: state is there, the first step is about to begin."""

    rank: int
    step: int
    source: str  # init, memory, peer, local or storage
    passed_over: list[tuple[int, str]] = []
    proof: str = ""  # what was compared: digests or crcs
    begun: list[tuple[int, int]] = []  # of each phase that has begun: the updates before its first one, sequences read in it


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Rank 0 to coordinator: one optimizer step; times in unix seconds."""

    step: int
    t_begin: float
    t_end: float
    blocked_s: float
    evaluate_s: float
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    applied: bool
    eval_loss: float | None = None
    sequences: int = 0


class RankMemory(NamedTuple):
    """A rank's memory in bytes, as `ftrain.device.Memory` has it."""

    rank: int
    stage: int  # its pipeline rank
    used: int
    reserved: int
    peak: int


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, tag="times"):
    """Rank 0 to coordinator, about a step later: where the seconds of a step went, and the memory of the ranks.

    The buckets are those of `ftrain.train.times`; of each rank they add up to the step.
    """

    step: int
    mean: dict[str, float]  # seconds, over the ranks
    worst: dict[str, tuple[int, float]]  # of each bucket, the rank with the most of it
    memory: list[RankMemory]
    sent: dict[str, float] = {}  # bytes that the busiest rank sent along each axis; fully_shard's own are not counted
    stages: list[dict[str, float]] = []  # of each pipeline rank, the mean over its ranks; empty without a pipeline
    actions: dict[str, list[float]] = {}  # of rank 0's pipeline: kind -> mean seconds on each virtual stage
    device: str = ""  # as it calls itself
    dtype: str = ""  # of the activations


class Traced(msgspec.Struct, frozen=True, kw_only=True, tag="traced"):
    """Rank 0 to coordinator: a profiler window is over; the ranks' files are in this folder."""

    first: int
    last: int
    folder: str


class SnapshotTaken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """Worker to coordinator: this rank's copy of a step is complete in memory."""

    rank: int
    step: int
    upload: bool


class SaveSkipped(msgspec.Struct, frozen=True, kw_only=True, tag="skipped"):
    """Rank 0 to coordinator: the policy let a due save go (or calls that a failure), and why."""

    step: int
    reason: str
    failed: bool = False


class Doubt(msgspec.Struct, frozen=True, kw_only=True, tag="doubt"):
    """Rank 0 to coordinator: a result that does not make sense. `onset`: the run must go back to before this step, and this
    attempt ends; None: it was repeated and makes sense now.
    """

    step: int
    reason: str
    onset: int | None = None
    rank: int | None = None  # who computed something else
    corruption: bool = False  # the repetition did not agree: it is the machine


class Final(msgspec.Struct, frozen=True, kw_only=True, tag="final"):
    """Rank 0 to coordinator: the loop has ended; the snapshot of this step is on its way to storage."""

    step: int
    outcome: str  # finished, stopped, or phase: another one is to follow
    begun: list[tuple[int, int]] = []  # as of Ready, with that one


class Share(NamedTuple):
    """One rank's part of a snapshot, and under which epoch it is stored."""

    epoch: int
    attempt: int
    step: int
    rank: int
    world: int


class Owed(msgspec.Struct, frozen=True, kw_only=True, tag="owed"):
    """Keeper to coordinator, answering Resend: each share here that storage is owed.

    `node`: the keeper's, where there are several, each of which holds shares of its own ranks.
    """

    shares: list[Share]
    node: str = ""


Answer = PackStored | PackFailed
KeeperMessage = Answer | Owed | PeerCopied | CopyFailed
KeeperRequest = Settled | Resend | StoreSnapshot | Buddies | KeepSnapshots
WorkerMessage = Ready | StepDone | StepTimes | Traced | SnapshotTaken | SaveSkipped | Doubt | Final
encode = msgspec.msgpack.Encoder().encode
decode_keeper = msgspec.msgpack.Decoder(KeeperMessage).decode
decode_request = msgspec.msgpack.Decoder(KeeperRequest).decode
decode_worker = msgspec.msgpack.Decoder(WorkerMessage).decode
decode_snapshot = msgspec.msgpack.Decoder(SnapshotReady).decode
