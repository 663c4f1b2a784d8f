"""Stores made of other stores: everything that is added to the seam (retries, faults, counting, a deeper root) wraps it.

`WrappingStore` hands each call to the store inside; a wrapper overrides only what it changes, so a new method of the seam
needs no change in the wrappers. What has a default in the seam is passed on explicitly, lest a wrapper take the slower way.
"""

from collections.abc import Iterable, Iterator, Sequence

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
)

__all__ = ["ChildStore", "WrappingStore"]


class WrappingStore(ObjectStore):
    """Passes every call on to `inner`."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.url = inner.url

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]  # asked each time: a backend may find out on first use
        return self.inner.capabilities

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        return self.inner.get(key, max_bytes=max_bytes)

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        return self.inner.get_range(key, rng)

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        return self.inner.get_ranges(key, rngs)

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        self.inner.get_into(key, start, out)

    def put(self, key: str, data: Bytes) -> None:
        self.inner.put(key, data)

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        return self.inner.put_stream(key, blocks)

    def create(self, key: str, data: bytes) -> bool:
        return self.inner.create(key, data)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def exists(self, key: str) -> bool:
        return self.inner.exists(key)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def url_of(self, key: str) -> str:
        return self.inner.url_of(key)

    def begin_upload(self, key: str) -> Upload | None:
        return self.inner.begin_upload(key)

    def abort_uploads(self, key: str) -> None:
        self.inner.abort_uploads(key)

    def refresh_credentials(self) -> None:
        self.inner.refresh_credentials()

    @property
    def num_retries(self) -> int:
        return self.inner.num_retries

    @property
    def endpoint(self) -> str:
        return self.inner.endpoint

    def sweep_unfinished(self, *, older_than_s: float) -> int:
        return self.inner.sweep_unfinished(older_than_s=older_than_s)

    def close(self) -> None:
        self.inner.close()


class ChildStore(WrappingStore):
    """A store whose root is the folder `prefix` of another one. Closing it leaves the other one open."""

    def __init__(self, parent: ObjectStore, prefix: str) -> None:
        super().__init__(parent)
        self._prefix = check_key(prefix.rstrip("/")) + "/"
        self.url = f"{parent.url.rstrip('/')}/{self._prefix[:-1]}"

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        return self.inner.get(self._full(key), max_bytes=max_bytes)

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        return self.inner.get_range(self._full(key), rng)

    def get_ranges(self, key: str, rngs: Sequence[ByteRange]) -> BytesList:
        return self.inner.get_ranges(self._full(key), rngs)

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        self.inner.get_into(self._full(key), start, out)

    def put(self, key: str, data: Bytes) -> None:
        self.inner.put(self._full(key), data)

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        return self.inner.put_stream(self._full(key), blocks)

    def create(self, key: str, data: bytes) -> bool:
        return self.inner.create(self._full(key), data)

    def size(self, key: str) -> int:
        return self.inner.size(self._full(key))

    def exists(self, key: str) -> bool:
        return self.inner.exists(self._full(key))

    def delete(self, key: str) -> None:
        self.inner.delete(self._full(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        cut = len(self._prefix)
        for info in self.inner.list(self._prefix + check_prefix(prefix)):
            yield ObjectInfo(info.key[cut:], info.size, info.modified_s)

    def url_of(self, key: str) -> str:
        return self.inner.url_of(self._full(key))

    def begin_upload(self, key: str) -> Upload | None:
        return self.inner.begin_upload(self._full(key))

    def abort_uploads(self, key: str) -> None:
        self.inner.abort_uploads(self._full(key))

    def quick(self) -> ObjectStore:
        return ChildStore(self.inner.quick(), self._prefix)

    def close(self) -> None:
        """Nothing to do: the parent owns the connections."""
