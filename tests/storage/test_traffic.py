"""One cap and one rate for everything a process sends and fetches."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import traffic as module
from storage.errors import ExpiredCredentials, StorageError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.objects import ByteRange
from storage.retry import QUICK, RetryingStore
from storage.testing import InterceptingStore
from storage.traffic import Traffic, configure, traffic


def test_requests_wait_until_they_fit_and_the_first_always_passes() -> None:
    cap = Traffic(in_flight_bytes=10)
    with cap.hold(100):  # larger than the cap, but alone
        pass
    inside, leave = threading.Barrier(3), threading.Event()

    def request(nbytes: int) -> None:
        with cap.hold(nbytes):
            inside.wait(10)
            leave.wait(10)

    passed = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            pool.submit(request, 5)
        inside.wait(10)
        late = pool.submit(lambda: [passed.set() for _ in [0] if cap.hold(1).__enter__() is None])
        assert not passed.wait(0.05), "ten of ten bytes are on their way"
        leave.set()
        late.result(10)
    assert passed.is_set()
    assert cap.most_held == 100


def test_uploads_keep_to_the_rate() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    paced = Traffic(upload_bytes_per_s=100.0, clock=lambda: now[0], sleep=sleep)
    assert list(paced.paced([b"x" * 50, b"y" * 100, b"z" * 10])) == [b"x" * 50, b"y" * 100, b"z" * 10]
    assert slept == [0.5, 1.0]
    assert sum(slept) == pytest.approx(150 / 100)


def test_without_a_limit_nothing_waits_and_a_list_stays_a_list() -> None:
    blocks = [b"x"]
    assert Traffic(sleep=lambda s: pytest.fail("slept")).paced(blocks) is blocks


def test_saves_and_loads_of_one_process_share_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a read and whole objects of a write, over two stores, by many threads."""
    monkeypatch.setattr(module, "traffic", traffic)
    before = traffic.in_flight_bytes
    held, lock, most = [0], threading.Lock(), [0]

    class Watching(InterceptingStore):
        def around(self, operation, key, call):  # type: ignore[no-untyped-def]
            size = 1000
            with lock:
                held[0] += size
                most[0] = max(most[0], held[0])
            try:
                return call()
            finally:
                with lock:
                    held[0] -= size

    stores = [RetryingStore(Watching(MemoryStore()), QUICK, piece_bytes=1000) for _ in range(2)]
    configure(in_flight_bytes=2000)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: stores[i % 2].put(f"k{i}", bytes(1000)), range(40)))
            list(pool.map(lambda i: stores[i % 2].get_ranges(f"k{i}", [ByteRange(0, 1000)]), range(40)))
    finally:
        configure(in_flight_bytes=before)
    assert 1000 <= most[0] <= 2000
    with pytest.raises(ValueError, match="at least 1"):
        configure(in_flight_bytes=0)


def test_a_local_stream_keeps_to_the_rate(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    seen = list[int]()
    monkeypatch.setattr(traffic, "upload_bytes_per_s", 1.0)
    monkeypatch.setattr(traffic, "pace", seen.append)
    LocalStore(tmp_path).put_stream("k", [b"abc", b"de"])
    assert seen == [3, 2]


class ExpiringStore(InterceptingStore):
    """Refuses with expired credentials until they have been refreshed `needed` times."""

    needed, refreshed = 1, 0

    def refresh_credentials(self) -> None:
        self.refreshed += 1

    def around(self, operation, key, call):  # type: ignore[no-untyped-def]
        if self.refreshed < self.needed:
            raise ExpiredCredentials("expired", key)
        return call()


def test_expired_credentials_are_refreshed_once_and_then_it_stops() -> None:
    inner = ExpiringStore(MemoryStore())
    store = RetryingStore(inner, QUICK, sleep=lambda s: None)
    store.put("k", b"v")
    assert (inner.refreshed, store.stats.num_retries["ExpiredCredentials"]) == (1, 1)
    inner.needed = 10
    with pytest.raises(StorageError, match="expired"):
        store.get("k")
    assert inner.refreshed == 2
