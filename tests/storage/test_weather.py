"""S3 weather on a real server: right, or the one clear error, and never something in between.

The whole of a run's storage work goes through it: epochs, packs in parts, commits, reads that verify, collection.
"""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from seaweed import BUCKET, SeaweedServer
from weather import Weather

from storage.errors import ExpiredCredentials, StorageError, Unavailable
from storage.keys import pack_name
from storage.multipart import PartShape
from storage.objects import ByteRange, ObjectStore, open_store
from storage.retention import KeepLast
from storage.retry import Backoff, RetryPolicy
from storage.run import RunStore
from tests.storage.building import SPECS, random_values, save
from tests.storage.test_commit import holds

pytestmark = pytest.mark.s3

MIB = 2**20
HASTE = RetryPolicy(
    deadline_s=120.0,
    throttled=Backoff(attempts=40, first_s=0.01, most_s=0.1),
    unavailable=Backoff(attempts=40, first_s=0.01, most_s=0.1),
)
"""As patient as for a run, in tries, but with waits for a test."""
BACKENDS = ["s3fs", "obstore"]


@pytest.fixture
def weather(s3: SeaweedServer) -> Iterator[Weather]:
    weather = Weather(s3.ports["s3"])
    yield weather
    weather.close()


def through(weather: Weather, server: SeaweedServer, backend: str, policy: RetryPolicy = HASTE) -> ObjectStore:
    if backend == "obstore":
        pytest.importorskip("obstore", reason="obstore is missing: pip install 'ftrain-runtime[fast]'")
    shape = PartShape(part_bytes=5 * MIB, in_flight=2)
    options = {**server.options, "endpoint_url": weather.endpoint, "backend": backend, "retry": policy, "parts": shape}
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", options=options)


def work(store: ObjectStore, rounds: int) -> None:
    """What a run does with its storage."""
    run = RunStore(store)
    epoch = run.take_epoch(owner={"host": "a"})
    for number in range(1, rounds + 1):
        values = random_values(SPECS, number)
        assert save(run, values, step=10 * number, epoch=epoch).epoch == epoch
        opened = run.open()
        assert opened.step == 10 * number
        assert holds(opened, values)
        assert opened.verify().ok
    heir = RunStore(store)
    assert heir.take_epoch(owner={"host": "b"}) == epoch + 1, "one epoch for each that was taken, however often it was tried"
    now = max(info.modified_s for info in store.list()) + 100.0
    heir.collect([KeepLast(1)], now_s=now, grace_s=0.0)
    assert [info.step for info in heir.checkpoints() if info.state == "valid"] == [10 * rounds]


def stream(store: ObjectStore, mebibytes: int) -> None:
    """A pack in several parts, and back."""
    block = bytes(range(256)) * 4096
    key = f"checkpoints/step-00000001/{pack_name(0, 0, 0)}"
    assert store.put_stream(key, [block] * mebibytes) == mebibytes * MIB
    assert store.get_range(key, ByteRange(0, mebibytes * MIB)) == block * mebibytes
    assert store.num_retries >= 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_store_that_refuses_and_breaks_is_ridden_out(s3: SeaweedServer, weather: Weather, backend: str) -> None:
    weather.refused, weather.broken, weather.conflict = 0.3, 0.1, 0.1
    store = through(weather, s3, backend)
    work(store, 1)
    assert weather.counts["refused"] >= 5
    assert store.num_retries >= 5
    store.close()


def test_a_success_with_an_error_in_its_body_is_no_success(s3: SeaweedServer, weather: Weather) -> None:
    store = through(weather, s3, "s3fs")
    weather.false_success = 0.7
    for _ in range(3):
        stream(store, 6)
    assert store.num_retries >= weather.counts["false success"] >= 1
    store.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_conflict_of_creates_is_not_a_lost_race(s3: SeaweedServer, weather: Weather, backend: str) -> None:
    """S3 answers 409 while another create of the key is under way: nobody has won yet."""
    store = through(weather, s3, backend)
    weather.conflict = 0.7
    assert [store.create(f"k{number}", b"mine") for number in range(5)] == [True] * 5
    assert weather.counts["conflict"] >= 3
    assert store.create("k0", b"late") is False
    store.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stall_is_waited_out(s3: SeaweedServer, weather: Weather, backend: str) -> None:
    weather.stalled, weather.stall_s = 0.2, 0.1
    store = through(weather, s3, backend)
    work(store, 1)
    assert weather.counts["stalled"] >= 5
    store.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_expired_keys_are_fetched_anew_once_and_then_said(s3: SeaweedServer, weather: Weather, backend: str) -> None:
    store = through(weather, s3, backend)
    weather.expired = 1
    store.put("k", b"v")
    assert store.num_retries == 1
    weather.expired = 1000
    with pytest.raises(ExpiredCredentials, match="the credentials have expired"):
        store.get("k")
    assert weather.counts["expired"] == 3
    store.close()


def test_weather_that_does_not_end_is_one_clear_error(s3: SeaweedServer, weather: Weather) -> None:
    weather.refused = 1.0
    brief = RetryPolicy(deadline_s=5.0, throttled=Backoff(attempts=3, first_s=0.01, most_s=0.02), unavailable=HASTE.unavailable)
    store = through(weather, s3, "s3fs", brief)
    with pytest.raises(Unavailable, match=r"503 SlowDown.*given up after 3 tries"):
        RunStore(store).take_epoch(owner={})
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_weather_for_long(s3: SeaweedServer, weather: Weather, backend: str) -> None:
    weather.refused, weather.broken, weather.conflict, weather.false_success = 0.3, 0.1, 0.1, 0.3
    weather.stalled = 0.02
    store = through(weather, s3, backend)
    work(store, 5)
    if backend == "s3fs":  # obstore's own retries of parts have waits of its own
        stream(store, 40)
    assert weather.counts["stalled"] >= 1
    store.close()


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_that_restarts_in_mid_save(tmp_path: Path, backend: str) -> None:
    server = SeaweedServer(tmp_path)
    server.start()
    weather = Weather(server.ports["s3"])
    slow = RetryPolicy(
        deadline_s=120.0,
        throttled=Backoff(attempts=100, first_s=0.2, most_s=2.0),
        unavailable=Backoff(attempts=100, first_s=0.2, most_s=2.0),
    )
    store = through(weather, server, backend, slow)
    under_way, problems = threading.Event(), list[BaseException]()

    def saving() -> None:
        try:
            under_way.set()
            work(store, 6)
        except (StorageError, AssertionError) as error:
            problems.append(error)

    thread = threading.Thread(target=saving)
    thread.start()
    try:
        under_way.wait(30)
        server.kill()
        server.start()
        thread.join(240)
        assert not thread.is_alive()
        assert problems == []
    finally:
        weather.close()
        store.close()
        server.stop()
