"""Digests recomputed from what lies in storage: the proof that two runs ended in the same state."""

from __future__ import annotations

from ftrain.compose.stores import opened_run
from storage.errors import Damaged


def stored_digests(url: str, step: int | None = None) -> tuple[int, dict[str, str]]:
    """(step, digest of every array as 16 hex digits) of a run's checkpoint, from the bytes in storage, not from the
    manifest.
    """
    with opened_run(url) as run:
        checkpoint = run.open(step)
        report = checkpoint.verify()
        if not report.ok:
            raise Damaged(f"step {checkpoint.step} of {url}: {report.problems[0].reason}")
        return checkpoint.step, {name: f"{digest:016x}" for name, digest in sorted(report.digests.items())}
