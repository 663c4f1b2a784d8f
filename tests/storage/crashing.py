"""A process that dies at every possible point, and a store with a clock of ours."""

from collections.abc import Callable, Iterator
from typing import Literal

from storage.memory import MemoryStore
from storage.objects import Bytes, ObjectInfo, ObjectStore
from storage.testing import Crash, CrashingStore


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


def crash_everywhere(before: ClockStore, act: Callable[[ObjectStore], object]) -> list[ClockStore]:
    """What is left when `act` dies before or after each of its operations, and at last where it does not.

    After an operation that itself failed (an object that is rightly missing) there is no dying.
    """
    left, whole = [], before.copy()
    counting = CrashingStore(whole)
    act(counting)
    moments: tuple[Literal["before", "after"], ...] = ("before", "after")
    for at in range(len(counting.operations)):
        for when in moments:
            store = before.copy()
            try:
                act(CrashingStore(store, at=at, when=when))
            except Crash:
                left.append(store)
            else:
                assert when == "after", f"it survived operation {at}: {counting.operations[at]}"
    return [*left, whole]
