"""obstore as the backend of s3://: the same promises, the same errors, and what goes wrong only there."""

import random
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from seaweed import BUCKET, READ_ONLY_KEY, READ_ONLY_SECRET, SeaweedServer

from storage import choice
from storage.choice import choose_s3, cloud_store
from storage.contract import ObjectStoreContract
from storage.errors import AccessDenied, ConfigurationError, StorageError, Unavailable
from storage.fast import FastStore, ForkSafeStore
from storage.multipart import PartShape
from storage.objects import ByteRange, ObjectStore, check_store, open_store
from storage.retry import QUICK
from storage.s3 import S3Options, S3Store
from storage.s3_errors import Where
from storage.traffic import configure, traffic

pytest.importorskip("obstore", reason="obstore is missing: pip install 'ftrain-runtime[fast]'")

MIB = 2**20


@pytest.fixture
def url() -> str:
    """A prefix that no other test uses."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.s3
class TestFastS3(ObjectStoreContract):
    race_threads, race_rounds = 8, 1

    @pytest.fixture(autouse=True)
    def _server(self, s3: SeaweedServer) -> None:
        self.server = s3

    def make_store(self, tmp_path: Path) -> ObjectStore:
        options = {**self.server.options, "backend": "obstore", "parts": PartShape(in_flight=2)}
        return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", options=options)


class TestFastStoreInMemory(ObjectStoreContract):
    """What gs:// and az:// have in common with it: the store itself, on the library's simplest backend."""

    def make_store(self, tmp_path: Path) -> ObjectStore:
        from obstore.store import MemoryStore

        memory = MemoryStore()
        return FastStore(Where("bucket", "memory", "run", "mem://bucket/run"), lambda patient: memory)


def test_obstore_is_taken_where_it_can_do_what_the_options_ask_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_s3(url, S3Options(), "auto"), ForkSafeStore)
    assert isinstance(choose_s3(url, S3Options(), "s3fs"), S3Store)
    encrypted = S3Options(s3_additional_kwargs={"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"})
    assert isinstance(choose_s3(url, encrypted, "auto"), ForkSafeStore)
    odd = S3Options(s3_additional_kwargs={"StorageClass": "GLACIER_IR"})
    assert isinstance(choose_s3(url, odd, "auto"), S3Store)
    with pytest.raises(ConfigurationError, match="only s3fs knows StorageClass"):
        choose_s3(url, odd, "obstore")
    with pytest.raises(ConfigurationError, match="auto, obstore or s3fs"):
        choose_s3(url, S3Options(), "boto")
    monkeypatch.setattr(choice, "has_obstore", lambda: False)
    assert isinstance(choose_s3(url, S3Options(), "auto"), S3Store)
    with pytest.raises(ConfigurationError, match=r"ftrain-runtime\[fast\]"):
        choose_s3(url, S3Options(), "obstore")


@pytest.mark.parametrize("cloud", ["gs://bucket/run", "az://container/run"])
def test_other_clouds_are_obstores_too(cloud: str) -> None:
    store = cloud_store(cloud, {})
    assert isinstance(store, FastStore)
    assert store.url_of("k") == f"{cloud}/k"
    assert cloud_store("sftp://host/run", {}) is None


CASES = [
    pytest.param("s3://no-such-bucket/run", {}, ConfigurationError, "no bucket 'no-such-bucket'", id="missing bucket"),
    pytest.param("", {"key": "nobody"}, AccessDenied, "does not know the access key", id="wrong key"),
    pytest.param("", {"secret": "wrong"}, AccessDenied, "secret key does not belong", id="wrong secret"),
    pytest.param("", {"key": READ_ONLY_KEY, "secret": READ_ONLY_SECRET}, AccessDenied, "check its policy", id="read-only user"),
    pytest.param("", {"endpoint_url": "http://127.0.0.1:9"}, Unavailable, "cannot be reached", id="nobody listens"),
    pytest.param("", {"endpoint_url": "127.0.0.1:9"}, ConfigurationError, "endpoint is no URL", id="endpoint without http"),
    pytest.param("", {"ca_bundle": "/no/such.pem"}, ConfigurationError, r"/no/such.pem cannot be read", id="no CA"),
]


@pytest.mark.s3
@pytest.mark.parametrize(("bad_url", "changed", "expected", "words"), CASES)
def test_what_is_wrong_is_said_in_the_same_words(
    s3: SeaweedServer, url: str, bad_url: str, changed: dict[str, object], expected: type[StorageError], words: str
) -> None:
    with pytest.raises(expected, match=words):
        check_store(open_store(bad_url or url, options={**s3.options, "backend": "obstore", "retry": QUICK, **changed}))


@pytest.mark.s3
def test_a_long_stream_goes_in_parts_and_one_that_fails_leaves_no_upload(s3: SeaweedServer, url: str) -> None:
    store = open_store(url, options={**s3.options, "backend": "obstore"})
    data = random.Random(0).randbytes(35 * MIB + 5)
    assert store.put_stream("pack", (data[at : at + MIB] for at in range(0, len(data), MIB))) == len(data)
    assert store.get_range("pack", ByteRange(0, len(data))) == data
    client = s3.client()
    answer = client.head_object(Bucket=BUCKET, Key=f"{url.partition(BUCKET + '/')[2]}/pack")
    assert answer["ETag"].endswith('-3"'), "three parts of 16 MiB"

    def failing() -> Iterator[bytes]:
        for _ in range(40):
            yield bytes(MIB)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.put_stream("bad", failing())
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    assert [entry["Key"] for entry in uploads if url.rpartition("/")[2] in entry["Key"]] == []
    client.close()
    store.close()


@pytest.mark.s3
def test_the_parts_of_a_stream_keep_to_the_cap_on_bytes_in_flight(s3: SeaweedServer, url: str) -> None:
    """Also while another stream is under way, and a stream that fails gives back what it held."""
    before, most = traffic.in_flight_bytes, traffic.most_held
    traffic._state.get().most_held = 0
    store = open_store(url, options={**s3.options, "backend": "obstore", "parts": PartShape(in_flight=4)})
    data = random.Random(0).randbytes(MIB)
    configure(in_flight_bytes=40 * MIB)
    try:
        with ThreadPoolExecutor(2) as pool:
            sizes = list(pool.map(lambda n: store.put_stream(f"pack-{n}", [data] * 70), range(2)))
        assert sizes == [70 * MIB, 70 * MIB]
        assert 32 * MIB <= traffic.most_held <= 40 * MIB
        with pytest.raises(ZeroDivisionError):
            store.put_stream("bad", (data if n < 40 else data[: 1 // 0] for n in range(50)))
        with traffic.hold(40 * MIB):  # it would wait for ever if anything were left on its way
            assert traffic._state.get().num_requests == 1
        assert store.get_range("pack-1", ByteRange(69 * MIB, 69 * MIB + 5)) == data[:5]
    finally:
        configure(in_flight_bytes=before)
        traffic._state.get().most_held = max(most, traffic.most_held)
        store.close()


@pytest.mark.s3
def test_a_create_whose_answer_is_lost_knows_that_it_won(s3: SeaweedServer, url: str) -> None:
    proxy = FaultProxy(s3.ports["s3"])
    store = open_store(url, options={**s3.options, "endpoint_url": proxy.endpoint, "backend": "obstore"})
    store.put("warm", b"up")
    proxy.drop_only, proxy.drop_answers = b"if-none-match: *", 1
    assert store.create("commit", b"mine") is True
    assert proxy.num_dropped == 1
    assert store.create("commit", b"second") is False
    assert store.get("commit") == b"mine"
    store.close()
    proxy.close()
