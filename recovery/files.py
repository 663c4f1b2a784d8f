"""Files that other processes read at any moment: they see what is whole, never a part, also where a disk is full.

Not durable: what must outlive a power cut belongs into the ledger or into storage.
"""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """`path` holds `data` from now on. `mode` is that of a new file, less the umask. Raises OSError."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    os.replace(draft, path)


def append_whole(fd: int, data: bytes, size: int) -> int:
    """The file of `size` bytes behind `fd` (opened to append, by one writer) grows by `data`; its new size.

    After an OSError none of it is there: half a line would damage every line after it.
    """
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.ftruncate(fd, size)
        raise
    return size + len(data)
