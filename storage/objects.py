"""The one seam to bytes: what every checkpoint, manifest and commit is read and written through.

Why a seam of our own, when fsspec exists: fsspec never syncs local files, its "create" on local disk lets several racing
callers win, and nothing in it says whether a name is visible before its bytes are. A checkpoint stands on exactly these three
promises, so each method here states them, `Capabilities` declares where a backend cannot keep one, and one contract suite
(`storage.contract`) holds every backend to them. Retries, fault injection and counting are wrappers of this seam.

Keys are relative to the store's root and use "/": "checkpoints/step-00000010/e0004-a0007-r00000.pack".
"""

import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from storage.errors import ConfigurationError, Damaged, FormatError, StorageError

__all__ = [
    "MAX_OBJECT_BYTES",
    "TEMPORARY_PREFIX",
    "ByteRange",
    "Bytes",
    "BytesList",
    "Capabilities",
    "ObjectInfo",
    "ObjectStore",
    "Upload",
    "check_key",
    "check_prefix",
    "check_size",
    "check_store",
    "open_store",
    "short_object",
]

Bytes: TypeAlias = bytes | bytearray | memoryview
BytesList: TypeAlias = list[bytes]  # inside a store `list` is a method

MAX_OBJECT_BYTES = 64 * 2**20
"""What `get` reads at most unless told otherwise: the size of the largest manifest. Packs are read by ranges."""

TEMPORARY_PREFIX = ".ftrain-tmp-"
"""No segment of a key may begin with this: local stores give it to files that are not finished yet."""

_CONTROL_OR_BACKSLASH = re.compile(r"[\x00-\x1f\x7f\\]")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `start` (inclusive) to `stop` (exclusive) of an object."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a byte range needs 0 <= start <= stop, got start={self.start}, stop={self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One entry of a listing. `modified_s`: unix seconds by the store's clock, 0.0 where it does not tell."""

    key: str
    size: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which promises of the seam a backend keeps."""

    atomic_create: bool
    """`create` has exactly one winner, and nobody sees the object half written."""
    durable: bool
    """What a write returned for survives a power cut."""
    local: bool
    """`url_of` gives a path on this machine."""
    parts: bool = False
    """`begin_upload` works: a stream is sent, and retried, part by part."""


class Upload(ABC):
    """A multipart upload that is under way. Nothing is visible before `complete`."""

    @abstractmethod
    def put_part(self, number: int, data: Bytes) -> None:
        """Send part `number` (from 1). May be called from several threads, and again for the same number."""

    @abstractmethod
    def complete(self) -> None:
        """Make the object visible, whole. May be called again when the answer to an earlier call was lost."""

    @abstractmethod
    def abort(self) -> None:
        """Throw away all parts. Never raises: it runs when something else already went wrong."""


class ObjectStore(ABC):
    """Named immutable-once-written blobs. Safe to use from several threads; open connections do not cross a fork.

    Every method raises only errors of `storage.errors`, and `ValueError` for a key that breaks the rules of `check_key`.
    """

    url: str
    capabilities: Capabilities

    @abstractmethod
    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """The whole object. `FormatError` if it is larger than `max_bytes`, before it is read into memory."""

    @abstractmethod
    def get_range(self, key: str, rng: ByteRange) -> bytes:
        """Exactly the bytes of `rng`; `Damaged` if the object ends before `rng.stop`."""

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        """`get_range` of each, in the given order; at the same time where the backend gains from it."""
        return [self.get_range(key, rng) for rng in rngs]

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` (writable, contiguous bytes) from byte `start` on: reuses warm memory where the backend can."""
        out[:] = self.get_range(key, ByteRange(start, start + len(out)))

    @abstractmethod
    def put(self, key: str, data: Bytes) -> None:
        """Atomic and durable: on return the object is whole, replaces an earlier one, and survives a power cut."""

    @abstractmethod
    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        """Like `put`, in bounded memory; returns the size. If `blocks` or the store fails, nothing is left behind.

        A block is only read until the next one is asked for, so a caller may reuse one buffer for all of them.
        """

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Create-if-absent, whole and durable. True if and only if *this* call created the object.

        A retry after a lost answer recognises its own object by its bytes: put something into `data` that no other writer has.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Size in bytes; `ObjectMissing` if there is no such object."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether there is such an object now."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object; an absent one is fine."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with the string `prefix`, at any depth, sorted by key. Unfinished writes are hidden."""

    @abstractmethod
    def url_of(self, key: str) -> str:
        """Where other programs find the object: an absolute path, or a URL such as s3://bucket/key."""

    def begin_upload(self, key: str) -> Upload | None:
        """Start a multipart upload; None where the backend streams in its own way."""
        return None

    def abort_uploads(self, key: str) -> None:  # noqa: B027 (most backends have none)
        """Throw away every multipart upload of this object. Only its one writer may call it."""

    def refresh_credentials(self) -> None:  # noqa: B027 (most backends have none)
        """Look for credentials anew with the next request."""

    @property
    def num_retries(self) -> int:
        """Requests that were sent again so far, where that is counted."""
        return 0

    @property
    def endpoint(self) -> str:
        """What answers: promises that have been tried with one store hold for every store of the same endpoint."""
        return self.url

    def sweep_unfinished(self, *, older_than_s: float) -> int:
        """Remove what interrupted writes left unseen (temporary files, open multipart uploads); returns how many.

        Younger ones stay: they may belong to a writer that lives.
        """
        return 0

    def quick(self) -> "ObjectStore":
        """The same store for a person who waits: gives up after seconds where the store itself would ride out minutes."""
        return self

    def child(self, prefix: str) -> "ObjectStore":
        """The same store seen from a deeper root."""
        from storage.wrapper import ChildStore

        return ChildStore(self, prefix)

    def close(self) -> None:  # noqa: B027 (most backends hold nothing)
        """Let go of connections. The store may not be used afterwards."""


def check_key(key: str) -> str:
    """The key itself, or ValueError: no key may name anything outside the store, or an unfinished file of it."""
    if not key or len(key.encode()) > 1024:
        raise ValueError(f"a key has 1 to 1024 bytes, got {key[:80]!r}")
    if _CONTROL_OR_BACKSLASH.search(key):
        raise ValueError(f"a key has no control characters and no backslashes, got {key!r}")
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            raise ValueError(f"a key is relative and has no empty, '.' or '..' segments, got {key!r}")
        if segment.startswith(TEMPORARY_PREFIX):
            raise ValueError(f"{TEMPORARY_PREFIX}* is reserved for unfinished files, got {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """The listing prefix itself, or ValueError: like a key, but it may be empty or end anywhere."""
    check_key(prefix + "x")
    return prefix


def check_size(key: str, size: int, max_bytes: int) -> None:
    """`FormatError` if an object of `size` bytes is larger than the reader is ready for."""
    if size > max_bytes:
        raise FormatError(f"{key} has {size} bytes; an object of its kind has at most {max_bytes}", key)


def short_object(key: str, rng: ByteRange, got: int) -> Damaged:
    """The error for an object that ends inside a range its reader was told it has."""
    message = f"{key} is truncated: bytes {rng.start} to {rng.stop} were wanted, the object ends at {rng.start + got}"
    return Damaged(message, key, pack=key, offset=rng.start + got)


def open_store(url: str, *, options: Mapping[str, object] | None = None) -> ObjectStore:
    """The store at `url`: a local path, file://, memory://, s3:// or any URL that fsspec knows.

    Nothing is contacted or written before the first use; call `check_store` for that. Remote stores come wrapped in retries.
    `options` belong to the backend; for s3:// see `storage.s3.S3Options`. What is not given there comes from the usual AWS
    environment variables and files. An option that would have no effect is a `ConfigurationError`.
    """
    given = dict(options or {})
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "file", url
    if not rest.strip("/") and not (scheme in ("file", "memory") and rest):
        raise ConfigurationError(f"{url!r} names no place: give a folder, or a URL with a bucket such as s3://bucket/run")
    if scheme not in ("file", "memory"):
        from storage.remote import open_remote

        return open_remote(url, given)
    if given:
        raise ConfigurationError(f"{url}: a {scheme} store takes no options, got {', '.join(sorted(given))}")
    if scheme == "memory":
        from storage.memory import MemoryStore

        return MemoryStore(rest)
    from storage.local import LocalStore

    return LocalStore(os.path.abspath(os.path.expanduser(rest)))


def check_store(store: ObjectStore) -> bool:
    """Write, read, create and delete small probe objects, so that a store that cannot work says so before the first step.

    Returns whether its create-if-absent has one winner; where it has not, commits and epochs are read back (see
    `storage.probe`), and a person should know.
    """
    from storage.probe import probe_create

    probe = store.quick()
    token = uuid.uuid4().hex
    key = f"probe-{token}-put"
    data = token.encode()
    try:
        probe.put(key, data)
        if probe.get(key) != data:
            raise StorageError(f"{store.url} gave back other bytes than were written to it; do not keep checkpoints there", key)
        created = f"probe-{token}-create"
        try:
            if not probe.create(created, data) or probe.get(created) != data:
                raise StorageError(f"{store.url} does not keep what it creates; a commit needs it", created)
        finally:
            _delete_quietly(probe, created)
        next(probe.list("probe-"), None)
        return probe_create(store)
    finally:
        _delete_quietly(probe, key)


def _delete_quietly(store: ObjectStore, key: str) -> None:
    try:
        store.delete(key)
    except StorageError:
        return  # the probe's own error is the one to show
