"""A run that is left without its last save: what it takes along to storage, and what it says of the rest."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftrain.checkpoint.messages import PeerCopied, Ready, SnapshotTaken, StoreSnapshot, encode
from ftrain.compose.delegate import RunDelegate
from recovery.delegate import Saved
from recovery.places import Place
from recovery.state import RunState
from tests.delegates import run_delegate

PLACES = Place(node="n1", slot=0), Place(node="n2", slot=0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunDelegate, list[Any]]]:
    """A run on two nodes that began at 0 and has a whole snapshot of step 12, which is also copied. Nothing is in storage."""
    delegate, sent = run_delegate(tmp_path)
    delegate._links = types.SimpleNamespace(to_keeper=sent.append, places=lambda: PLACES)  # type: ignore[assignment]
    delegate._copies.started(["n1", "n2"])
    for rank in range(2):
        ready = Ready(step=0, source="init", rank=rank)
        delegate.on_worker(rank, 0, encode(ready))
    for rank in range(2):
        delegate.on_worker(rank, 0, encode(SnapshotTaken(step=12, rank=rank, upload=False)))
    delegate._done = 14
    for rank in range(2):
        copied = PeerCopied(epoch=1, attempt=0, step=12, rank=rank, world=2, nbytes=5, seconds=0.1, buddy="n1")
        delegate.on_keeper(encode(copied))
    sent.clear()
    yield delegate, sent
    delegate.close()


def asked(sent: list[Any]) -> list[StoreSnapshot]:
    """What the keepers were asked to store."""
    found = (msgspec.msgpack.decode(payload) for payload in sent)
    return [msgspec.convert(told, StoreSnapshot) for told in found if told["type"] == "store-snapshot"]


def test_what_memory_holds_is_stored(run: tuple[RunDelegate, list[Any]]) -> None:
    delegate, sent = run
    delegate.leaving(keep=True)
    assert asked(sent) == [StoreSnapshot(attempt=0, step=12)]
    assert not delegate._debts.before(0)
    assert delegate._debts.open
    assert delegate.saved() == Saved(step=None, held=12, done=14)


def test_what_will_be_stored_is_known_before(run: tuple[RunDelegate, list[Any]]) -> None:
    delegate, _ = run
    assert (delegate.will_store(True), delegate.will_store(False)) == (12, 0)
    delegate.leaving(keep=True)
    assert delegate.will_store(False) == 12, "it is on its way"


def test_when_a_node_is_lost_the_copies_of_its_share_are_stored(run: tuple[RunDelegate, list[Any]]) -> None:
    delegate, sent = run
    delegate.on_agent_lost()
    delegate._links = types.SimpleNamespace(to_keeper=sent.append, places=lambda: PLACES[:1])  # type: ignore[assignment]
    delegate.leaving(keep=True)
    assert asked(sent) == [StoreSnapshot(attempt=0, step=12, copies_of=[1])]
    assert delegate._debts.open


def test_what_nobody_has_any_more_is_missed(run: tuple[RunDelegate, list[Any]]) -> None:
    delegate, sent = run
    delegate.on_agent_lost()
    delegate._copies.forget()
    delegate.leaving(keep=True)
    assert asked(sent) == []
    assert delegate.saved() == Saved(step=None, held=12, done=14)


@pytest.mark.parametrize(("takes_over", "saved"), [(True, Saved(held=12, done=14)), (False, Saved())])
def test_what_an_earlier_coordinator_left_in_memory_counts_for_the_one_that_takes_over(
    tmp_path: Path, takes_over: bool, saved: Saved
) -> None:
    delegate, _ = run_delegate(tmp_path)
    delegate._takes_over = takes_over  # by `begin`
    delegate.recall(RunState(attempt=3, step=14, snapshot_step=12))
    assert delegate.saved() == saved
    delegate.close()


def test_what_is_no_part_of_the_history_is_neither_stored_nor_missed(run: tuple[RunDelegate, list[Any]]) -> None:
    delegate, sent = run
    delegate._doubts.read_otherwise(0, 10)
    delegate.leaving(keep=True)
    assert asked(sent) == []
    assert delegate.saved().held == 0
