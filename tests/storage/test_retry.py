"""Retries: what is ridden out, what is not, how long it waits, and that a lost answer is not taken for a lost race."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from storage.errors import AccessDenied, Damaged, ObjectMissing, StorageError, Throttled, Unavailable
from storage.memory import MemoryStore
from storage.multipart import PartShape
from storage.objects import ByteRange, Bytes, Capabilities, ObjectStore, Upload
from storage.perprocess import PerProcess
from storage.retry import PATIENT, QUICK, WATCHED, Backoff, RetryingStore, RetryPolicy
from storage.testing import CountingStore, InterceptingStore

T = TypeVar("T")
MIB = 2**20
POLICY = RetryPolicy(
    deadline_s=1000.0,
    throttled=Backoff(attempts=12, first_s=4.0, most_s=30.0),
    unavailable=Backoff(attempts=6, first_s=0.5, most_s=3.0),
)


class FailingStore(InterceptingStore):
    """Raises the errors of `before` (instead of the operation) and `after` (it happened, its answer is lost), one a call."""

    def __init__(
        self, inner: ObjectStore, *, before: list[Exception] | None = None, after: list[Exception] | None = None
    ) -> None:
        super().__init__(inner)
        self.before = before or []
        self.after = after or []
        self.num_calls = 0

    def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
        self.num_calls += 1
        if self.before:
            raise self.before.pop(0)
        result = call()
        if self.after:
            raise self.after.pop(0)
        return result


class PartsStore(MemoryStore):
    """A memory store that takes streams in parts, as S3 does, and loses every third answer."""

    capabilities = Capabilities(atomic_create=True, durable=False, local=False, parts=True)

    def __init__(self) -> None:
        super().__init__()
        self.open: set[str] = set()
        self.sizes: list[int] = []
        self.num_calls = 0
        self.lose_answers = True
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()

    def begin_upload(self, key: str) -> Upload:
        self.open.add(key)
        return MemoryUpload(self, key)

    def answer(self) -> None:
        with self.lock:
            self.num_calls += 1
            if self.lose_answers and self.num_calls % 3 == 0:
                raise Unavailable("connection reset")


class MemoryUpload(Upload):
    def __init__(self, store: PartsStore, key: str) -> None:
        self.store, self.key, self.parts = store, key, dict[int, bytes]()

    def put_part(self, number: int, data: Bytes) -> None:
        with self.store.lock:
            self.store.in_flight += 1
            self.store.most_in_flight = max(self.store.most_in_flight, self.store.in_flight)
        self.parts[number] = bytes(data)
        self.store.sizes.append(len(data))
        with self.store.lock:
            self.store.in_flight -= 1
        self.store.answer()

    def complete(self) -> None:
        self.store.open.discard(self.key)
        self.store.put(self.key, b"".join(data for _, data in sorted(self.parts.items())))
        self.store.answer()

    def abort(self) -> None:
        self.store.open.discard(self.key)


@pytest.fixture
def waits() -> list[float]:
    return []


def retrying(inner: ObjectStore, waits: list[float], policy: RetryPolicy = POLICY) -> RetryingStore:
    return RetryingStore(inner, policy, sleep=waits.append)


def test_what_passes_is_ridden_out_and_counted(waits: list[float]) -> None:
    inner = FailingStore(MemoryStore(), before=[Unavailable("reset"), Throttled("slow down"), Unavailable("timeout")])
    store = retrying(inner, waits)
    store.put("k", b"v")
    assert store.get("k") == b"v"
    assert store.stats.num_retries == {"Unavailable": 2, "Throttled": 1}
    assert store.stats.waited_s == pytest.approx(sum(waits))
    assert store.stats.last_error == "timeout"


@pytest.mark.parametrize(("error", "backoff"), [(Unavailable, POLICY.unavailable), (Throttled, POLICY.throttled)])
def test_waits_are_drawn_from_a_growing_interval(error: type[Unavailable], backoff: Backoff, waits: list[float]) -> None:
    random.seed(1)
    num_runs = 300
    for _ in range(num_runs):
        store = retrying(FailingStore(MemoryStore(), before=[error("x") for _ in range(100)]), waits)
        with pytest.raises(error, match=f"given up after {backoff.attempts} tries"):
            store.get("k")
    num_waits = backoff.attempts - 1
    assert len(waits) == num_runs * num_waits
    for number in range(num_waits):
        limit = min(backoff.most_s, backoff.first_s * 2**number)
        drawn = waits[number::num_waits]
        assert 0 <= min(drawn) < 0.1 * limit, "full jitter begins at 0"
        assert 0.9 * limit < max(drawn) <= limit
        assert sum(drawn) / num_runs == pytest.approx(limit / 2, rel=0.15)  # 4.5 sigma of a mean of 300


@pytest.mark.parametrize(
    "error", [AccessDenied("no"), ObjectMissing("none"), Damaged("bad"), StorageError("odd"), TypeError("bug")]
)
def test_what_does_not_pass_is_raised_at_once(error: Exception, waits: list[float]) -> None:
    inner = FailingStore(MemoryStore(), before=[error])
    with pytest.raises(type(error), match=str(error)):
        retrying(inner, waits).get("k")
    assert (inner.num_calls, waits) == (1, [])


def test_the_deadline_ends_the_tries(waits: list[float]) -> None:
    inner = FailingStore(MemoryStore(), before=[Unavailable("x") for _ in range(100)])
    policy = RetryPolicy(deadline_s=0.0, throttled=POLICY.throttled, unavailable=POLICY.unavailable)
    with pytest.raises(Unavailable):
        retrying(inner, waits, policy).get("k")
    assert inner.num_calls == 1


def test_the_patient_policy_lasts_for_minutes_and_the_quick_one_for_seconds() -> None:
    assert PATIENT.deadline_s >= 180
    for backoff in (PATIENT.throttled, PATIENT.unavailable):
        expected_s = sum(min(backoff.most_s, backoff.first_s * 2**number) / 2 for number in range(backoff.attempts - 1))
        assert expected_s >= 180, "the attempts last as long as the deadline"
    assert QUICK.deadline_s <= 10


def test_a_person_waits_for_minutes_only_once_the_store_has_answered(waits: list[float]) -> None:
    inner = FailingStore(MemoryStore(), before=[Unavailable("refused") for _ in range(9)])
    store = retrying(inner, waits, WATCHED)
    with pytest.raises(Unavailable, match=f"given up after {QUICK.unavailable.attempts} tries"):
        store.exists("k")
    inner.before = [ObjectMissing("none")]
    with pytest.raises(ObjectMissing):  # which is an answer
        store.get("k")
    inner.before = [Unavailable("reset") for _ in range(20)]
    assert not store.exists("k")
    assert WATCHED.deadline_s == PATIENT.deadline_s


def test_create_that_won_but_whose_answer_was_lost(waits: list[float]) -> None:
    store = retrying(FailingStore(MemoryStore(), after=[Unavailable("reset"), Unavailable("reset")]), waits)
    assert store.create("commit", b"mine") is True


def test_create_that_lost_while_its_answer_was_lost(waits: list[float]) -> None:
    memory = MemoryStore()
    memory.put("commit", b"theirs")
    assert retrying(FailingStore(memory, before=[Unavailable("reset")]), waits).create("commit", b"mine") is False
    assert retrying(FailingStore(memory, before=[Unavailable("reset")]), waits).create("commit", b"longer than theirs") is False
    assert memory.get("commit") == b"theirs"


def test_create_that_simply_lost_reads_nothing(waits: list[float]) -> None:
    memory = MemoryStore()
    memory.put("commit", b"same")
    inner = FailingStore(memory)
    assert retrying(inner, waits).create("commit", b"same") is False
    assert inner.num_calls == 1


def test_ranges_are_retried_one_by_one(waits: list[float]) -> None:
    """With 3 in 10 requests failing, 200 ranges would never all succeed at once (0.7 ** 200)."""
    data = random.Random(0).randbytes(20_000)
    memory = MemoryStore()
    memory.put("pack", data)
    rng = random.Random(1)

    class Flaky(InterceptingStore):
        def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
            if rng.random() < 0.3:
                raise Throttled("503")
            return call()

    counting = CountingStore(Flaky(memory))
    store = RetryingStore(counting, POLICY, piece_bytes=1000, sleep=waits.append)
    rngs = [ByteRange(start, start + 90) for start in range(0, 19_900, 100)]
    assert store.get_ranges("pack", rngs) == [data[r.start : r.stop] for r in rngs]
    assert counting.bytes_read == 90 * len(rngs), "nothing is read twice"
    assert store.get_range("pack", ByteRange(3, 19_990)) == data[3:19_990]
    out = bytearray(15_000)
    store.get_into("pack", 11, memoryview(out))
    assert out == data[11:15_011]
    store.close()


def test_a_stream_is_sent_in_parts_each_retried(waits: list[float]) -> None:
    inner = PartsStore()
    store = RetryingStore(inner, POLICY, shape=PartShape(part_bytes=5 * MIB, in_flight=2), sleep=waits.append)
    data = random.Random(0).randbytes(23 * MIB + 17)
    view = memoryview(data)
    assert store.put_stream("pack", (view[at : at + 999_999] for at in range(0, len(data), 999_999))) == len(data)
    assert inner.get("pack") == data
    assert set(inner.sizes) == {5 * MIB, 3 * MIB + 17}
    assert inner.most_in_flight <= 2
    assert inner.open == set()
    assert store.stats.num_retries["Unavailable"] > 0
    store.put_stream("small", [b"a", b"b"])
    assert inner.get("small") == b"ab"
    store.put_stream("whole", [data[: 5 * MIB]])
    assert inner.get("whole") == data[: 5 * MIB]
    store.close()


def test_a_stream_whose_parts_never_arrive_is_aborted(waits: list[float]) -> None:
    class Dead(PartsStore):
        def answer(self) -> None:
            raise Unavailable("no route")

    inner = Dead()
    store = RetryingStore(inner, POLICY, shape=PartShape(part_bytes=5 * MIB, in_flight=2), sleep=waits.append)
    taken = 0

    def blocks() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield bytes(MIB)

    with pytest.raises(Unavailable, match=f"no route .given up after {POLICY.unavailable.attempts} tries"):
        store.put_stream("pack", blocks())
    assert inner.open == set()
    assert not inner.exists("pack")
    assert taken <= 20, "a dead store is noticed after a few parts"
    store.close()


def test_a_stream_without_parts_is_retried_if_it_can_be_read_again(waits: list[float]) -> None:
    store = retrying(FailingStore(MemoryStore(), before=[Unavailable("reset")]), waits)
    assert store.put_stream("k", [b"a", b"b"]) == 2
    store = retrying(FailingStore(MemoryStore(), before=[Unavailable("reset")]), waits)
    with pytest.raises(Unavailable, match="reset"):
        store.put_stream("k", iter([b"a", b"b"]))


def test_parts_grow_so_that_ten_thousand_hold_the_largest_object() -> None:
    shape = PartShape()
    assert sum(shape.size_of(number) for number in range(1, 10_001)) >= 5 * 2**40
    assert (shape.size_of(1000), shape.size_of(1001)) == (8 * MIB, 16 * MIB)
    with pytest.raises(ValueError, match="5 MiB"):
        PartShape(part_bytes=MIB)


def test_closing_ends_the_waits() -> None:
    started = threading.Event()

    class Away(InterceptingStore):
        def around(self, operation: str, key: str, call: Callable[[], T]) -> T:
            started.set()
            raise Throttled("away")

    store = RetryingStore(Away(MemoryStore()), PATIENT)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(store.put, "k", b"v")
        started.wait()
        store.close()
        with pytest.raises(Throttled, match="away"):
            future.result()


def test_the_quick_view_shares_the_counts(waits: list[float]) -> None:
    store = retrying(FailingStore(MemoryStore(), before=[Unavailable("x") for _ in range(100)]), waits)
    with pytest.raises(Unavailable, match=f"after {QUICK.unavailable.attempts} tries"):
        store.child("deeper").quick().get("k")
    assert store.stats.num_retries["Unavailable"] == QUICK.unavailable.attempts - 1


def test_each_process_makes_its_own_value() -> None:
    made = PerProcess(os.getpid)
    assert made.get() == os.getpid()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"own" if made.get() == os.getpid() else b"inherited")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        assert answer.read() == b"own"
    assert made.take() == os.getpid()
    assert made.take() is None
