"""The promises of `ObjectStore`, as tests that every backend inherits (needs pytest).

A backend's test module subclasses `ObjectStoreContract` and overrides `make_store`; a backend that cannot keep a promise
declares it in its `Capabilities`, never by leaving out a test. The races use real threads: the promise is about them.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.errors import Damaged, FormatError, ObjectMissing
from storage.objects import ByteRange, Bytes, ObjectStore, check_store

__all__ = ["ObjectStoreContract"]

BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "a/../b",
    "./a",
    "a\\b",
    "a\x00b",
    "a\nb",
    "x" * 2000,
    ".ftrain-tmp-1",
    "a/.ftrain-tmp-1",
]


class ObjectStoreContract:
    """Inherit, and say in `make_store` how an empty store is made."""

    race_threads = 16
    race_rounds = 40

    def make_store(self, tmp_path: Path) -> ObjectStore:
        """An empty store of the backend under test."""
        pytest.fail(f"{type(self).__name__} must say how its store is made: override make_store")

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ObjectStore]:
        """An empty store, closed after the test."""
        store = self.make_store(tmp_path)
        yield store
        store.close()

    def keys(self, store: ObjectStore, prefix: str = "") -> list[str]:
        """All keys of a listing."""
        return [info.key for info in store.list(prefix)]

    @pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000], ids=["empty", "one", "megabyte"])
    def test_what_is_put_is_got(self, store: ObjectStore, data: bytes) -> None:
        store.put("a/b/c.bin", data)
        assert store.get("a/b/c.bin") == data
        assert store.size("a/b/c.bin") == len(data)
        assert store.exists("a/b/c.bin")

    def test_put_takes_any_buffer(self, store: ObjectStore) -> None:
        store.put("view", memoryview(bytearray(b"0123456789"))[2:5])
        store.put("array", bytearray(b"abc"))
        assert (store.get("view"), store.get("array")) == (b"234", b"abc")

    def test_put_replaces(self, store: ObjectStore) -> None:
        store.put("k", b"long first value")
        store.put("k", b"second")
        assert store.get("k") == b"second"

    def test_odd_names(self, store: ObjectStore) -> None:
        names = [
            "a b",
            "weights/layers.7.attention.wq",
            "a=1,b+2@3",
            "50%",
            "50%25",
            "x?y#z",
            "[a]*",
            "ü/ñ",
            "a:b",
            "~",
            "...",
            "a&b",
        ]
        for name in names:
            store.put(name, name.encode())
        assert [store.get(name) for name in names] == [name.encode() for name in names]
        assert self.keys(store) == sorted(names)

    def test_get_refuses_what_is_too_large(self, store: ObjectStore) -> None:
        store.put("k", b"0123456789")
        assert store.get("k", max_bytes=10) == b"0123456789"
        with pytest.raises(FormatError, match="10 bytes"):
            store.get("k", max_bytes=9)

    def test_missing(self, store: ObjectStore) -> None:
        store.put("folder/there", b"x")
        for key in ("nothing", "folder", "folder/nothing", "folder/there/below"):
            assert not store.exists(key)
            for read in (store.get, store.size, lambda k: store.get_range(k, ByteRange(0, 1))):
                with pytest.raises(ObjectMissing) as caught:
                    read(key)
                assert caught.value.key.endswith(key)

    def test_ranges(self, store: ObjectStore) -> None:
        data = bytes(range(256)) * 64
        store.put("pack", data)
        rngs = [
            ByteRange(5, 9),
            ByteRange(0, len(data)),
            ByteRange(100, 100),
            ByteRange(len(data) - 1, len(data)),
            ByteRange(5, 9),
        ]
        assert store.get_ranges("pack", rngs) == [data[r.start : r.stop] for r in rngs]
        assert [store.get_range("pack", r) for r in rngs] == [data[r.start : r.stop] for r in rngs]
        assert store.get_ranges("pack", []) == []
        out = bytearray(50)
        store.get_into("pack", 7, memoryview(out)[10:40])
        assert out == bytes(10) + data[7:37] + bytes(10)

    @pytest.mark.parametrize("rng", [ByteRange(0, 11), ByteRange(8, 20), ByteRange(10, 12), ByteRange(50, 60)], ids=str)
    def test_a_range_past_the_end_is_damage(self, store: ObjectStore, rng: ByteRange) -> None:
        store.put("pack", b"0123456789")
        with pytest.raises(Damaged, match="truncated"):
            store.get_range("pack", rng)
        with pytest.raises(Damaged, match="truncated"):
            store.get_ranges("pack", [ByteRange(0, 5), rng])
        with pytest.raises(Damaged, match="truncated"):
            store.get_into("pack", rng.start, memoryview(bytearray(len(rng))))

    def test_put_stream(self, store: ObjectStore) -> None:
        blocks: list[Bytes] = [b"ab", b"", bytearray(b"cde"), memoryview(b"0123456")[3:]]
        assert store.put_stream("deep/er/pack", iter(blocks)) == 9
        assert store.get("deep/er/pack") == b"abcde3456"
        assert store.put_stream("deep/er/pack", iter([])) == 0
        assert store.get("deep/er/pack") == b""

    def test_put_stream_reads_a_block_before_it_asks_for_the_next(self, store: ObjectStore) -> None:
        buffer = bytearray(2**20)

        def blocks() -> Iterator[memoryview]:
            for number in range(20):
                buffer[:] = bytes([number]) * len(buffer)
                yield memoryview(buffer)

        assert store.put_stream("pack", blocks()) == 20 * 2**20
        assert store.get("pack") == b"".join(bytes([number]) * 2**20 for number in range(20))

    @pytest.mark.parametrize("num_blocks", [0, 1, 30])
    def test_a_failed_stream_leaves_nothing(self, store: ObjectStore, num_blocks: int) -> None:
        class SourceError(Exception):
            pass

        def blocks() -> Iterator[bytes]:
            for _ in range(num_blocks):
                yield bytes(2**20)
            raise SourceError

        store.put("old", b"old")
        for key in ("old", "new/pack"):
            with pytest.raises(SourceError):
                store.put_stream(key, blocks())
        assert self.keys(store) == ["old"]
        assert store.get("old") == b"old"
        assert store.sweep_unfinished(older_than_s=-60) == 0

    def test_create_says_who_won(self, store: ObjectStore) -> None:
        assert store.create("commits/e1", b"first") is True
        assert store.create("commits/e1", b"second") is False
        assert store.get("commits/e1") == b"first"
        store.delete("commits/e1")
        assert store.create("commits/e1", b"third") is True
        store.put("put", b"")
        assert store.create("put", b"x") is False

    def test_create_race(self, store: ObjectStore) -> None:
        barrier = threading.Barrier(self.race_threads)

        def racer(number: int) -> list[bool]:
            won = []
            for turn in range(self.race_rounds):
                barrier.wait()
                won.append(store.create(f"race/{turn:03d}", b"writer %d" % number))
            return won

        with ThreadPoolExecutor(self.race_threads) as pool:
            results = list(pool.map(racer, range(self.race_threads)))
        for turn, won in enumerate(zip(*results, strict=True)):
            assert won.count(True) == 1
            assert store.get(f"race/{turn:03d}") == b"writer %d" % won.index(True)

    def test_delete(self, store: ObjectStore) -> None:
        store.put("a/b", b"x")
        store.put("a/c", b"x")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("a/b/c")
        store.delete("never/was")
        assert self.keys(store) == ["a/c"]

    def test_list(self, store: ObjectStore) -> None:
        names = ["a-b", "a/b", "a.b", "a/c/d", "a0", "b", "step-1/x", "step-10/x", "step-2/x"]
        for name in reversed(names):
            store.put(name, name.encode())
        assert self.keys(store) == sorted(names)
        assert self.keys(store, "a/") == ["a/b", "a/c/d"]
        assert self.keys(store, "a") == sorted(name for name in names if name.startswith("a"))
        assert self.keys(store, "step-1") == ["step-1/x", "step-10/x"]
        assert self.keys(store, "step-1/") == ["step-1/x"]
        assert self.keys(store, "a/c/d") == ["a/c/d"]
        assert self.keys(store, "nothing/here") == []
        assert [info.size for info in store.list("step-1")] == [8, 9]

    def test_an_empty_store_lists_nothing(self, store: ObjectStore) -> None:
        assert self.keys(store) == []
        assert not store.exists("x")

    @pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: repr(key[:16]))
    def test_bad_keys(self, store: ObjectStore, key: str) -> None:
        calls: list[Callable[[str], object]] = [
            store.get,
            store.size,
            store.exists,
            store.delete,
            store.url_of,
            lambda k: store.put(k, b""),
        ]
        calls += [
            lambda k: store.put_stream(k, []),
            lambda k: store.create(k, b""),
            lambda k: store.get_range(k, ByteRange(0, 0)),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"key|reserved"):
                call(key)
        assert self.keys(store) == []

    def test_child(self, store: ObjectStore) -> None:
        child = store.child("runs/one").child("x")
        child.put("k", b"v")
        assert child.create("k", b"w") is False
        assert store.get("runs/one/x/k") == b"v"
        store.put("runs/one/xy", b"")
        assert self.keys(child) == ["k"]
        assert child.url == f"{store.url}/runs/one/x"
        assert child.url_of("k") == store.url_of("runs/one/x/k")
        with pytest.raises(ValueError, match="key"):
            child.get("../k")
        with pytest.raises(ObjectMissing):
            child.get("runs/one/x/k")

    def test_check_store_leaves_nothing(self, store: ObjectStore) -> None:
        check_store(store)
        assert self.keys(store) == []

    def test_readers_see_whole_objects_while_they_are_replaced(self, store: ObjectStore) -> None:
        versions = [bytes([number]) * 100_000 for number in range(8)]
        store.put("k", versions[0])
        stop = threading.Event()

        def reader() -> set[bytes]:
            seen = set()
            while not stop.is_set():
                seen.add(store.get("k"))
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(reader) for _ in range(2)]
            try:
                for data in versions * 3:
                    store.put("k", data)
            finally:
                stop.set()
            assert set().union(*(future.result() for future in readers)) <= set(versions)
