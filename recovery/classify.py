"""Stub, replaced within the hour: exit statuses only."""

from __future__ import annotations

from recovery.events import EvidenceLine, Verdict
from recovery.evidence import Evidence


def classify(case: Evidence) -> Verdict:
    """The verdict on one interruption."""
    for rank, status in case.exit.items():
        if status not in (0, None) and rank not in case.ours:
            text = f"rank {rank} ended with {status}"
            where = EvidenceLine(where="exit", line=int(rank) if rank.isdigit() else -1, text=text)
            first = int(rank) if rank.isdigit() else None
            return Verdict(
                class_="unknown", component="unknown", first_failing_rank=first, confidence=0.3, reason=text, evidence=(where,)
            )
    return Verdict(class_="unknown", component="unknown", confidence=0.1, reason="no process ended with an error")
