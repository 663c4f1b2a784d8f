"""S3 and what speaks its protocol, through s3fs.

s3fs knows how to sign, to find credentials and to keep connections; this module calls its requests one by one, because the
convenient calls above them hide what a checkpoint depends on: a stream that is sent in bounded memory and aborted on any
failure, whether a create was sent twice, and what exactly the server answered. Its own retries and its cache of listings are
off: retries are `storage.retry`'s, and a cached listing shows a store that is no more.

s3fs runs one event loop in a thread of its own, which does not survive a fork: connections are made per process, on first use.
"""

import asyncio
import dataclasses
import difflib
import io
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from storage.errors import ConfigurationError, ObjectMissing, StorageError, Unavailable
from storage.multipart import PartShape, stream_parts
from storage.objects import (
    MAX_OBJECT_BYTES,
    ByteRange,
    Bytes,
    BytesList,
    Capabilities,
    ObjectInfo,
    ObjectStore,
    Upload,
    check_key,
    check_prefix,
    check_size,
    short_object,
)
from storage.perprocess import PerProcess
from storage.s3_errors import Where, code_of, translated

__all__ = ["S3Options", "S3Store"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class S3Options:
    """What `open_store(..., options=...)` takes for s3://. What is None comes from the AWS environment variables and files."""

    endpoint_url: str | None = None
    """URL of the server if it is not AWS; else AWS_ENDPOINT_URL."""
    key: str | None = None
    """Access key; else AWS_ACCESS_KEY_ID, the profile, or the machine's role."""
    secret: str | None = None
    token: str | None = None
    profile: str | None = None
    region: str | None = None
    anon: bool = False
    """True: a public bucket, requests are not signed."""
    ca_bundle: str | None = None
    """File with the certificates to trust; else AWS_CA_BUNDLE."""
    s3_additional_kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Sent with each request that takes it, such as ServerSideEncryption or SSEKMSKeyId."""
    config_kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Passed to botocore's Config, such as proxies or s3={"addressing_style": "path"}."""
    request_timeout_s: float = 120.0
    """A request that takes longer, however it trickles, counts as lost."""
    parts: PartShape = dataclasses.field(default_factory=PartShape)

    @classmethod
    def parse(cls, url: str, given: Mapping[str, Any]) -> "S3Options":
        """The options, or a `ConfigurationError` that lists every unknown one with the closest known name."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = []
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                unknown.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
        if unknown:
            raise ConfigurationError(f"{url}: unknown option {', '.join(unknown)}; there are {', '.join(known)}")
        return cls(**given)


class S3Store(ObjectStore):
    """Objects of a bucket below a prefix. Each method is one try; `storage.retry.RetryingStore` adds the others."""

    capabilities = Capabilities(atomic_create=True, durable=True, local=False, parts=True)

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        bucket, _, prefix = url.partition("://")[2].partition("/")
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.url = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self.options = options or S3Options()
        self._connection = PerProcess(lambda: _Connection(self.options))
        self._pool = PerProcess(lambda: ThreadPoolExecutor(self.options.parts.in_flight, thread_name_prefix="ftrain-s3"))

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        body, size = self._read(key, max_bytes)
        check_size(key, size, max_bytes)
        return body

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        if not len(rng):  # S3 has no empty ranges
            self.size(key)
            return b""
        try:
            body, _ = self._read(key, len(rng), Range=f"bytes={rng.start}-{rng.stop - 1}")
        except StorageError as error:
            if code_of(error.__cause__ or error) in ("InvalidRange", "416"):
                raise short_object(key, rng, self.size(key) - rng.start) from error
            raise
        if len(body) != len(rng):
            raise short_object(key, rng, len(body))
        return body

    def get_ranges(self, key: str, rngs: Iterable[ByteRange]) -> BytesList:
        return list_of(self._pool.get().map(lambda rng: self.get_range(key, rng), rngs))

    def put(self, key: str, data: Bytes) -> None:
        self._call("put_object", key, Body=_body(data))

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        return stream_parts(
            blocks,
            self.options.parts,
            put=lambda data: self.put(check_key(key), data),
            begin=lambda: self.begin_upload(key),
            pool=self._pool.get(),
        )

    def create(self, key: str, data: bytes) -> bool:
        try:
            self._call("put_object", key, Body=_body(data), IfNoneMatch="*")
        except StorageError as error:
            if code_of(error.__cause__ or error) in ("PreconditionFailed", "412"):
                return False
            raise
        return True

    def size(self, key: str) -> int:
        return int(self._call("head_object", key)["ContentLength"])

    def exists(self, key: str) -> bool:
        try:
            self._call("head_object", key)
        except ObjectMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        self._call("delete_object", key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        found = []
        for page in self._pages("list_objects_v2", prefix):
            for entry in page.get("Contents", ()):
                key = entry["Key"][len(self._prefix) :]
                if key and not key.endswith("/"):  # what other programs make to show a folder
                    found.append(ObjectInfo(key, int(entry["Size"]), entry["LastModified"].timestamp()))
        return iter(sorted(found, key=lambda info: info.key))  # not every server sorts as S3 does

    def url_of(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{check_key(key)}"

    def begin_upload(self, key: str) -> Upload:
        return _S3Upload(self, key, self._call("create_multipart_upload", key)["UploadId"])

    def sweep_unfinished(self, *, older_than_s: float) -> int:
        newest = time.time() - older_than_s
        num_removed = 0
        for key, entry in self._open_uploads(""):
            if entry["Initiated"].timestamp() <= newest:
                _S3Upload(self, key, entry["UploadId"]).abort()
                num_removed += 1
        return num_removed

    def abort_uploads(self, key: str) -> None:
        for found, entry in self._open_uploads(check_key(key)):
            if found == key:
                _S3Upload(self, key, entry["UploadId"]).abort()

    def _open_uploads(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for page in self._pages("list_multipart_uploads", prefix):
            for entry in page.get("Uploads", ()):
                yield entry["Key"][len(self._prefix) :], entry

    def refresh_credentials(self) -> None:
        self._connection.take()  # closed when the requests that use it have ended

    @property
    def endpoint(self) -> str:
        return f"{self.options.endpoint_url or 'AWS'}/{self._bucket}"

    def close(self) -> None:
        pool = self._pool.take()
        if pool is not None:
            pool.shutdown()
        connection = self._connection.take()
        if connection is not None:
            connection.close()

    def _where(self, key: str) -> Where:
        endpoint = self.options.endpoint_url or "the S3 endpoint"
        return Where(self._bucket, endpoint, key, f"s3://{self._bucket}/{self._prefix}{key}")

    def _call(self, method: str, key: str, **arguments: object) -> dict[str, Any]:
        """One request about one object, and the server's answer."""
        return self._request(key, method, {"Bucket": self._bucket, "Key": self._prefix + check_key(key), **arguments})

    def _read(self, key: str, max_bytes: int, **arguments: object) -> tuple[bytes, int]:
        """Body and size of an answer; no body if it is larger than `max_bytes`."""
        where = {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}
        answer = self._request(key, "get_object", {**where, **arguments}, read_at_most=max_bytes)
        return answer["Body"], int(answer["ContentLength"])

    def _pages(self, method: str, prefix: str) -> Iterator[dict[str, Any]]:
        """All pages of a listing of what starts with `prefix`."""
        follow: dict[str, object] = {}
        while True:
            page = self._request(prefix, method, {"Bucket": self._bucket, "Prefix": self._prefix + prefix, **follow})
            yield page
            if not page.get("IsTruncated"):
                return
            follow = {"ContinuationToken": page.get("NextContinuationToken")}
            if method == "list_multipart_uploads":
                follow = {"KeyMarker": page.get("NextKeyMarker"), "UploadIdMarker": page.get("NextUploadIdMarker")}

    def _request(self, about: str, method: str, arguments: dict[str, object], *, read_at_most: int = 0) -> dict[str, Any]:
        connection = self._connection.get()
        try:
            return connection.send(method, arguments, read_at_most)
        except Exception as error:
            ours = translated(error, self._where(about))
            if ours is None:
                raise
            raise ours from (error.__cause__ or error)


class _S3Upload(Upload):
    def __init__(self, store: S3Store, key: str, upload_id: str) -> None:
        self._store = store
        self._key = key
        self._id = upload_id
        self._tags: dict[int, str] = {}
        self._sizes: dict[int, int] = {}

    def put_part(self, number: int, data: Bytes) -> None:
        answer = self._call("upload_part", PartNumber=number, Body=_body(data))
        self._sizes[number] = len(data)
        self._tags[number] = answer["ETag"]

    def complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        except StorageError as error:
            if code_of(error.__cause__ or error) != "NoSuchUpload":
                raise
            self._must_be_complete(error)

    def _must_be_complete(self, error: StorageError) -> None:
        """The upload is gone: either an earlier call completed it and its answer was lost, or somebody aborted it."""
        if not self._store.exists(self._key) or self._store.size(self._key) != sum(self._sizes.values()):
            raise Unavailable(f"the upload of {self._key} was removed before it was complete", self._key) from error

    def abort(self) -> None:
        try:
            self._call("abort_multipart_upload")
        except StorageError:
            return  # `sweep_unfinished` finds it later; the error that led here is the one to show

    def _call(self, method: str, **arguments: object) -> dict[str, Any]:
        return self._store._call(method, self._key, UploadId=self._id, **arguments)


class _Connection:
    """An s3fs file system of this process: not shared, no retries and no cached listings of its own.

    It is of the asynchronous kind, which leaves closing to us. The other kind closes itself when it is collected or the process
    ends, in a forked child too, and with that takes the parent's sockets out of the poll set that both share.
    """

    def __init__(self, options: S3Options) -> None:
        try:
            import fsspec.asyn
            import s3fs
        except ImportError as error:
            raise ConfigurationError("s3:// needs the library s3fs: pip install s3fs") from error
        self._sync = fsspec.asyn.sync
        self._loop = fsspec.asyn.get_loop()
        self._timeout_s = options.request_timeout_s
        self._fs = s3fs.S3FileSystem(asynchronous=True, skip_instance_cache=True, **_arguments(options))
        self._fs.retries = 1
        self.close = weakref.finalize(self, _close, os.getpid(), self._sync, self._loop, self._fs)

    def send(self, method: str, arguments: Mapping[str, object], read_at_most: int) -> dict[str, Any]:
        """One request, and the answer; its body is read if it has at most `read_at_most` bytes."""
        answer: dict[str, Any] = self._sync(
            self._loop, _send, self._fs, method, arguments, read_at_most, timeout=self._timeout_s
        )
        return answer


def _arguments(options: S3Options) -> dict[str, Any]:
    """Our options by s3fs's names."""
    client = {"region_name": options.region, "verify": options.ca_bundle}
    config = {"connect_timeout": 5, "read_timeout": 30, "max_pool_connections": 32, "retries": {"total_max_attempts": 1}}
    named = {name: getattr(options, name) for name in ("endpoint_url", "key", "secret", "token", "anon", "profile")}
    return {
        **{name: value for name, value in named.items() if value is not None},
        "client_kwargs": {name: value for name, value in client.items() if value is not None},
        "config_kwargs": {**config, **options.config_kwargs},
        "use_listings_cache": False,
        "s3_additional_kwargs": dict(options.s3_additional_kwargs),
    }


def _close(pid: int, sync: Callable[..., object], loop: asyncio.AbstractEventLoop, fs: Any) -> None:
    """Close the connections of the process that made them."""
    client = fs._s3
    if client is None or pid != os.getpid():
        return
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        with suppress(OSError, TimeoutError):
            sync(loop, client.__aexit__, None, None, None, timeout=1)
    else:  # collected in the loop's own thread, which cannot wait for itself
        fs._closing = running.create_task(client.__aexit__(None, None, None))


async def _send(fs: Any, method: str, arguments: Mapping[str, object], read_at_most: int) -> dict[str, Any]:
    answer: dict[str, Any] = await fs._call_s3(method, **arguments)
    if "Body" in answer:
        async with answer["Body"] as body:
            answer["Body"] = await body.read() if int(answer["ContentLength"]) <= read_at_most else b""
    return answer


def _body(data: Bytes) -> bytes | io.BytesIO:
    # A large body as a file: the client then sends it piece by piece (2.3 instead of 2.9 CPU s per GiB), and does not warn.
    return bytes(data) if len(data) < 2**20 else io.BytesIO(data)


def list_of(items: Iterable[bytes]) -> BytesList:
    """`list(items)`, for use inside a class where `list` is a method."""
    return list(items)
