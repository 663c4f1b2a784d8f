"""What can happen to a run, as the ledger keeps it.

The ledger is the only memory that survives every process, so its vocabulary is fixed here, apart from those who write it
(coordinator) and those who read it (state, report, policy). Each event is one tagged msgspec Struct and one JSON line: a person
with `jq` can read a ledger after the software is gone. Fields may be added with a default; a name never changes its meaning.

Conventions, for all events:
- `t` is unix time in seconds, the moment the thing happened as seen by whoever reports it.
- `attempt` is the number of the attempt the event belongs to, -1 for events of the run as a whole.
- `step` counts finished updates: the first update is step 1, a state "of step s" contains s updates, 0 is the initial state.
- A number that is not finite is null (JSON knows no NaN): `loss: null` is a loss that was not a number.

    Event
      run        RunStarted  ConfigChanged  EpochTaken  StopRequested  RunEnded
      attempt    AttemptStarted  Ready  StepFinished  StepsFinished  Evaluated  AttemptEnded
      places     PlaceLost  PlaceReturned  LayoutChosen  PhaseBegan
      state      SnapshotCompleted  CheckpointCommitted  CheckpointFailed  CheckpointPassedOver  TierCommitted  StorageNotice
      trouble    ProcessDied  SignalSent  Suspected  Straggler  InterruptionClassified  Decided  Relabelled
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from recovery.verdict import Action as Action
from recovery.verdict import EvidenceLine as EvidenceLine
from recovery.verdict import Verdict as Verdict
from recovery.verdict import Where as Where

ProcessKind = Literal["worker", "keeper", "zygote", "agent", "coordinator"]
Outcome = Literal["finished", "stopped", "failed", "given_up"]


class LedgerFormatError(ValueError):
    """A line that is not an event of ours: cut short, damaged, or written by a newer version."""


class Event(Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    """Base of all events."""

    t: float
    attempt: int = -1


class RunStarted(Event, frozen=True, kw_only=True):
    """A coordinator took up the run. `readopted`: workers of `attempt` keep stepping. `origin`: "URL@STEP" of `--from`."""

    run_id: str
    config_fingerprint: str = ""
    config: dict[str, Any] = {}
    layout: str = ""
    owner: dict[str, Any] = {}
    resumed_from_step: int | None = None
    epoch: int = 0
    readopted: bool = False
    origin: str = ""
    after: str | None = None  # the ledger's newest segment at that time (empty: it is the first; None: not told)


class ConfigChanged(Event, frozen=True, kw_only=True):
    """The run goes on with other values than before; each change has path, old, new and kind."""

    changes: tuple[dict[str, Any], ...]


class EpochTaken(Event, frozen=True, kw_only=True):
    """The right to commit was taken, starting from a committed step (None: from the very beginning)."""

    epoch: int
    starts_from: int | None = None


class AttemptStarted(Event, frozen=True, kw_only=True):
    """Workers were asked for. `restored_step` is the plan; `Ready.step` is what came of it."""

    layout: str = ""
    ranks: int
    source: Literal["init", "memory", "peer", "local", "storage"]
    restored_step: int = 0
    pids: dict[int, int] = {}
    nodes: tuple[str, ...] = ()


class Ready(Event, frozen=True, kw_only=True):
    """All ranks hold the state of `step`; step + 1 is about to begin. `source`: whence; `proof`: what was compared.
    `assumed`: a script has told step + 1 first, and nothing of its state: `step` is the highest that can be, and not known."""

    step: int
    assumed: bool = False
    source: str = ""
    proof: str = ""
    begun: tuple[tuple[int, int], ...] = ()  # of each phase that has begun: updates before its first one, sequences read in it


class PlaceLost(Event, frozen=True, kw_only=True):
    """A place for a rank is taken away (`slot` -1: the whole node), until a unix time, or until a person gives it back."""

    node: str
    slot: int
    reason: str
    until: float | None = None


class PlaceReturned(Event, frozen=True, kw_only=True):
    """A place may hold a rank again."""

    node: str
    slot: int
    reason: str


class LayoutChosen(Event, frozen=True, kw_only=True):
    """The ranks are cut in another way from the next attempt on: what changes (path, old, new), why, and what it costs.

    `tokens_per_s`: predicted, over that of the layout before. The batches and the order of the data stay as they are.
    """

    ranks: int
    layout: str
    was: str
    reason: str
    costs: str = ""
    tokens_per_s: float | None = None
    changes: tuple[dict[str, Any], ...] = ()


class PhaseBegan(Event, frozen=True, kw_only=True):
    """The training goes on with other values from the next attempt on (windows, batches, layout, ...), after update `step`.

    `phase` counts from 0; `from_tokens`: where it was to begin, in tokens of the run; `changes`: path, old and new of each.
    """

    phase: int
    phases: int
    step: int
    from_tokens: int = 0
    layout: str = ""
    changes: tuple[dict[str, Any], ...] = ()


class StepRecord(Struct, frozen=True, kw_only=True):
    """One finished update. `blocked_s` (waiting for a checkpoint) and `evaluate_s` lie inside [t_begin, t_end)."""

    step: int
    t_begin: float
    t_end: float
    blocked_s: float = 0.0
    evaluate_s: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    sequences: int = 0
    lr: float | None = None
    applied: bool = True  # False: not finite on some rank, the update was skipped on all


class StepFinished(Event, frozen=True, kw_only=True):
    """One update was finished, as rank 0 reports it. Same fields as StepRecord."""

    step: int
    t_begin: float
    t_end: float
    blocked_s: float = 0.0
    evaluate_s: float = 0.0
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    sequences: int = 0
    lr: float | None = None
    applied: bool = True


class StepsFinished(Event, frozen=True, kw_only=True):
    """Several updates of one attempt, written together to keep the ledger small."""

    steps: tuple[StepRecord, ...]


class SnapshotCompleted(Event, frozen=True, kw_only=True):
    """The memory tier holds the state of `step` on all ranks."""

    step: int


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """The state of `step` is in storage, sealed by a commit."""

    step: int
    epoch: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    retries: int = 0  # requests that storage had to be asked again, over all writers


class TierCommitted(Event, frozen=True, kw_only=True):
    """The state of `step` is in another place as well: the local tier, the mirror, or the memory of other nodes (peer)."""

    tier: Literal["local", "mirror", "peer"]
    step: int
    nbytes: int = 0
    seconds: float = 0.0


class StorageNotice(Event, frozen=True, kw_only=True):
    """Something about files or ports that a person should know and that stops nothing: what it is about, and a sentence."""

    topic: Literal["create", "local", "mirror", "peer", "stale", "owner", "profile", "room", "metrics", "places", "back"]
    text: str
    step: int | None = None


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A save to storage was given up; training went on."""

    step: int
    reason: str


class CheckpointPassedOver(Event, frozen=True, kw_only=True):
    """A committed checkpoint was not used for a restore, and why."""

    step: int
    reason: str


class Evaluated(Event, frozen=True, kw_only=True):
    """Loss on the held-out slice."""

    step: int
    loss: float | None


class ProcessDied(Event, frozen=True, kw_only=True):
    """A process of the run ended. `status` is its exit code or minus its signal; `ours`: by a signal that we sent."""

    kind: ProcessKind
    pid: int
    status: int | None
    rank: int | None = None
    node: str = ""
    ours: bool = False


class SignalSent(Event, frozen=True, kw_only=True):
    """We signalled one of our own processes: its death by that signal is no evidence."""

    pid: int
    kind: ProcessKind
    signal: int
    reason: str
    rank: int | None = None


class Suspected(Event, frozen=True, kw_only=True):
    """Something lives but makes no progress (`since`: when that was last seen), or its results are doubted."""

    reason: str
    since: float
    rank: int | None = None
    node: str = ""
    onset: int | None = None  # first step whose result is in doubt
    until: int | None = None  # and the last


class Straggler(Event, frozen=True, kw_only=True):
    """A rank computes so many times as long as the median rank, and has for a while. Nothing is done about it."""

    rank: int
    ratio: float
    reason: str
    node: str = ""


class InterruptionClassified(Event, frozen=True, kw_only=True):
    """The verdict on an interruption. `verdict_id` is unique within the run."""

    verdict_id: str
    verdict: Verdict


class Decided(Event, frozen=True, kw_only=True):
    """What will be done, with its reason, on disk before it is done."""

    action: Action
    reason: str
    wait_s: float = 0.0
    verdict_id: str = ""
    differently: tuple[str, ...] = ()  # how the next attempt differs from the one that failed (recovery.policy.Change)
    skip: tuple[int, int] | None = None  # first and last update whose data are passed over from now on


class AttemptEnded(Event, frozen=True, kw_only=True):
    """No worker of the attempt is left. `step` is the last one that rank 0 finished."""

    step: int


class StopRequested(Event, frozen=True, kw_only=True):
    """Somebody asked for a stop at the next step boundary: a signal's name, `ftrain stop`, a time limit."""

    by: str


class RunEnded(Event, frozen=True, kw_only=True):
    """The coordinator leaves the run. `step` is the newest state that survives, None if that is not known."""

    outcome: Outcome
    step: int | None = None
    reason: str = ""


class Relabelled(Event, frozen=True, kw_only=True):
    """A person corrected a verdict. Appended, never overwritten: both stand in the ledger."""

    verdict_id: str
    class_: str = field(name="class")
    component: str = ""
    planned: bool = False
    by: str = ""
    reason: str = ""


AnyEvent = (
    RunStarted
    | ConfigChanged
    | EpochTaken
    | AttemptStarted
    | Ready
    | PlaceLost
    | PlaceReturned
    | LayoutChosen
    | PhaseBegan
    | StepFinished
    | StepsFinished
    | SnapshotCompleted
    | CheckpointCommitted
    | TierCommitted
    | StorageNotice
    | CheckpointFailed
    | CheckpointPassedOver
    | Evaluated
    | ProcessDied
    | SignalSent
    | Suspected
    | Straggler
    | InterruptionClassified
    | Decided
    | AttemptEnded
    | StopRequested
    | RunEnded
    | Relabelled
)

# What must be on disk before it takes effect: who may act, what is going to be done, and what was found out.
DECISIONS: tuple[type[Event], ...] = (
    RunStarted,
    ConfigChanged,
    EpochTaken,
    AttemptStarted,
    PlaceLost,
    PlaceReturned,
    LayoutChosen,
    PhaseBegan,
    Suspected,
    InterruptionClassified,
    Decided,
    CheckpointCommitted,
    StopRequested,
    RunEnded,
    Relabelled,
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def encode_line(event: Event) -> bytes:
    """The event as one JSON line, newline included."""
    return _encoder.encode(event) + b"\n"


def decode_line(line: bytes) -> AnyEvent:
    """The event of one line; LedgerFormatError if it is not one."""
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:  # ValidationError is one of these
        shown = line[:80].decode("utf-8", "replace")
        raise LedgerFormatError(f"not a ledger event: {error}; the line begins with {shown!r}") from error


def steps_of(event: Event) -> Iterator[StepRecord]:
    """The finished steps an event reports, in order; nothing for other events."""
    if isinstance(event, StepsFinished):
        yield from event.steps
    elif isinstance(event, StepFinished):
        yield msgspec.convert(event, StepRecord, from_attributes=True)
