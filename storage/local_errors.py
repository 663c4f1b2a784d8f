"""What an errno of a local file system means to a person, and which class of our tree it is."""

import errno
import os
from pathlib import Path

from storage.errors import AccessDenied, ConfigurationError, Damaged, NoSpace, ObjectMissing, StorageError, Unavailable

__all__ = ["no_space", "translated"]

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NETWORK = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EREMOTEIO, errno.ECONNRESET, errno.EHOSTDOWN)


def translated(error: OSError, root: Path, key: str) -> StorageError:
    """The error of our tree for `error`, which happened to object `key` of the store at `root`."""
    path = root / key
    code, reason = error.errno, error.strerror or str(error)
    if code in _FULL:
        return no_space(error, path.parent, key)
    if code in _DENIED:
        return AccessDenied(f"{_who()} may not use {path}: {reason}. {_denied_advice(code)}", key)
    if code == errno.ENOENT:
        return ObjectMissing(f"there is no object {key} in {root}", key)
    if code == errno.ENOTDIR and (file := next((place for place in path.parents if place.is_file()), None)):
        return ConfigurationError(f"{file} is a file, where a folder is wanted. Choose another run.url, or move it away", key)
    if code in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY):
        message = f"{path}: {reason}. A name cannot be both a file and a folder; choose another run.url or move what is there"
        return ConfigurationError(message, key)
    if code == errno.ENAMETOOLONG:
        return ConfigurationError(f"{path}: {reason}. Choose a shorter run.url", key)
    if code == errno.EIO:
        return Damaged(f"the disk failed on {path}: {reason}. See the kernel's log; the device may be failing", key, pack=key)
    if code in _NETWORK:
        return Unavailable(f"the file system of {path} does not answer: {reason}", key)
    return StorageError(f"{path}: {reason}", key)


def no_space(error: OSError, folder: Path, key: str, *, written: int = 0, needed: int | None = None) -> NoSpace:
    """The error for a full disk or quota, with what was needed and what was free when it happened."""
    quota = error.errno == errno.EDQUOT
    free = None if quota else _free_bytes(folder)
    what = "the disk quota is used up" if quota else "no space left on the device"
    sizes = f"{_mib(written)} were written"
    if needed is not None:
        sizes += f", at least {_mib(needed)} were needed"
    if free is not None:
        sizes += f", {_mib(free)} are free"
    advice = "Free some space, keep fewer checkpoints, or choose another run.url; nothing partial was left behind"
    return NoSpace(
        f"{what} of {folder} while writing {key or 'a file'}: {sizes}. {advice}", key, needed_bytes=needed, free_bytes=free
    )


def _denied_advice(code: int) -> str:
    if code == errno.EROFS:
        return "The file system is mounted read-only; choose another folder or remount it"
    return "Choose a folder that this user may write to, or change its owner or mode"


def _who() -> str:
    return f"user {os.geteuid()}"


def _free_bytes(folder: Path) -> int | None:
    for place in (folder, *folder.parents):  # the folder itself may be what could not be made
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
