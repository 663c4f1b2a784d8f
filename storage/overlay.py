"""A store on which writing and deleting only seem to happen: what a plan is made with.

Collection is a sequence of decisions that depend on what earlier ones left, so the honest way to say what it *would* do is to
let the very same code do it to something that forgets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

from storage.errors import ObjectMissing
from storage.objects import MAX_OBJECT_BYTES, Bytes, ObjectInfo, ObjectStore, Upload, check_key
from storage.wrapper import WrappingStore

__all__ = ["OverlayStore"]


class OverlayStore(WrappingStore):
    """Reads what is in `inner` under what was done here. `inner` is never changed."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.deleted: dict[str, int] = {}
        """Keys of `inner` that would be gone, and their sizes."""
        self._written: dict[str, bytes] = {}

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        if key in self._written:
            return self._written[key]
        if key in self.deleted:
            raise ObjectMissing(f"there is no object {key} in {self.url}", key)
        return self.inner.get(key, max_bytes=max_bytes)

    def size(self, key: str) -> int:
        return len(self.get(key)) if key in self._written or key in self.deleted else self.inner.size(key)

    def exists(self, key: str) -> bool:
        return key in self._written or (key not in self.deleted and self.inner.exists(key))

    def put(self, key: str, data: Bytes) -> None:
        self._written[check_key(key)] = bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        if self.exists(key):
            return False
        self.put(key, data)
        return True

    def delete(self, key: str) -> None:
        self._written.pop(key, None)
        if key not in self.deleted and self.inner.exists(key):
            self.deleted[key] = self.inner.size(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found = {info.key: info for info in self.inner.list(prefix) if info.key not in self.deleted}
        found |= {key: ObjectInfo(key, len(data), 0.0) for key, data in self._written.items() if key.startswith(prefix)}
        return iter(sorted(found.values(), key=lambda info: info.key))

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        """Only small records are ever written in a plan."""
        self.put(key, b"".join(bytes(block) for block in blocks))
        return len(self._written[key])

    def begin_upload(self, key: str) -> Upload | None:
        self._refuse()

    def sweep_unfinished(self, *, older_than_s: float) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise PermissionError("a plan neither uploads nor sweeps uploads")

    def close(self) -> None:
        """Nothing to do: whoever opened `inner` closes it."""
