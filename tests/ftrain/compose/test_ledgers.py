"""The view of a live ledger: everything once, in order, through closed and abandoned segments; cheap while nothing happens."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ftrain.compose.ledgers import LedgerTail
from recovery.events import Evaluated, Event
from recovery.ledger import Ledger


def event(step: int) -> Event:
    return Evaluated(t=time.time(), attempt=0, step=step, loss=1.0)


def steps(tail: LedgerTail) -> list[int]:
    return [found.step for found in tail.new() if isinstance(found, Evaluated)]


def test_a_tail_follows_a_ledger_through_its_segments(tmp_path: Path) -> None:
    tail = LedgerTail(tmp_path, from_start=True)
    assert steps(tail) == []
    ledger = Ledger(tmp_path, epoch=1)
    ledger.append(event(1))
    assert steps(tail) == [1]
    ledger.append(event(2))
    assert steps(tail) == [2]
    ledger.append(event(3))
    ledger.rotate()
    ledger.append(event(4))
    assert steps(tail) == [3, 4]
    ledger.append(event(5))
    assert steps(tail) == [5]
    ledger.rotate()
    assert steps(tail) == []
    ledger.append(event(6))
    ledger.close()
    with Ledger(tmp_path, epoch=2) as successor:
        successor.append(event(7))
        assert steps(tail) == [6, 7]
    assert steps(tail) == []


def test_an_abandoned_segment_is_read_to_its_end(tmp_path: Path) -> None:
    tail = LedgerTail(tmp_path, from_start=True)
    ledger = Ledger(tmp_path, epoch=1)
    ledger.append(event(1))
    assert steps(tail) == [1]
    open_segment = next(tmp_path.glob("*.open"))
    with open_segment.open("ab") as file:
        file.write(b'{"type": "torn')
    assert steps(tail) == []
    ledger.close()
    with Ledger(tmp_path, epoch=2) as successor:
        successor.append(event(2))
        assert steps(tail) == [2]


def test_a_look_at_a_ledger_that_has_not_grown_lists_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = LedgerTail(tmp_path, from_start=True)
    with Ledger(tmp_path, epoch=1) as ledger:
        ledger.append(event(1))
        assert steps(tail) == [1]
        with monkeypatch.context() as patch:
            patch.setattr(LedgerTail, "_segments", lambda self: pytest.fail("listed"))
            assert steps(tail) == []
            ledger.append(event(2))
            assert steps(tail) == [2]


def test_a_segment_that_is_closed_while_one_looks_is_read_in_that_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = LedgerTail._segments
    with Ledger(tmp_path, epoch=1) as ledger:
        ledger.append(event(1))

        def closed_behind_the_list(tail: LedgerTail) -> dict[str, Path]:
            found = listed(tail)
            ledger.rotate()
            return found

        monkeypatch.setattr(LedgerTail, "_segments", closed_behind_the_list)
        tail = LedgerTail(tmp_path, from_start=True)
        assert steps(tail) == [1]
        assert steps(tail) == []
