"""How a retry differs: more evidence first, then not from memory, then an older checkpoint; never less than there is."""

from __future__ import annotations

import pytest

from ftrain.compose.retries import Start, retry
from recovery.policy import Change
from storage.catalog import CheckpointInfo, CheckpointState

DIFFERENTLY: tuple[Change, ...] = ("more_evidence", "from_storage", "older_checkpoint")


def infos() -> list[CheckpointInfo]:
    states = {3: CheckpointState.VALID, 6: CheckpointState.VALID, 9: CheckpointState.DAMAGED, 12: CheckpointState.VALID}
    return [CheckpointInfo(step=step, state=state, reason="") for step, state in states.items()]


@pytest.mark.parametrize(
    ("changes", "newest", "own", "expected"),
    [
        (0, 12, True, Start(step=12)),
        (1, 12, True, Start(step=12, evidence=True)),
        (2, 12, True, Start(step=12, nearer=False, evidence=True)),
        (3, 12, True, Start(step=6, nearer=False, evidence=True)),  # 9 is damaged
        (3, 3, True, Start(step=3, nearer=False, evidence=True)),  # there is none older
        (3, 12, False, Start(step=12, nearer=False, evidence=True)),  # another run's checkpoint: there is no other
        (3, None, True, Start(step=None, evidence=True)),  # storage holds nothing: memory is all there is
    ],
)
def test_the_start_of_a_retry(changes: int, newest: int | None, own: bool, expected: Start) -> None:
    assert retry(DIFFERENTLY[:changes], infos, newest, own=own) == expected
