"""The same promises against a real S3 server, and what goes wrong only there."""

import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from seaweed import BUCKET, READ_ONLY_KEY, READ_ONLY_SECRET, SeaweedServer

from storage.contract import ObjectStoreContract
from storage.errors import AccessDenied, ConfigurationError, StorageError, Unavailable
from storage.multipart import PartShape
from storage.objects import ByteRange, ObjectStore, check_store, open_store
from storage.retry import QUICK, RetryingStore
from storage.s3 import S3Options, S3Store

pytestmark = pytest.mark.s3

MIB = 2**20
SMALL_PARTS = PartShape(part_bytes=5 * MIB, in_flight=3)
S3FS = {"backend": "s3fs"}  # where it matters which client it is; test_fast.py has the other one


@pytest.fixture
def url() -> str:
    """A prefix that no other test uses."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(s3: SeaweedServer) -> Iterator[FaultProxy]:
    proxy = FaultProxy(s3.ports["s3"])
    yield proxy
    proxy.close()


class TestS3(ObjectStoreContract):
    """As `open_store` gives it: with retries."""

    race_threads, race_rounds = 8, 1  # SeaweedFS takes seconds to settle a race; the slow test below has 40, of 16

    @pytest.fixture(autouse=True)
    def _server(self, s3: SeaweedServer) -> None:
        self.server = s3

    def make_store(self, tmp_path: Path) -> ObjectStore:
        return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", options={**self.server.options, **S3FS})


@pytest.mark.slow
def test_create_race_of_40_rounds(s3: SeaweedServer, tmp_path: Path) -> None:
    suite = TestS3()
    suite.server, suite.race_threads, suite.race_rounds = s3, 16, 40
    store = suite.make_store(tmp_path)
    suite.test_create_race(store)
    store.close()


def test_a_stream_in_parts(s3: SeaweedServer, url: str) -> None:
    data = random.Random(0).randbytes(23 * MIB + 5)
    store = open_store(url, options={**s3.options, **S3FS, "parts": SMALL_PARTS})
    assert store.put_stream("pack", (data[at : at + MIB] for at in range(0, len(data), MIB))) == len(data)
    assert store.get_range("pack", ByteRange(0, len(data))) == data
    client = s3.client()
    answer = client.get_object(Bucket=BUCKET, Key=f"{url.partition(BUCKET + '/')[2]}/pack")
    assert answer["Body"].read() == data
    assert answer["ETag"].endswith('-5"'), "five parts"
    client.close()
    store.close()


def test_without_the_retrying_wrapper_one_try_is_one_request(s3: SeaweedServer, url: str) -> None:
    store = S3Store(url, S3Options(**{**s3.options, "parts": SMALL_PARTS}))
    data = random.Random(0).randbytes(11 * MIB)
    assert store.put_stream("pack", [data]) == len(data)
    assert store.put_stream("small", [b"x"]) == 1
    assert store.get_ranges("pack", [ByteRange(0, 5), ByteRange(MIB, 2 * MIB)]) == [data[:5], data[MIB : 2 * MIB]]
    store.close()


def test_a_stream_that_fails_leaves_no_upload(s3: SeaweedServer, url: str) -> None:
    def blocks() -> Iterator[bytes]:
        for _ in range(20):
            yield bytes(MIB)
        raise ZeroDivisionError

    store = open_store(url, options={**s3.options, **S3FS, "parts": SMALL_PARTS})
    with pytest.raises(ZeroDivisionError):
        store.put_stream("pack", blocks())
    client = s3.client()
    prefix = url.partition(BUCKET + "/")[2]  # a run that another test has killed may have left one of its own
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    client.close()
    assert list(store.list()) == []
    store.close()


def test_uploads_of_dead_writers_are_swept(s3: SeaweedServer, url: str) -> None:
    store = open_store(url, options={**s3.options, **S3FS})
    other = open_store(url + "-other", options={**s3.options, **S3FS})
    for each in (store, other):
        upload = each.begin_upload("pack")
        assert upload is not None
        upload.put_part(1, bytes(5 * MIB))
    assert store.sweep_unfinished(older_than_s=3600) == 0
    assert store.sweep_unfinished(older_than_s=-60) == 1
    assert store.sweep_unfinished(older_than_s=-60) == 0
    assert other.sweep_unfinished(older_than_s=-60) == 1, "the other run's was left alone"
    store.close()
    other.close()


CASES = [
    pytest.param("s3://no-such-bucket/run", {}, ConfigurationError, "no bucket 'no-such-bucket'", id="missing bucket"),
    pytest.param("", {"key": "nobody"}, AccessDenied, "does not know the access key", id="wrong key"),
    pytest.param("", {"secret": "wrong"}, AccessDenied, "secret key does not belong", id="wrong secret"),
    pytest.param("", {"key": READ_ONLY_KEY, "secret": READ_ONLY_SECRET}, AccessDenied, "check its policy", id="read-only user"),
    pytest.param("", {"endpoint_url": "http://127.0.0.1:9"}, Unavailable, "cannot be reached", id="nobody listens"),
    pytest.param("", {"endpoint_url": "127.0.0.1:9"}, ConfigurationError, "Invalid endpoint", id="endpoint without http"),
    pytest.param(
        "", {"ca_bundle": "/no/such.pem", "endpoint_url": "https://127.0.0.1:9"}, StorageError, "127.0.0.1:9", id="no CA"
    ),
    pytest.param("", {"endpoint": "x"}, ConfigurationError, "did you mean 'endpoint_url'", id="unknown option"),
    pytest.param("", {"retry": 3}, ConfigurationError, "RetryPolicy", id="retry of a wrong type"),
]


@pytest.mark.parametrize(("bad_url", "changed", "expected", "words"), CASES)
def test_what_is_wrong_is_said_before_the_first_step(
    s3: SeaweedServer, url: str, bad_url: str, changed: dict[str, object], expected: type[StorageError], words: str
) -> None:
    with pytest.raises(expected, match=words):
        check_store(open_store(bad_url or url, options={**s3.options, **changed}))


def test_the_environment_is_enough(s3: SeaweedServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    store = open_store(url)
    check_store(store)
    assert store.url_of("k") == f"{url}/k"
    store.close()


def test_without_credentials_it_says_what_to_set(
    s3: SeaweedServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDenied, match=r"come from AWS_ACCESS_KEY_ID .* or from a role"):
        check_store(open_store(url, options={"endpoint_url": s3.endpoint}))


def test_a_create_whose_answer_is_lost_knows_that_it_won(s3: SeaweedServer, url: str, proxy: FaultProxy) -> None:
    store = open_store(url, options={**s3.options, **S3FS, "endpoint_url": proxy.endpoint})
    proxy.drop_only = b"if-none-match: *"
    store.put("warm", b"up")
    proxy.drop_answers = 1
    assert store.create("commit", b"mine") is True
    assert proxy.num_dropped == 1
    other = open_store(url, options=s3.options)
    assert other.get("commit") == b"mine"
    assert store.create("commit", b"second") is False
    store.close()
    other.close()


def test_a_completion_whose_answer_is_lost_is_a_success(s3: SeaweedServer, url: str, proxy: FaultProxy) -> None:
    store = open_store(url, options={**s3.options, "endpoint_url": proxy.endpoint, **S3FS, "parts": SMALL_PARTS})
    proxy.drop_only = b"<CompleteMultipartUpload"
    proxy.drop_answers = 1
    data = random.Random(0).randbytes(12 * MIB)
    assert store.put_stream("pack", [data]) == len(data)
    assert proxy.num_dropped == 1
    assert store.get_range("pack", ByteRange(0, len(data))) == data
    store.close()


def test_a_body_that_breaks_off_is_read_again(s3: SeaweedServer, url: str, proxy: FaultProxy) -> None:
    store = open_store(url, options={**s3.options, **S3FS, "endpoint_url": proxy.endpoint})
    data = random.Random(0).randbytes(3 * MIB)
    store.put("pack", data)
    proxy.cut_after = 2 * MIB
    assert store.get("pack") == data
    assert proxy.num_dropped == 1
    assert isinstance(store, RetryingStore)
    assert store.stats.num_retries["Unavailable"] == 1
    store.close()


@pytest.mark.chaos
@pytest.mark.slow
def test_a_server_that_restarts_in_the_middle_of_a_stream(tmp_path: Path, url: str) -> None:
    server = SeaweedServer(tmp_path)
    server.start()
    try:
        store = open_store(url, options={**server.options, **S3FS, "parts": SMALL_PARTS})
        data = random.Random(0).randbytes(40 * MIB)

        def blocks() -> Iterator[bytes]:
            for at in range(0, len(data), MIB):
                if at == 20 * MIB:
                    server.stop()
                    server.start()
                yield data[at : at + MIB]

        assert store.put_stream("pack", blocks()) == len(data)
        assert store.get_range("pack", ByteRange(0, len(data))) == data
        store.close()
    finally:
        server.stop()


FORKING = """
import os, sys
from storage.objects import ByteRange, open_store
store = open_store(sys.argv[1])
store.put("k", b"v" * 100)
child = os.fork()
if child == 0:
    ok = store.get_ranges("k", [ByteRange(0, 1), ByteRange(2, 4)]) == [b"v", b"vv"] and store.create("from-child", b"")
    sys.exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert store.get("from-child") == b""
assert store.stats.num_retries.total() == 0, store.stats
"""


def test_a_forked_child_makes_its_own_connections(s3: SeaweedServer, url: str) -> None:
    env = {**os.environ, **s3.environment()}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING, url],
        env=env,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_store_that_is_closed_holds_no_connection(s3: SeaweedServer, url: str) -> None:
    store = open_store(url, options={**s3.options, "retry": QUICK})
    store.put("k", b"v")
    store.close()
    assert store.get("k") == b"v", "it opens a new one"
    store.close()
