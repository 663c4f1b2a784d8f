"""A process that dies: a store whose k-th change raises, before or after it took effect; and a store with a clock of ours."""

from collections.abc import Callable, Iterator

from storage.memory import MemoryStore
from storage.objects import Bytes, ObjectInfo, ObjectStore
from storage.wrapper import WrappingStore


class Died(BaseException):
    """Not an Exception: no handler of ours may survive it."""


class DyingStore(WrappingStore):
    """Raises Died at change number `at` (from 0), and at every later one. Reading changes nothing and is not counted."""

    def __init__(self, inner: ObjectStore, at: int, *, after: bool) -> None:
        super().__init__(inner)
        self.at, self.after, self.changes = at, after, 0

    def put(self, key: str, data: Bytes) -> None:
        self._change(lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        won: list[bool] = []
        self._change(lambda: won.append(self.inner.create(key, data)))
        return won[0]

    def delete(self, key: str) -> None:
        self._change(lambda: self.inner.delete(key))

    def _change(self, act: Callable[[], object]) -> None:
        number, self.changes = self.changes, self.changes + 1
        if number > self.at or (number == self.at and not self.after):
            raise Died
        act()
        if number == self.at:
            raise Died


class ClockStore(MemoryStore):
    """Objects carry the time of a clock that the test moves."""

    def __init__(self, now: float = 1000.0) -> None:
        super().__init__()
        self.now = now
        self._times: dict[str, float] = {}

    def put(self, key: str, data: Bytes) -> None:
        super().put(key, data)
        self._times[key] = self.now

    def create(self, key: str, data: bytes) -> bool:
        won = super().create(key, data)
        if won:
            self._times[key] = self.now
        return won

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter([ObjectInfo(i.key, i.size, self._times[i.key]) for i in super().list(prefix)])

    def snapshot(self) -> dict[str, bytes]:
        return {info.key: self.get(info.key) for info in self.list()}

    def copy(self) -> "ClockStore":
        twin = ClockStore(self.now)
        for key, data in self.snapshot().items():
            twin.put(key, data)
            twin._times[key] = self._times[key]
        return twin
