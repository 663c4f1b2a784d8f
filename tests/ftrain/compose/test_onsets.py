"""An onset that the ledger knows holds until the run has gone back to before it, whichever exit came between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftrain.checkpoint.messages import Doubt, PackStored, Ready, Settled, SnapshotTaken, StoreSnapshot, encode
from ftrain.compose.delegate import RunDelegate
from recovery.delegate import Links
from recovery.events import AttemptStarted, CheckpointCommitted, Decided, EpochTaken, Event, RunEnded, StopRequested, Suspected
from recovery.state import fold
from storage.manifest import PackInfo, PackManifest
from storage.run import RunStore
from tests.delegates import run_delegate
from tests.storage.building import SPECS, random_values, save

ONSET = 20
DOUBT = Doubt(step=22, reason="loss spike", onset=ONSET)
KNOWN = (
    AttemptStarted(t=1.0, attempt=0, ranks=2, source="init"),
    Suspected(t=2.0, attempt=0, since=2.0, reason="loss spike", onset=ONSET, until=22),
)
STOPPED = (StopRequested(t=4.0, by="ftrain stop"), RunEnded(t=5.0, outcome="stopped"))


class Stand:
    """A delegate of a run that has stored steps 10, 20 and 30, and what it tells the keepers."""

    def __init__(self, folder: Path, *overrides: str, **progress: Any) -> None:
        """`progress`: what else the record of the newest one says."""
        self.delegate, self.sent = run_delegate(folder, *overrides)
        self.run: RunStore = self.delegate._run
        epoch = self.run.take_epoch(owner={})
        for step in (10, 20, 30):
            save(self.run, random_values(SPECS, step), step=step, epoch=epoch, **(progress if step == 30 else {}))
        none: Any = lambda *given: None  # noqa: E731
        links = Links(to_keeper=self.sent.append, to_worker=none, request_stop=none, request_save=none, wake=none)
        self.delegate.begin(links, resumed=False)

    def states(self) -> dict[int, str]:
        return {info.step: str(info.state) for info in self.run.checkpoints()}

    def gone_back(self) -> bool:
        """Whether it goes back before anything is started, once that is done."""
        self.delegate.ready(None)
        if self.delegate._going_back is None:
            return False
        self.delegate._going_back._thread.join(30)
        return self.delegate.ready(None)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path)
    yield made
    made.delegate.close()


@pytest.mark.parametrize(
    "since",
    [
        pytest.param((), id="a power cut before anything was decided"),
        pytest.param((Decided(t=3.0, attempt=0, action="roll_back", reason="spike"), *STOPPED), id="a stop in the back-off"),
        pytest.param((Decided(t=3.0, attempt=0, action="stop_for_human", reason="spike"), *STOPPED[1:]), id="given up"),
    ],
)
def test_a_start_goes_back_to_before_an_open_onset(stand: Stand, since: tuple[Event, ...]) -> None:
    stand.delegate.recall(fold([*KNOWN, *since]))
    assert stand.gone_back()
    assert stand.states() == {10: "valid", 20: "tainted", 30: "tainted"}
    stand.delegate._went_back()
    assert stand.delegate.status()["committed_step"] == 10
    assert stand.delegate.ready(None), "once"


def test_a_start_after_the_run_went_back_begins_with_the_newest(stand: Stand) -> None:
    stand.delegate.recall(fold([*KNOWN, AttemptStarted(t=6.0, attempt=1, ranks=2, source="storage", restored_step=10)]))
    assert not stand.gone_back()
    assert stand.states() == {10: "valid", 20: "valid", 30: "valid"}


def doubted(delegate: RunDelegate, *, first: int) -> None:
    """Snapshots of two ranks from a step on, and then the doubt."""
    for step in range(first, 23):
        for rank in range(2):
            delegate.on_worker(rank, 0, encode(SnapshotTaken(rank=rank, step=step, upload=True)))
    delegate.on_worker(0, 0, encode(DOUBT))


def test_a_stop_does_not_store_what_memory_has_from_after_the_onset(stand: Stand) -> None:
    stand.delegate._committed = 10
    doubted(stand.delegate, first=21)
    stand.delegate.leaving(keep=True)
    assert stand.sent == []


def test_a_stop_stores_what_memory_has_from_before_any_doubt(stand: Stand) -> None:
    stand.delegate._committed = 10
    for rank in range(2):
        stand.delegate.on_worker(rank, 0, encode(SnapshotTaken(rank=rank, step=19, upload=False)))
    stand.delegate.leaving(keep=True)
    assert stand.sent == [encode(StoreSnapshot(attempt=0, step=19))]


def test_what_is_on_its_way_from_after_the_onset_is_let_go_and_what_is_stored_is_tainted_at_once(stand: Stand) -> None:
    doubted(stand.delegate, first=21)
    pack = PackManifest(pack=PackInfo(name="pack", nbytes=0), arrays=[], parts=[], digests={})
    for rank in range(2):
        part = PackStored(epoch=1, attempt=0, step=21, rank=rank, world=2, manifest=pack, progress={}, seconds=0.0)
        stand.delegate.on_keeper(encode(part))
    assert stand.sent == [encode(Settled(attempt=0, step=21))] * 2
    assert stand.delegate._committer is not None
    stand.delegate._committer.close()  # what is queued for storage is done
    assert stand.states() == {10: "valid", 20: "tainted", 30: "tainted"}
    assert not [event for event in stand.delegate.tick(0.0) if isinstance(event, CheckpointCommitted)]


def test_what_the_workers_began_with_may_be_gone_from_storage_meanwhile(stand: Stand) -> None:
    """They hold it: the run goes on, in an epoch that starts from what there is before it."""
    delegate = stand.delegate
    delegate._planned = 30
    delegate._spare(30)
    told = [it for rank in range(2) for it in delegate.on_worker(rank, 1, encode(Ready(rank=rank, step=19, source="local")))]
    assert [event.starts_from for event in told if isinstance(event, EpochTaken)] == [10]
    assert delegate.status()["committed_step"] == 10
    assert delegate._committer is not None
    assert delegate._committer._spared is None


DECIDED = Decided(t=3.0, attempt=0, action="roll_back", reason="spike", skip=(15, 17))
ONCE, TWICE = [[15, 17, 24]], [[15, 17, 24], [15, 17, 24]]


@pytest.mark.parametrize(
    ("declared", "decided", "behind", "back"),
    [
        pytest.param(True, False, [], True, id="declared since"),
        pytest.param(True, False, ONCE, False, id="declared before"),
        pytest.param(False, True, ONCE, False, id="decided on and carried out"),
        pytest.param(False, True, [], True, id="decided on and not carried out"),
        pytest.param(True, True, ONCE, True, id="declared since, and equal to one that was decided on"),
        pytest.param(True, True, TWICE, False, id="both"),
    ],
)
def test_a_start_goes_back_to_before_data_that_its_state_has_not_passed_over(
    tmp_path: Path, declared: bool, decided: bool, behind: list[list[int]], back: bool
) -> None:
    """A range that is equal to another one passes over what follows it: both lie behind, or one of them is missed."""
    stand = Stand(tmp_path, *(["data.skip=[{first=15, last=17}]"] if declared else []), skipped=behind)
    stand.delegate.recall(fold([DECIDED] if decided else []))
    assert stand.gone_back() == back
    assert stand.states() == {10: "valid", 20: "tainted" if back else "valid", 30: "tainted" if back else "valid"}
    stand.delegate.close()
