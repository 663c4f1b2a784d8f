"""Stores that fail on purpose, for the tests of whatever is built on the seam, here and elsewhere.

The fakes are shipped, because a checkpoint library whose users cannot test their own crashes has to be believed. All of them
wrap a store that works: the failure is added at the seam, in one place, and the store below stays what it is. The promises of
the seam as tests are in `storage.contract`.

    CrashingStore    the process dies at operation k, before, during or after its effect
    CountingStore    how many requests and bytes
    SlowStore        each operation waits, for a time or for the test's permission
    LyingStore       gives back other bytes than it holds
    flip_bit, zero, truncate, swap    the same, done to the objects themselves
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, TypeAlias, TypeVar

from storage.objects import MAX_OBJECT_BYTES, ByteRange, Bytes, BytesList, ObjectInfo, ObjectStore, Upload, short_object
from storage.wrapper import WrappingStore

__all__ = [
    "CountingStore",
    "Crash",
    "CrashingStore",
    "InterceptingStore",
    "LyingStore",
    "SlowStore",
    "flip_bit",
    "swap",
    "truncate",
    "zero",
]

T = TypeVar("T")
Operations: TypeAlias = list[str]  # inside a store `list` is a method


class InterceptingStore(WrappingStore):
    """Every operation goes through `around`, which does nothing here."""

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        """Carry out `call`, the operation of this name on `key` (a prefix for `list`)."""
        return call()

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        return self.around("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        return self.around("get_range", key, lambda: self.inner.get_range(key, rng))

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        return self.around("get_ranges", key, lambda: self.inner.get_ranges(key, rngs))

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        self.around("get_into", key, lambda: self.inner.get_into(key, start, out))

    def put(self, key: str, data: Bytes) -> None:
        self.around("put", key, lambda: self.inner.put(key, data))

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        return self.around("put_stream", key, lambda: self.inner.put_stream(key, blocks))

    def create(self, key: str, data: bytes) -> bool:
        return self.around("create", key, lambda: self.inner.create(key, data))

    def size(self, key: str) -> int:
        return self.around("size", key, lambda: self.inner.size(key))

    def exists(self, key: str) -> bool:
        return self.around("exists", key, lambda: self.inner.exists(key))

    def delete(self, key: str) -> None:
        self.around("delete", key, lambda: self.inner.delete(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(self.around("list", prefix, lambda: tuple(self.inner.list(prefix))))

    def begin_upload(self, key: str) -> Upload | None:
        return self.around("begin_upload", key, lambda: self.inner.begin_upload(key))


class Crash(BaseException):
    """The process would be dead now. No `except Exception` may catch it, as none catches a SIGKILL."""


class CrashingStore(InterceptingStore):
    """Dies at operation number `at` (from 0), and is dead from then on.

    `when`: "before" its effect, "after" it, or "during" it (a stream that stops after its first block; else like "before").
    `at` None never dies; `operations` then tells how many there are to die at.
    """

    def __init__(
        self, inner: ObjectStore, *, at: int | None = None, when: Literal["before", "during", "after"] = "before"
    ) -> None:
        super().__init__(inner)
        self.operations: Operations = []
        self.crashed = False
        self._at = at
        self._when = when
        self._lock = threading.Lock()

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        dies = self._next(operation, key)
        if dies and self._when != "after":
            raise self._crash(operation, key)
        result = call()
        if dies:
            raise self._crash(operation, key)
        return result

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        if self._when != "during" or len(self.operations) != self._at:
            return super().put_stream(key, blocks)
        self._next("put_stream", key)
        return self.inner.put_stream(key, self._first_of(blocks, key))

    def _next(self, operation: str, key: str) -> bool:
        with self._lock:
            if self.crashed:
                raise Crash(f"{operation} of {key}: the process is dead")
            self.operations.append(f"{operation} {key}")
            return len(self.operations) - 1 == self._at

    def _crash(self, operation: str, key: str) -> Crash:
        self.crashed = True
        return Crash(f"died {self._when} operation {self._at}: {operation} of {key}")

    def _first_of(self, blocks: Iterable[Bytes], key: str) -> Iterator[Bytes]:
        yield from islice(blocks, 1)
        raise self._crash("put_stream", key)


class CountingStore(InterceptingStore):
    """Counts requests by the name of the operation, and the bytes that went each way."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.requests: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0
        self._lock = threading.Lock()

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        result = call()
        read = len(result) if isinstance(result, bytes) else 0
        if operation == "get_ranges" and isinstance(result, list):
            read = sum(map(len, result))
        with self._lock:
            self.requests[operation] += 1
            self.bytes_read += read
        return result

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        super().get_into(key, start, out)
        with self._lock:
            self.bytes_read += len(out)

    def put(self, key: str, data: Bytes) -> None:
        super().put(key, data)
        self._wrote(len(data))

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        size = super().put_stream(key, blocks)
        self._wrote(size)
        return size

    def create(self, key: str, data: bytes) -> bool:
        created = super().create(key, data)
        self._wrote(len(data))
        return created

    def _wrote(self, size: int) -> None:
        with self._lock:
            self.bytes_written += size


class SlowStore(InterceptingStore):
    """Each operation waits `latency_s` first, and until `gate` (if given) is set: a test opens it when it has seen enough."""

    def __init__(
        self,
        inner: ObjectStore,
        *,
        latency_s: float = 0.0,
        gate: threading.Event | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.waiting = threading.Semaphore(0)
        """Released once for each operation that has arrived at the gate."""
        self._latency_s = latency_s
        self._gate = gate
        self._sleep = sleep

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        self.waiting.release()
        if self._latency_s:
            self._sleep(self._latency_s)
        if self._gate is not None:
            self._gate.wait()
        return call()


class LyingStore(WrappingStore):
    """Reads see one flipped bit (`flipped`: key -> index of the bit) or a shorter object (`truncated`: key -> its size)."""

    def __init__(
        self, inner: ObjectStore, *, flipped: Mapping[str, int] | None = None, truncated: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(inner)
        self.flipped = dict(flipped or {})
        self.truncated = dict(truncated or {})

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        return self._lie(key, 0, self.inner.get(key, max_bytes=max_bytes)[: self.truncated.get(key)])

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        end = self.truncated.get(key, rng.stop)
        if rng.stop > end:
            raise short_object(key, rng, end - rng.start)
        return self._lie(key, rng.start, self.inner.get_range(key, rng))

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        return [self.get_range(key, rng) for rng in rngs]

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        out[:] = self.get_range(key, ByteRange(start, start + len(out)))

    def size(self, key: str) -> int:
        return min(self.inner.size(key), self.truncated.get(key, 2**63))

    def _lie(self, key: str, start: int, data: bytes) -> bytes:
        offset, bit = divmod(self.flipped.get(key, -1), 8)
        if not start <= offset < start + len(data):
            return data
        changed = bytearray(data)
        changed[offset - start] ^= 1 << bit
        return bytes(changed)


def flip_bit(store: ObjectStore, key: str, index: int) -> None:
    """Flip bit `index` (8 * byte + bit) of an object."""
    data = _whole(store, key)
    data[index // 8] ^= 1 << (index % 8)
    store.put(key, data)


def zero(store: ObjectStore, key: str, rng: ByteRange) -> None:
    """Overwrite a range of an object with zeros, as a lost disk block does."""
    data = _whole(store, key)
    data[rng.start : rng.stop] = bytes(len(data[rng.start : rng.stop]))
    store.put(key, data)


def truncate(store: ObjectStore, key: str, size: int) -> None:
    """Cut an object to its first `size` bytes."""
    store.put(key, _whole(store, key)[:size])


def swap(store: ObjectStore, first: str, second: str) -> None:
    """Exchange the contents of two objects."""
    data = _whole(store, first)
    store.put(first, _whole(store, second))
    store.put(second, data)


def _whole(store: ObjectStore, key: str) -> bytearray:
    return bytearray(store.get(key, max_bytes=2**40))
