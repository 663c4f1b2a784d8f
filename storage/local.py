"""Files on a local disk that are either whole and on the platter, or not there.

A file gets its name only after its bytes are synced, and a name counts only after its folder is synced: neither fsspec's local
files nor zarr's stores sync at all, so a power cut after their "written" may leave an empty or missing file.

Where the file system can (ext4, xfs, btrfs, tmpfs), the bytes go into a file without a name (O_TMPFILE), which the kernel
removes by itself if the writer is killed. Elsewhere (NFS) they go into a temporary name in the same folder; what a killed
writer leaves of these is hidden from listings and removed by `sweep_unfinished`. For the same reason `delete` leaves empty
folders: a writer may have an unnamed file in one.

The name is given by `link`, which refuses to overwrite: that is create-if-absent with exactly one winner, on NFS too. `rename`
overwrites, and is what `put` uses. A file system without hard links cannot have both a whole file and a single winner; there
`create` opens the final name exclusively, and `capabilities.atomic_create` says False from then on.
"""

import errno
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import StorageError
from storage.local_errors import translated
from storage.local_write import write_all
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
from storage.traffic import traffic

__all__ = ["LocalStore"]

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS)
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FILE_MODE, _FOLDER_MODE = 0o666, 0o777  # the user's umask decides, as for any file they write


class LocalStore(ObjectStore):
    """Objects are files below `root`, which is made on the first write."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._unnamed_files = hasattr(os, "O_TMPFILE")
        self.capabilities = Capabilities(atomic_create=True, durable=True, local=True)

    def get(self, key: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        with self._errors(key), self._open(key) as fd:
            size = os.fstat(fd).st_size
            check_size(key, size, max_bytes)
            return self._read(fd, key, ByteRange(0, size))

    def get_range(self, key: str, rng: ByteRange) -> bytes:
        return self.get_ranges(key, [rng])[0]

    def get_ranges(self, key: str, rngs: Iterable[ByteRange]) -> BytesList:
        with self._errors(key), self._open(key) as fd:
            return [self._read(fd, key, rng) for rng in rngs]

    def get_into(self, key: str, start: int, out: memoryview) -> None:
        view = out.cast("B")
        with self._errors(key), self._open(key) as fd:
            done = 0
            while done < len(view):
                got = os.preadv(fd, [view[done:]], start + done)
                if got == 0:
                    raise short_object(key, ByteRange(start, start + len(view)), done)
                done += got

    def put(self, key: str, data: Bytes) -> None:
        self.put_stream(key, (data,))

    def put_stream(self, key: str, blocks: Iterable[Bytes]) -> int:
        path = self._path(key)
        with self._errors(key):
            self._make_folders(path.parent)
            with self._unfinished(path.parent) as (fd, temporary):
                size = write_all(fd, traffic.paced(blocks), key, path)
                self._name(fd, temporary, path)
            _sync_folder(path.parent)
        return size

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with self._errors(key):
            self._make_folders(path.parent)
            if self.capabilities.atomic_create:
                with self._unfinished(path.parent) as (fd, temporary):
                    write_all(fd, (data,), key, path)
                    created = self._link(fd, temporary, path)
                if created is not None:
                    if created:
                        _sync_folder(path.parent)
                    return created
            return self._create_in_place(path, data, key)

    def size(self, key: str) -> int:
        with self._errors(key), self._open(key) as fd:
            return os.fstat(fd).st_size

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._errors(key), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()
            _sync_folder(path.parent)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder, _, start = check_prefix(prefix).rpartition("/")
        with self._errors(prefix):
            yield from _walk(self.root / folder, folder + "/" if folder else "", start)

    def url_of(self, key: str) -> str:
        return str(self._path(key))

    def sweep_unfinished(self, *, older_than_s: float) -> int:
        newest = time.time() - older_than_s
        num_removed = 0
        with self._errors(""):
            for folder, _, names in os.walk(self.root):
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):
                        if name.startswith(TEMPORARY_PREFIX) and path.stat().st_mtime <= newest:
                            path.unlink()
                            num_removed += 1
        return num_removed

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translated(error, self.root, key) from error

    @contextmanager
    def _open(self, key: str) -> Iterator[int]:
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except NotADirectoryError as error:  # a part of the key is a file: then there is no such object
            raise FileNotFoundError(errno.ENOENT, "no such file", key) from error
        try:
            if not os.path.isfile(fd):
                raise FileNotFoundError(errno.ENOENT, "no such file", key)
            yield fd
        finally:
            os.close(fd)

    @staticmethod
    def _read(fd: int, key: str, rng: ByteRange) -> bytes:
        data = os.pread(fd, len(rng), rng.start)
        if len(data) == len(rng):
            return data
        pieces, done = [data], len(data)  # a read stops at 2 GiB, and may stop early on network file systems
        while pieces[-1] and done < len(rng):
            pieces.append(os.pread(fd, len(rng) - done, rng.start + done))
            done += len(pieces[-1])
        if done < len(rng):
            raise short_object(key, rng, done)
        return b"".join(pieces)

    def _make_folders(self, folder: Path) -> None:
        """Make `folder` and its parents, each new name synced: a lost folder would take its synced files with it."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            with suppress(FileExistsError):
                self._make_folder(path)
            _sync_folder(path.parent)

    @staticmethod
    def _make_folder(path: Path) -> None:
        """Make one folder below one that is there. A file system such as /proc, which knows no new names, says "not there"."""
        try:
            path.mkdir(_FOLDER_MODE)
        except FileNotFoundError as error:
            raise PermissionError(errno.EACCES, "no folder can be made there", str(path)) from error

    @contextmanager
    def _unfinished(self, folder: Path) -> Iterator[tuple[int, Path]]:
        """A new file that has no name, or only the temporary one; gone at the end unless it was given another."""
        temporary = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        fd = self._open_unfinished(folder, temporary)
        try:
            yield fd, temporary
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
            os.close(fd)

    def _open_unfinished(self, folder: Path, temporary: Path) -> int:
        if self._unnamed_files:
            try:
                return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, _FILE_MODE)
            except OSError as error:
                if error.errno not in _NO_TMPFILE or not folder.is_dir():
                    raise
                self._unnamed_files = False
        return os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _FILE_MODE)

    def _name(self, fd: int, temporary: Path, path: Path) -> None:
        """Give the unfinished file its name, replacing the file that has it. A reader sees the old or the new one."""
        if not temporary.exists():
            _link_open_file(fd, temporary)
        os.replace(temporary, path)

    def _link(self, fd: int, temporary: Path, path: Path) -> bool | None:
        """Give the unfinished file its name if nobody has it. None: this file system has no links."""
        try:
            if temporary.exists():
                os.link(temporary, path)
            else:
                _link_open_file(fd, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            self.capabilities = Capabilities(atomic_create=False, durable=True, local=True)
            return None
        return True

    @staticmethod
    def _create_in_place(path: Path, data: bytes, key: str) -> bool:
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _FILE_MODE)
        except FileExistsError:
            return False
        try:
            write_all(fd, (data,), key, path)
        except (OSError, StorageError):
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        _sync_folder(path.parent)
        return True


def _link_open_file(fd: int, path: Path) -> None:
    # The folder's descriptor makes Python call linkat with AT_SYMLINK_FOLLOW, without which the /proc link itself is linked.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _walk(folder: Path, key_prefix: str, start: str) -> Iterator[ObjectInfo]:
    """Files below `folder` whose first segment begins with `start`, in the order of their keys."""
    try:
        entries = [entry for entry in os.scandir(folder) if entry.name.startswith(start)]
    except (FileNotFoundError, NotADirectoryError):
        return  # nothing was written yet, or it was removed meanwhile
    # A folder sorts as "name/": keys are compared whole, and "a-b" comes before "a/b".
    for name, entry in sorted((entry.name + "/" if entry.is_dir() else entry.name, entry) for entry in entries):
        if name.endswith("/"):
            yield from _walk(folder / entry.name, f"{key_prefix}{name}", "")
        elif not name.startswith(TEMPORARY_PREFIX):
            with suppress(FileNotFoundError):
                found = entry.stat()
                yield ObjectInfo(key_prefix + name, found.st_size, found.st_mtime)
