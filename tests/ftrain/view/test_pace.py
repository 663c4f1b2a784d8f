"""The pace of a run by its sizes, and the proofs of its seams."""

from __future__ import annotations

from msgspec.structs import replace

from ftrain.view.pace import lines, pace
from ftrain.view.record import recorded
from recovery.events import Ready
from tests.ledgers import Story, config


def seams(*attempts: tuple[int, str]) -> list[str]:
    """What is said of a run whose attempts, of 4 steps each, had so many ranks and such proofs."""
    story = Story(config())
    for ranks, _ in attempts:
        story.start(ranks=ranks, layout=f"dp{ranks}", source="storage").steps(4)
    proofs = iter(attempts)
    events = [replace(event, proof=next(proofs)[1]) if isinstance(event, Ready) else event for event in story.events]
    return [line.rpartition("; ")[2] for line in lines(pace(recorded("runs/a", events))) if "from" in line or "seam" in line]


def test_each_seam_has_its_proof_also_where_the_size_is_one_that_there_was() -> None:
    assert seams((2, ""), (1, "digests x"), (1, "digests y"), (2, "digests z")) == [
        "from the beginning",
        "    attempt 3, of this size again, went on from step 12: digests z",
        "went on from step 4: digests x",
        "    attempt 2, of this size again, went on from step 8: digests y",
    ]


def test_of_many_seams_the_newest_are_told_and_the_rest_counted() -> None:
    story = [(2, ""), (1, "digests 1"), *((1, f"digests {n}") for n in range(2, 8))]
    told = seams(*story)
    assert told[1:] == [
        "went on from step 4: digests 1",
        "    3 more seams of this size: --json has their proofs",
        *(f"    attempt {n}, of this size again, went on from step {4 * n}: digests {n}" for n in (5, 6, 7)),
    ]
