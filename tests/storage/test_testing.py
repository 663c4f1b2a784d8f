"""The stores that fail on purpose fail exactly as they say."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.errors import Damaged
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.objects import ByteRange, ObjectStore
from storage.testing import CountingStore, Crash, CrashingStore, LyingStore, SlowStore, flip_bit, swap, truncate, zero


def scenario(store: ObjectStore) -> None:
    store.put("a", b"1")
    store.put_stream("b", iter([b"2", b"3"]))
    store.create("c", store.get("a"))
    store.delete("a")


def test_every_operation_can_be_died_at(tmp_path: Path) -> None:
    whole = CrashingStore(MemoryStore())
    scenario(whole)
    assert whole.operations == ["put a", "put_stream b", "get a", "create c", "delete a"]
    after = [["a"], ["a", "b"], ["a", "b"], ["a", "b", "c"], ["b", "c"]]
    for at in range(len(after)):
        for when in ("before", "during", "after"):
            inner = LocalStore(tmp_path / f"{at}-{when}")
            store = CrashingStore(inner, at=at, when=when)
            with pytest.raises(Crash, match=f"died {when} operation {at}"):
                scenario(store)
            expected = after[at] if when == "after" else [*[[]], *after][at]
            assert [info.key for info in inner.list()] == expected
            with pytest.raises(Crash, match="the process is dead"):
                store.get("b")


def test_a_crash_in_a_stream_comes_after_its_first_block() -> None:
    taken = []

    def blocks() -> Iterator[bytes]:
        for number in range(5):
            taken.append(number)
            yield b"x"

    with pytest.raises(Crash):
        CrashingStore(MemoryStore(), at=0, when="during").put_stream("k", blocks())
    assert taken == [0]


def test_counts() -> None:
    store = CountingStore(MemoryStore())
    store.put("a", b"12345")
    store.put_stream("b", iter([b"123", b"45"]))
    store.create("c", b"1")
    store.get("a")
    store.get_range("a", ByteRange(1, 3))
    store.get_ranges("a", [ByteRange(0, 1), ByteRange(2, 4)])
    store.get_into("a", 1, memoryview(bytearray(4)))
    store.child("d").exists("e")
    assert (store.bytes_written, store.bytes_read) == (11, 14)
    assert sum(store.requests.values()) == 8
    assert store.requests["get_ranges"] == 1


def test_a_gate_holds_operations_until_it_opens() -> None:
    gate = threading.Event()
    slept: list[float] = []
    memory = MemoryStore()
    store = SlowStore(memory, latency_s=2.5, gate=gate, sleep=slept.append)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(store.put, "k", b"v")
        store.waiting.acquire()
        assert not memory.exists("k")
        gate.set()
        future.result()
    assert memory.get("k") == b"v"
    assert slept == [2.5]


def test_lies() -> None:
    memory = MemoryStore()
    memory.put("k", bytes(10))
    store = LyingStore(memory, flipped={"k": 8 * 4 + 1})
    lie = bytes([0, 0, 0, 0, 2, 0, 0, 0, 0, 0])
    assert store.get("k") == lie
    assert store.get_ranges("k", [ByteRange(0, 4), ByteRange(4, 6)]) == [lie[:4], lie[4:6]]
    store = LyingStore(memory, truncated={"k": 6})
    assert (store.size("k"), store.get("k")) == (6, bytes(6))
    with pytest.raises(Damaged, match="ends at 6"):
        store.get_range("k", ByteRange(2, 7))
    assert memory.get("k") == bytes(10)


def test_damage_done_to_objects() -> None:
    store = MemoryStore()
    store.put("a", b"\xff" * 4)
    store.put("b", b"other")
    flip_bit(store, "a", 9)
    assert store.get("a") == b"\xff\xfd\xff\xff"
    zero(store, "a", ByteRange(2, 100))
    assert store.get("a") == b"\xff\xfd\x00\x00"
    truncate(store, "a", 1)
    swap(store, "a", "b")
    assert (store.get("a"), store.get("b")) == (b"other", b"\xff")
