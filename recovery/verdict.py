"""What interrupted a run, as the ledger keeps it: part of the vocabulary of `recovery.events`, which has these names too."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

Where = Literal["log", "kernel", "scheduler", "exit"]
Action = Literal["restart", "restart_exclude_node", "restart_after_wait", "roll_back", "stop_for_human", "finish"]

OWN_WORDS = "supervisor: "
"""Begins what the supervisor itself has seen, among the scheduler's lines: so the table of signatures knows it. People need not
be told."""


def own_words(where: str, text: str) -> str:
    """What the supervisor itself has seen, without the prefix; empty where somebody else speaks."""
    return text.removeprefix(OWN_WORDS) if where == "scheduler" and text.startswith(OWN_WORDS) else ""


class EvidenceLine(Struct, frozen=True, kw_only=True):
    """One line a verdict rests on. `line` counts from 0 within its source; for `exit` it is the rank."""

    where: Where
    line: int
    text: str


class Verdict(Struct, frozen=True, kw_only=True):
    """What interrupted the run, and why we think so. `action` is the default policy's at a first occurrence."""

    class_: str = field(name="class")
    component: str
    planned: bool = False
    first_failing_rank: int | None = None
    retryable: bool = True
    action: Action = "restart"
    confidence: float = 0.0
    reason: str = ""
    evidence: tuple[EvidenceLine, ...] = ()
    node: str = ""
    signature: str = ""  # name of the deciding signature: the fingerprint by which recurrence is recognised
