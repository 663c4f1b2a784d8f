"""A store that nobody can write to for a moment, for a drilled run alone.

The drill has mounts of its own (a mount namespace), which the runs that it starts share and nobody else sees. There the folder
of the checkpoints is mounted over itself, read-only. What was opened before stays open, as when a file server goes away. It
needs root; without it a drill leaves this kind of strike out.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
MNT_DETACH = 2


def private_mounts() -> bool:
    """Whether this thread, and every process that it starts from now on, see mounts of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.unshare(CLONE_NEWNS) == 0 and libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None) == 0)


def begin_outage(folder: Path) -> None:
    """`folder` is read-only from now on. OSError if that cannot be."""
    _mount(folder, folder, MS_BIND)
    _mount(None, folder, MS_BIND | MS_REMOUNT | MS_RDONLY)


def end_outage(folder: Path) -> None:
    """It can be written to again. OSError if it was not read-only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(folder), MNT_DETACH):
        raise OSError(ctypes.get_errno(), f"umount {folder}")


def _mount(source: Path | None, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    what = os.fsencode(source) if source is not None else None
    if libc.mount(what, os.fsencode(target), None, ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"mount {target}")
