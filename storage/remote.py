"""Remote stores: s3://, gs:// and az:// as `storage.choice` decides, every other URL by whichever fsspec file system knows it.

The generic store does with fsspec what can be done safely for any of its file systems. fsspec promises little (see
`Capabilities`): a create is checked by reading it back, and what is durable is the server's affair. A file system that matters
gets a module of its own, as S3 has.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from storage.errors import AccessDenied, ConfigurationError, ObjectMissing, StorageError, Unavailable
from storage.objects import (
    MAX_OBJECT_BYTES,
    TEMPORARY_PREFIX,
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

__all__ = ["FsspecStore", "open_remote"]


def open_remote(url: str, options: Mapping[str, object]) -> ObjectStore:
    """The store at `url`, wrapped in retries. `options["retry"]`: a `RetryPolicy`; the others are the backend's."""
    from storage.retry import PATIENT, RetryingStore, RetryPolicy

    rest = dict(options)
    policy = rest.pop("retry", PATIENT)
    if not isinstance(policy, RetryPolicy):
        raise ConfigurationError(f"{url}: the option `retry` is a storage.retry.RetryPolicy, got {policy!r}")
    from storage.choice import choose_s3, cloud_store

    if url.partition("://")[0] in ("s3", "s3a"):
        from storage.s3 import S3Options

        backend = str(rest.pop("backend", "auto"))
        s3 = S3Options.parse(url, rest)
        return RetryingStore(choose_s3(url, s3, backend), policy, shape=s3.parts)
    cloud = cloud_store(url, rest)
    rest.pop("backend", None)
    return RetryingStore(cloud or FsspecStore(url, rest), policy)


class FsspecStore(ObjectStore):
    """Objects below `url` of any fsspec file system."""

    capabilities = Capabilities(atomic_create=False, durable=False, local=False)

    def __init__(self, url: str, options: Mapping[str, object] | None = None) -> None:
        self.url = url.rstrip("/")
        self._options = dict(options or {})
        _check_protocol(url)
        self._opened = PerProcess(self._open_fs)

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        check_size(key, self.size(key), max_bytes)
        with self._errors(key):
            return bytes(self._fs.cat_file(self._path(key)))

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        return self.get_ranges(key, [rng])[0]

    def get_ranges(self, key: str, rngs: Iterable[ByteRange]) -> BytesList:
        size = self.size(key)
        found: BytesList = []
        for rng in rngs:
            if rng.stop > size:
                raise short_object(key, rng, size - rng.start)
            with self._errors(key):
                found.append(bytes(self._fs.cat_file(self._path(key), start=rng.start, end=rng.stop)) if len(rng) else b"")
            if len(found[-1]) != len(rng):
                raise short_object(key, rng, len(found[-1]))
        return found

    def put(self, key: str, data: Bytes) -> None:
        self.put_stream(key, (data,))

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        """Nothing shows before the end: an object store shows it on close; elsewhere it has a temporary name until then."""
        path = self._path(key)
        with self._errors(key):
            if self._object_store:
                return _write(self._fs.open(path, "wb"), blocks)
            folder = self._fs._parent(path)
            temporary = f"{folder}/{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
            self._fs.makedirs(folder, exist_ok=True)
            try:
                size = _write(self._fs.open(temporary, "wb"), blocks)
                self._rename(temporary, path)
            except BaseException:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(temporary)
                raise
        return size

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._errors(key):
            try:
                if self._object_store:
                    self._fs.pipe_file(path, data, mode="create")
                else:
                    self._fs.makedirs(self._fs._parent(path), exist_ok=True)
                    with self._fs.open(path, "xb") as file:
                        file.write(data)
            except FileExistsError:
                return False
        return self.get(key) == data

    def size(self, key: str) -> int:
        with self._errors(key):
            info = self._fs.info(self._path(key))
        if info["type"] != "file":
            raise ObjectMissing(f"there is no object {key} in {self.url}", key)
        return int(info["size"])

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except ObjectMissing:
            return False
        return True

    def delete(self, key: str) -> None:
        with self._errors(key), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            self._fs.rm_file(self._path(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        cut = len(self._root) + 1
        with self._errors(prefix), suppress(FileNotFoundError, NotADirectoryError):
            entries = self._fs.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            found = [ObjectInfo(path[cut:], int(info["size"] or 0), _modified_s(info)) for path, info in entries.items()]
            return iter(sorted((info for info in found if _shows(info.key, prefix)), key=lambda info: info.key))
        return iter(())

    def url_of(self, key: str) -> str:
        return str(self._fs.unstrip_protocol(self._path(key)))

    def close(self) -> None:
        self._opened.take()

    @property
    def _fs(self) -> Any:
        return self._opened.get()[0]

    @property
    def _root(self) -> str:
        return self._opened.get()[1]

    @property
    def _object_store(self) -> bool:
        return bool(self._fs.async_impl)  # those of fsspec are the asynchronous ones; the others have folders and commits

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _open_fs(self) -> tuple[Any, str]:
        import fsspec.core

        with self._errors(""):
            fs, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False, **self._options)
        return fs, str(root).rstrip("/")

    def _rename(self, temporary: str, path: str) -> None:
        from fsspec import AbstractFileSystem

        if type(self._fs).mv is not AbstractFileSystem.mv:
            self._fs.mv(temporary, path)
        else:  # fsspec's own would take a key with * or [ for a pattern
            self._fs.cp_file(temporary, path)
            self._fs.rm_file(temporary)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            text = (
                f"{self.url}: its file system ({type(self._fs).__name__}) cannot do what a store must: {str(error) or 'write'}"
            )
            raise ConfigurationError(f"{text}. Use a folder, s3://, gs:// or az://", key) from error
        except (OSError, ImportError) as error:
            raise _translated(error, self.url, key) from error


def _translated(error: OSError | ImportError, url: str, key: str) -> StorageError:
    what = f"{url}/{key}: {error or type(error).__name__}"
    if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
        return ObjectMissing(f"there is no object {key} in {url}", key)
    if isinstance(error, PermissionError):
        return AccessDenied(f"{what}. Check the credentials and what they may do", key)
    if isinstance(error, ImportError):
        return ConfigurationError(f"{what}. Install the library it names", key)
    return Unavailable(what, key)


def _check_protocol(url: str) -> None:
    """`ConfigurationError` if fsspec has no file system for `url`, or its library is not installed."""
    import fsspec

    try:
        fsspec.get_filesystem_class(url.partition("://")[0])
    except ValueError as error:
        advice = "Use a folder, file://, s3://, or a protocol that fsspec knows (gs://, az://, sftp://, ...)"
        raise ConfigurationError(f"{url!r}: {error}. {advice}") from error
    except ImportError as error:
        raise ConfigurationError(f"{url!r}: {error}") from error


def _shows(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and not key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def _write(file: Any, blocks: Iterable[Bytes]) -> int:
    """Write all blocks and close; if one fails, the file is thrown away rather than finished."""
    from fsspec.spec import AbstractBufferedFile

    size = 0
    try:
        for block in blocks:
            file.write(block)
            size += memoryview(block).nbytes
        file.close()
    except BaseException:
        if isinstance(file, AbstractBufferedFile):  # of an object store: closing it would make the object
            with suppress(OSError, NotImplementedError):
                file.discard()
            file.closed = True
        file.close()
        raise
    return size


def _modified_s(info: Mapping[str, Any]) -> float:
    when = next((info[name] for name in ("mtime", "LastModified", "last_modified", "created") if info.get(name)), 0.0)
    return float(when.timestamp() if hasattr(when, "timestamp") else when if isinstance(when, (int, float)) else 0.0)
