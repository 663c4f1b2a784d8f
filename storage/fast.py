"""Object stores through `obstore` (the Rust crate object_store): s3://, gs:// and az:// at a quarter of the CPU.

Installed by the extra `fast`; `storage.remote` says when it is chosen. Measured here per GiB: upload 1.2 CPU seconds against 4
with s3fs, download 1.5 against 7.5, because nothing is copied in Python.

What differs from `storage.s3`: a stream's parts are sent, and retried, inside the library. Its retries are of the same patience
as ours, but nothing tells how many there were; what is on its way does count against the cap on bytes in flight. And it cannot
abort an upload whose source failed: for S3 that is done with s3fs, Azure forgets uncommitted blocks by itself, and for Google a
lifecycle rule must. All other requests are single tries, as everywhere.

The library's threads do not survive a fork, and it refuses to work in a child of a process that has used it. `ForkSafeStore`
then goes on with s3fs; where there is no other way the child gets an error that says so, instead of a hang.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.errors import ConfigurationError, Damaged, ObjectMissing, StorageError, Unavailable
from storage.fast_errors import fast_translated, is_conflict
from storage.multipart import PartShape
from storage.objects import (
    MAX_OBJECT_BYTES,
    ByteRange,
    Bytes,
    BytesList,
    Capabilities,
    ObjectInfo,
    ObjectStore,
    check_key,
    check_prefix,
    check_size,
    short_object,
)
from storage.perprocess import PerProcess
from storage.s3_errors import Where
from storage.traffic import traffic
from storage.wrapper import WrappingStore

__all__ = ["MAX_PARTS", "FastStore", "ForkSafeStore", "unusable_after_fork"]

MAX_PARTS = 10_000
PART_BYTES = 16 << 20
"""The library keeps to one size: 10,000 of these make 156 GiB, the largest pack it can send."""

Part: TypeAlias = NDArray[np.uint8]

_used_by: int | None = None
_orphaned = False


def _after_fork() -> None:
    global _orphaned
    _orphaned = _orphaned or _used_by is not None


os.register_at_fork(after_in_child=_after_fork)


def unusable_after_fork() -> bool:
    """Whether this process is the child of one that had used the library."""
    return _orphaned


class FastStore(ObjectStore):
    """Objects below a prefix of a bucket. Each request is one try, except the parts of a stream."""

    capabilities = Capabilities(atomic_create=True, durable=True, local=False)

    def __init__(
        self,
        where: Where,
        connect: Callable[[bool], Any],
        *,
        shape: PartShape | None = None,
        uploads: ObjectStore | None = None,
    ) -> None:
        """`connect(patient)` makes the library's store, with or without retries; `where.url` is the root's URL, `where.key`
        the prefix. `uploads`: the same place through a library that can abort what was begun.
        """
        self.url = where.url.rstrip("/")
        self._where = where
        self._prefix = where.key.strip("/") + "/" if where.key.strip("/") else ""
        self._shape = shape or PartShape()
        self._uploads = uploads
        self._stores = PerProcess(lambda: (_connected(connect, False), _connected(connect, True)))

    @property
    def endpoint(self) -> str:
        """The server and the bucket."""
        return f"{self._where.endpoint}/{self._where.bucket}"

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        with self._errors(key) as library:
            answer = library.get(self._store, self._path(key))
            check_size(key, int(answer.meta["size"]), max_bytes)
            return bytes(answer.bytes())

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        return bytes(self._range(key, rng))

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        out[:] = memoryview(self._range(key, ByteRange(start, start + len(out)))).cast("B")

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        return [self.get_range(key, rng) for rng in rngs]

    def put(self, key: str, data: Bytes) -> None:
        with self._errors(key) as library:
            library.put(self._store, self._path(key), bytes(data) if len(data) == 0 else data, use_multipart=False)

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        """Parts of a stream are retried in the library; what fits one is a single request."""
        size = 0
        part_bytes = max(PART_BYTES, self._shape.part_bytes)

        def sent(parts: Iterator[tuple[bytearray, int]], free: list[bytearray]) -> Iterator[Part]:
            nonlocal size
            for buffer, nbytes in parts:
                size += nbytes
                if size > MAX_PARTS * part_bytes:
                    raise ConfigurationError(f"{key} is larger than {MAX_PARTS} parts: use storage.backend = 's3fs'", key)
                yield _on_its_way(buffer, nbytes, free)

        free: list[bytearray] = []
        parts = _filled(blocks, part_bytes, free)
        first, nbytes = next(parts, (bytearray(), 0))
        if nbytes < part_bytes:
            with traffic.hold(nbytes):
                self.put(key, memoryview(first)[:nbytes])
            return nbytes
        try:
            with self._errors(key) as library:
                library.put(
                    self._stores.get()[1],
                    self._path(key),
                    sent(chain([(first, nbytes)], parts), free),
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=self._shape.in_flight,
                )
        except BaseException:
            self._abort(key)
            raise
        return size

    def create(self, key: str, data: bytes) -> bool:
        exceptions = _library().exceptions
        with self._errors(key) as library:
            try:
                library.put(self._store, self._path(key), data, mode="create", use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if is_conflict(error):  # two creates at once, and nobody has won yet: the library takes it for a lost race
                    raise Unavailable(f"two writers create {key} at the same time", key) from error
                return False
        return True

    def size(self, key: str) -> int:
        with self._errors(key) as library:
            return int(library.head(self._store, self._path(key))["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except ObjectMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        with suppress(ObjectMissing), self._errors(key) as library:
            library.delete(self._store, self._path(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = (self._prefix + check_prefix(prefix)).rpartition("/")[0]
        cut, found = len(self._prefix), []
        with self._errors(prefix) as library:
            for page in library.list(self._store, folder or None):
                for entry in page:
                    key = str(entry["path"])[cut:]
                    if key.startswith(prefix):
                        found.append(ObjectInfo(key, int(entry["size"]), entry["last_modified"].timestamp()))
        return iter(sorted(found, key=lambda info: info.key))

    def url_of(self, key: str) -> str:
        return f"{self.url}/{check_key(key)}"

    def sweep_unfinished(self, *, older_than_s: float) -> int:
        return self._uploads.sweep_unfinished(older_than_s=older_than_s) if self._uploads else 0

    def refresh_credentials(self) -> None:
        self._stores.take()
        if self._uploads is not None:
            self._uploads.refresh_credentials()

    def close(self) -> None:
        self._stores.take()
        if self._uploads is not None:
            self._uploads.close()

    @property
    def _store(self) -> Any:
        return self._stores.get()[0]

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _range(self, key: str, rng: ByteRange) -> Any:
        path = self._path(key)
        if not len(rng):  # there are no empty ranges
            self.size(key)
            return b""
        try:
            with self._errors(key) as library:
                found = library.get_range(self._store, path, start=rng.start, end=rng.stop)
        except Damaged as error:
            raise short_object(key, rng, self.size(key) - rng.start) from error
        if len(found) != len(rng):
            raise short_object(key, rng, len(found))
        return found

    def _abort(self, key: str) -> None:
        """Remove the parts of a stream that failed; `sweep_unfinished` finds what is left."""
        if self._uploads is not None:
            with suppress(StorageError):
                self._uploads.abort_uploads(key)

    @contextmanager
    def _errors(self, key: str) -> Iterator[Any]:
        library = _library()
        where = Where(self._where.bucket, self._where.endpoint, key, f"{self.url}/{key}")
        try:
            yield library
        except StorageError:
            raise
        except Exception as error:
            ours = fast_translated(error, where)
            if ours is None:
                raise
            raise ours from error


class ForkSafeStore(WrappingStore):
    """The first store; in a child of a process that has used its library, the second."""

    def __init__(self, fast: ObjectStore, other: ObjectStore) -> None:
        self._fast, self._other = fast, other
        self.url = fast.url

    @property
    def inner(self) -> ObjectStore:  # type: ignore[override]  # the wrapper's attribute, decided anew at each call
        """The one that works here."""
        return self._other if unusable_after_fork() else self._fast


def _connected(connect: Callable[[bool], Any], patient: bool) -> Any:
    global _used_by
    if unusable_after_fork():
        raise ConfigurationError(
            "obstore does not work in a child of a process that has used it: open the store before forking"
        )
    _used_by = os.getpid()
    return connect(patient)


def _library() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise ConfigurationError("this needs the library obstore: pip install 'ftrain-runtime[fast]'") from error
    return obstore


def _filled(blocks: Iterable[Bytes], part_bytes: int, free: list[bytearray]) -> Iterator[tuple[bytearray, int]]:
    """The stream in buffers of one size, and how much of each is used. Taken from `free` if one is there: the library reads a
    part later, while a block's own buffer may be reused.
    """
    buffer, used = bytearray(part_bytes), 0
    for block in blocks:
        view = memoryview(block).cast("B")
        while len(view):
            taken = min(len(view), part_bytes - used)
            memoryview(buffer)[used : used + taken] = view[:taken]
            used, view = used + taken, view[taken:]
            if used == part_bytes:
                yield buffer, used
                buffer, used = free.pop() if free else bytearray(part_bytes), 0
    if used:
        yield buffer, used


def _on_its_way(buffer: bytearray, nbytes: int, free: list[bytearray]) -> Part:
    """A part as the library gets it: it counts as on its way until the library lets go of it, which is when it has arrived."""
    release = traffic.acquire(nbytes)

    def arrived() -> None:
        free.append(buffer)
        release()

    part = np.frombuffer(buffer, np.uint8, nbytes)
    weakref.finalize(part, arrived).atexit = False
    return part
