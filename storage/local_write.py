"""Bytes into a local file and onto its disk, at the disk's pace and for little processor time.

Through the page cache each byte is copied once more by the kernel, into pages that training would have used, and the disk
begins late. So large, aligned blocks (an arena's are) are handed to the disk where they lie (O_DIRECT): 0.04 instead of 0.22
CPU seconds per GiB here, and 0.5 instead of 0.9 seconds (medians of four in turns, busy machine). What is small or not aligned,
and file systems that refuse it, go through the page cache, from where the disk is set to work early.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from storage.local_errors import no_space
from storage.objects import Bytes

__all__ = ["DIRECT_BYTES", "write_all"]

WRITEBACK_BYTES = 32 << 20
"""After so many bytes the disk is set to work. Without it the kernel waits for `fsync`: 1.16 instead of 0.45 s per GiB here."""

DIRECT_BYTES = 1 << 20
"""Smaller blocks go through the page cache: a disk answers them one by one."""

ALIGNMENT = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def write_all(fd: int, blocks: Iterable[Bytes], key: str, path: Path) -> int:
    """Write and sync; returns the size. That so far goes into the error: a full disk is the one failure to expect here."""
    size = pending = 0
    file = _File(fd)
    try:
        for block in blocks:
            view = memoryview(block).cast("B")
            pending = len(view)
            while pending:
                written = file.write(view[len(view) - pending :], size)
                pending -= written
                size += written
        os.fsync(fd)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(error, path.parent, key, written=size, needed=size + pending) from error
        raise
    return size


class _File:
    """A file being written from its beginning to its end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._may_be_direct, self._direct = bool(_O_DIRECT), False
        self._cached = 0  # bytes in the page cache that the disk has not been told of

    def write(self, view: memoryview, at: int) -> int:
        """Write some of `view` at `at`, where the file ends; returns how many bytes."""
        whole = len(view) // ALIGNMENT * ALIGNMENT
        fits = whole >= DIRECT_BYTES and at % ALIGNMENT == 0 and _address(view) % ALIGNMENT == 0
        if fits and self._set_direct(wanted=True):
            try:
                return os.write(self._fd, view[:whole])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._may_be_direct = False  # this file system, or disk, wants another alignment
        self._set_direct(wanted=False)
        written = os.write(self._fd, view)
        self._cached += written
        if self._cached >= WRITEBACK_BYTES:
            _start_writeback(self._fd, at + written - self._cached, self._cached)
            self._cached = 0
        return written

    def _set_direct(self, *, wanted: bool) -> bool:
        """Whether the file is written past the page cache from now on."""
        if wanted != self._direct and (self._may_be_direct or not wanted):
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT if wanted else flags & ~_O_DIRECT)
                self._direct = wanted
            except OSError:
                self._may_be_direct = False
        return self._direct and wanted


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _start_writeback(fd: int, start: int, nbytes: int) -> None:
    """Let the disk work on these bytes while the next are written. Only a hint; pages that are not clean are not dropped."""
    with suppress(OSError):
        os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)
