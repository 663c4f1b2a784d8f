"""Small files that other processes read at any moment: they see the old content or the new one, never a part.

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
