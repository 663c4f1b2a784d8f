"""A store in this process's memory: the model that every other backend is compared with, and the fast one for tests.

Stores of the same name share their objects, so that opening memory://x twice sees the same run, as opening a folder twice does.
"""

import threading
import time
from collections.abc import Iterable, Iterator

from storage.errors import ObjectMissing
from storage.objects import (
    MAX_OBJECT_BYTES,
    ByteRange,
    Bytes,
    Capabilities,
    ObjectInfo,
    ObjectStore,
    check_key,
    check_prefix,
    check_size,
    short_object,
)

__all__ = ["MemoryStore"]

_Objects = dict[str, tuple[bytes, float]]
_shared: dict[str, _Objects] = {}
_lock = threading.Lock()  # one for all stores: they are for tests, and a dictionary write is short


class MemoryStore(ObjectStore):
    """Objects in a dictionary. `name` None makes a store that nobody else sees."""

    capabilities = Capabilities(atomic_create=True, durable=False, local=False)

    def __init__(self, name: str | None = None) -> None:
        with _lock:
            self._objects: _Objects = {} if name is None else _shared.setdefault(name.strip("/"), {})
        self.url = f"memory://{(name or 'private').strip('/')}"

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        data = self._data(key)
        check_size(key, len(data), max_bytes)
        return data

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        found = self._data(key)[rng.start : rng.stop]
        if len(found) != len(rng):
            raise short_object(key, rng, len(found))
        return found

    def put(self, key: str, data: Bytes) -> None:
        with _lock:
            self._objects[check_key(key)] = (bytes(data), time.time())

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        check_key(key)
        data = b"".join([bytes(block) for block in blocks])
        self.put(key, data)
        return len(data)

    def create(self, key: str, data: bytes) -> bool:
        with _lock:
            entry = (bytes(data), time.time())
            return self._objects.setdefault(check_key(key), entry) is entry

    def size(self, key: str) -> int:
        return len(self._data(key))

    def exists(self, key: str) -> bool:
        return check_key(key) in self._objects

    def delete(self, key: str) -> None:
        with _lock:
            self._objects.pop(check_key(key), None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with _lock:
            found = [ObjectInfo(key, len(data), t) for key, (data, t) in self._objects.items() if key.startswith(prefix)]
        return iter(sorted(found, key=lambda info: info.key))

    def url_of(self, key: str) -> str:
        return f"{self.url}/{check_key(key)}"

    def _data(self, key: str) -> bytes:
        entry = self._objects.get(check_key(key))
        if entry is None:
            raise ObjectMissing(f"there is no object {key} in {self.url}", key)
        return entry[0]
