"""The proof that two runs ended in the same state: digests recomputed from what lies in storage; where the layout changed on
the way, what can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from ftrain.compose.stores import opened_run
from recovery.events import AttemptStarted, Event, Ready, steps_of
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


def seam_proofs(told: Sequence[Event]) -> list[bool]:
    """For each attempt under another layout than the one before: whether its state was proved by digests."""
    layouts: dict[int, tuple[str, str]] = {}
    before, found = "", []
    for event in told:
        if isinstance(event, AttemptStarted):
            layouts[event.attempt], before = (before, event.layout), event.layout
        elif isinstance(event, Ready) and (pair := layouts.pop(event.attempt, ("", ""))) and pair[0] not in ("", pair[1]):
            found.append(event.proof.startswith("digests") or event.source == "init")
    return found


def first_seam(told: Sequence[Event]) -> int:
    """The step whose state was the first to be loaded under another layout; 0 if there was none."""
    before = ""
    for event in told:
        if isinstance(event, AttemptStarted):
            if before not in ("", event.layout):
                return event.restored_step
            before = event.layout
    return 0


def same_training(ours: Sequence[Event], theirs: Sequence[Event], step: int, seam: int) -> bool:
    """Whether all steps up to `step` saw as many tokens, and those up to `seam` had the same loss, bit for bit. After it sums
    are made in another order, and training amplifies the difference: only the state at the seam can be compared, by digests.
    """
    one, two = ({it.step: it for event in told for it in steps_of(event) if it.step <= step} for told in (ours, theirs))
    same = all(one[it].loss == two[it].loss for it in one.keys() & two.keys() if it <= seam)
    return same and one.keys() == two.keys() and all(one[it].tokens == two[it].tokens for it in one)
