"""A run that goes on from an older state than storage is owed: that debt will not be paid, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

from ftrain.checkpoint.messages import PackStored, Ready, Settled, SnapshotTaken, encode
from recovery.events import CheckpointFailed
from storage.manifest import PackInfo, PackManifest
from tests.delegates import run_delegate

OWED, OLDER = 12, 9


def test_what_is_owed_of_steps_after_the_one_that_the_run_goes_on_from_is_let_go(tmp_path: Path) -> None:
    delegate, sent = run_delegate(tmp_path)
    for step in (OLDER, OWED):
        for rank in range(2):
            delegate.on_worker(rank, 0, encode(SnapshotTaken(rank=rank, step=step, upload=True)))
    told = [
        event
        for rank in range(2)
        for event in delegate.on_worker(rank, 1, encode(Ready(rank=rank, step=OLDER, source="memory")))
    ]
    (failed,) = [event for event in told if isinstance(event, CheckpointFailed)]
    assert (failed.attempt, failed.step, failed.reason) == (0, OWED, f"the run goes on from step {OLDER}")
    assert sent == [encode(Settled(attempt=0, step=OWED))]
    assert delegate._debts.open, "the step itself is still owed"
    late = PackStored(
        epoch=0,
        attempt=0,
        step=OWED,
        rank=0,
        world=2,
        manifest=PackManifest(pack=PackInfo(name="pack", nbytes=0), arrays=[], parts=[], digests={}),
        progress={},
        seconds=0.0,
    )
    assert delegate.on_keeper(encode(late)) == []
    assert sent[1:] == [encode(Settled(attempt=0, step=OWED))], "a pack that was on its way meanwhile is no part of a commit"
    delegate.close()
