"""The ledger against what can happen to its writer: death, a torn line, a full disk, storage that is away."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from recovery import events as ev
from recovery.ledger import Ledger, LedgerBusyError, decode_segment, read_all, segment_name


class FakeSink:
    """A sink in memory that fails its first `failures` puts and can say when something arrived."""

    def __init__(self, failures: int = 0):
        self.stored: dict[str, bytes] = {}
        self.failures = failures
        self.arrived = threading.Event()

    def put(self, name: str, data: bytes) -> None:
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("storage is away")
        self.stored[name] = data
        self.arrived.set()

    def get(self, name: str) -> bytes:
        return self.stored[name]

    def names(self) -> Iterable[str]:
        return list(self.stored)


def steps(first: int, count: int) -> list[ev.Event]:
    return [
        ev.StepFinished(t=float(s), attempt=0, step=s, t_begin=s - 1.0, t_end=float(s)) for s in range(first, first + count)
    ]


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    written = steps(1, 50)
    with Ledger(tmp_path, epoch=1, segment_bytes=1000) as ledger:
        for event in written:
            ledger.append(event)
        assert read_all(tmp_path) == written  # while it is being written
    assert read_all(tmp_path) == written
    names = sorted(p.name for p in tmp_path.glob("e*"))
    assert len(names) > 5
    assert names == [segment_name(1, n) for n in range(len(names))]


def test_a_ledger_in_storage_is_read_by_several_requests_at_a_time(tmp_path: Path) -> None:
    """Thousands of segments, one after the other, would take minutes."""
    sink, together = FakeSink(), threading.Barrier(4)
    with Ledger(tmp_path, sink, segment_bytes=100) as ledger:
        for event in steps(1, 8):
            ledger.append(event)
    assert len(sink.stored) == 8
    get = sink.get

    def waits_for_others(name: str) -> bytes:
        together.wait(30)
        return get(name)

    sink.get = waits_for_others  # type: ignore[method-assign]
    assert read_all(None, sink) == steps(1, 8)


def test_decisions_are_synced_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    ledger = Ledger(tmp_path)
    ledger.append(steps(1, 1)[0])
    assert synced == []
    ledger.append(ev.Decided(t=1.0, action="restart", reason="because"))
    assert len(synced) == 1
    ledger.close()


def test_the_next_coordinator_closes_what_a_dead_one_left(tmp_path: Path) -> None:
    written = steps(1, 3)
    dead = Ledger(tmp_path, epoch=1)
    for event in written:
        dead.append(event)
    os.close(dead._lock)  # what the kernel does at its death
    (open_segment,) = tmp_path.glob("*.open")
    with open_segment.open("ab") as file:
        file.write(b'{"event":"StepFinished","t":4.0,"att')
    assert read_all(tmp_path) == written

    more = steps(4, 2)
    with Ledger(tmp_path, epoch=2) as ledger:
        assert list(tmp_path.glob("*.open")) == []
        for event in more:
            ledger.append(event)
    assert read_all(tmp_path) == written + more
    assert (tmp_path / segment_name(1, 0)).read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("cut", range(1, 40))
def test_any_torn_tail_costs_only_the_torn_line(cut: int) -> None:
    written = steps(1, 3)
    data = b"".join(map(ev.encode_line, written))
    assert list(decode_segment("s", data[:-cut])) == written[:2]


def test_a_tail_of_zeros_is_torn_too() -> None:
    written = steps(1, 2)
    data = b"".join(map(ev.encode_line, written))
    assert list(decode_segment("s", data + bytes(512))) == written
    assert list(decode_segment("s", data + b'{"eve' + bytes(512))) == written


def test_damage_in_the_middle_is_an_error_that_names_the_line() -> None:
    lines = [ev.encode_line(event) for event in steps(1, 3)]
    lines[1] = lines[1].replace(b"step", b"stop", 1)
    with pytest.raises(ev.LedgerFormatError, match="seg, line 2"):
        list(decode_segment("seg", b"".join(lines)))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Ledger(tmp_path), pytest.raises(LedgerBusyError, match="another live process"):
        Ledger(tmp_path)
    Ledger(tmp_path).close()


def test_same_epoch_goes_on_with_the_next_number(tmp_path: Path) -> None:
    for first in (1, 2, 3):
        with Ledger(tmp_path, epoch=5) as ledger:
            ledger.append(steps(first, 1)[0])
    assert [p.name for p in sorted(tmp_path.glob("e*"))] == [segment_name(5, n) for n in range(3)]
    assert read_all(tmp_path) == steps(1, 3)


def test_closed_segments_go_to_the_sink_which_may_be_away(tmp_path: Path) -> None:
    sink = FakeSink(failures=3)
    ledger = Ledger(tmp_path, sink, epoch=1, segment_bytes=300, retry_s=0.001)
    for event in steps(1, 20):
        ledger.append(event)
    assert ledger.close(timeout_s=30.0)
    assert ledger.sink_error == ""
    assert sorted(sink.stored) == sorted(p.name for p in tmp_path.glob("e*"))
    assert read_all(None, sink) == steps(1, 20)


def test_what_could_not_be_uploaded_is_uploaded_by_the_next(tmp_path: Path) -> None:
    away = FakeSink(failures=10**9)
    ledger = Ledger(tmp_path, away, epoch=1)
    ledger.append(steps(1, 1)[0])
    assert not ledger.close(timeout_s=0.0)
    assert ledger.pending == (segment_name(1, 0),)

    back = FakeSink()
    next_one = Ledger(tmp_path, back, epoch=2)
    assert next_one.close(timeout_s=30.0)
    assert read_all(None, back) == steps(1, 1)


def test_folder_and_sink_together_hold_each_event_once(tmp_path: Path) -> None:
    sink = FakeSink()
    first, second = tmp_path / "old-node", tmp_path / "new-node"
    with Ledger(first, sink, epoch=1) as ledger:
        ledger.append(steps(1, 1)[0])
    with Ledger(second, sink, epoch=2) as ledger:
        ledger.append(steps(2, 1)[0])
        ledger.rotate()
        ledger.append(steps(3, 1)[0])
        assert read_all(second, sink) == steps(1, 3)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    ledger.append(steps(1, 1)[0])
    real_write = os.write

    def half_then_full(fd: int, data: memoryview) -> int:
        if len(data) > 20:
            return real_write(fd, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("recovery.ledger.os.write", lambda fd, data: half_then_full(fd, data[:30]))
    with pytest.raises(OSError, match="No space left"):
        ledger.append(steps(2, 1)[0])
    monkeypatch.setattr("recovery.ledger.os.write", real_write)
    ledger.append(steps(3, 1)[0])
    ledger.close()
    assert read_all(tmp_path) == [*steps(1, 1), *steps(3, 1)]
