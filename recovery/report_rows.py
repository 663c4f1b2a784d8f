"""The rows of a report: what it says, apart from how that is found out (`recovery.report`) and how it is shown."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from recovery.events import EvidenceLine

FORMULA = "effective time = step time of the steps in the final history / time since the first launch"


class AttemptRow(Struct, kw_only=True):
    """One attempt. `start_s`: from its start until all ranks were ready, None if they never were."""

    attempt: int
    t: float
    layout: str
    ranks: int
    source: str
    restored_step: int | None
    """None: a script has not told it."""
    phase: int = 0
    proof: str = ""
    """What showed that the state it began with is the one that was saved."""
    start_s: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    steps: int = 0
    steps_lost: int = 0
    ended_by: str = ""


class LayoutRow(Struct, frozen=True, kw_only=True):
    """A decision to cut the ranks in another way. `tokens_per_s`: predicted, over that of the layout before."""

    t: float
    was: str
    layout: str
    reason: str
    costs: str
    tokens_per_s: float | None


class PhaseRow(Struct, frozen=True, kw_only=True):
    """A change-over to another phase of the training, after update `step`."""

    t: float
    phase: int
    phases: int
    step: int
    from_tokens: int
    layout: str
    changes: tuple[dict[str, Any], ...]


class InterruptionRow(Struct, kw_only=True):
    """One interruption. `down_s`: from its first sign until all ranks were ready again, None if they never were."""

    verdict_id: str
    t: float
    attempt: int
    class_: str = msgspec.field(name="class")
    component: str
    planned: bool
    first_failing_rank: int | None
    node: str
    confidence: float
    reason: str
    evidence: tuple[EvidenceLine, ...]
    action: str = ""
    decision: str = ""
    wait_s: float = 0.0
    steps_lost: int = 0
    down_s: float | None = None
    absent_s: float = 0.0
    """Meanwhile, and not in `down_s`: nobody had started the run."""
    relabelled_from: str = ""


class CauseRow(Struct, frozen=True, kw_only=True):
    """One row of the causes table: how often, and which share of all unplanned (or all planned) interruptions."""

    component: str
    class_: str = msgspec.field(name="class")
    planned: bool
    count: int
    share: float


class CheckpointRows(Struct, kw_only=True):
    """What was saved to storage, and what was not."""

    committed: int = 0
    newest_step: int | None = None
    nbytes: int = 0
    seconds: float = 0.0
    retries: int = 0
    tiers: dict[str, int] = {}
    """Checkpoints in other places as well: local tier, mirror."""
    notices: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    passed_over: list[dict[str, Any]] = []


class SkipRow(Struct, frozen=True, kw_only=True):
    """A range of updates whose data are passed over, by a decision after this attempt."""

    t: float
    attempt: int
    first: int
    last: int


class MissingRow(Struct, frozen=True, kw_only=True):
    """Segments of the ledger that are missing: nothing is recorded of the time between."""

    segments: tuple[str, ...]
    since: float | None
    until: float | None
    """None: nothing is told after them."""
    text: str


class Report(Struct, frozen=True, kw_only=True):
    """Everything the report says. All times in seconds."""

    run_id: str
    outcome: str
    outcome_reason: str
    phase: str
    started_t: float
    wall_s: float
    step: int
    steps_finished: int
    steps_lost: int
    at_least: bool
    """Whether there may have been more steps, finished and lost: not every one was told."""
    tokens: int
    """Read in all finished steps."""
    tokens_again: int
    """Those of lost steps among them, which were read again."""
    loss: float | None
    eval_loss: float | None
    effective_time: float
    formula: str
    buckets: dict[str, float]
    attempts: list[AttemptRow]
    interruptions: list[InterruptionRow]
    causes: list[CauseRow]
    mtbf_s: float | None
    """Mean time between unplanned interruptions: (wall time - absent and unrecorded time) / how many there were."""
    mtbf_low_s: float
    mtbf_high_s: float | None
    checkpoints: CheckpointRows
    tokens_per_s_by_hour: dict[int, float]  # hour of the day, UTC
    layouts: list[LayoutRow] = []
    phases: list[PhaseRow] = []
    skips: list[SkipRow] = []
    missing: list[MissingRow] = []
    """With any, whatever is counted is at least so much."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for a JSON writer."""
        plain: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        return plain
