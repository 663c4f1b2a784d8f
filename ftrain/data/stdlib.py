"""A corpus that every machine has: the source text of the running interpreter's own standard library.

A demonstration on random numbers shows nothing, and a download fails behind a firewall. The standard library is a dozen
megabytes of real English and Python. Taken are its `.py` files in the order of their paths, without tests, installed
packages and build-specific files, up to `MOST_BYTES`; each file is a document.

It is prepared on first use into a cache folder of the user, under a name that carries the interpreter's version and the number
and size of the files: another interpreter prepares its own. The finished folder appears by one rename, so several ranks or runs
may start at once: the first wins, the others throw their copy away.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from ftrain.data.errors import DataError
from ftrain.data.prepare import Progress, prepare
from ftrain.data.tokenizer import ByteTokenizer

MOST_BYTES = 8 << 20
"""Files are taken until the next one would exceed this: enough for a demonstration, prepared in about a second."""

STDLIB = "stdlib"
"""The path of this corpus in `data.sources`: the one that every machine has."""

_FORMAT = 1  # of this folder's content; raise it when the choice of files changes
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})


def cache_root() -> str:
    """The user's cache folder for prepared data."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "ftrain")


def stdlib_files(*, most_bytes: int = MOST_BYTES) -> list[Path]:
    """The corpus's files, in order."""
    root = Path(sysconfig.get_path("stdlib"))
    taken, size = [], 0
    for path in sorted(_candidates(root), key=lambda path: path.relative_to(root).as_posix()):
        size += path.stat().st_size
        if size > most_bytes:
            break
        taken.append(path)
    if not taken:
        raise DataError("holds no .py files: this interpreter has no standard library as text", str(root))
    return taken


def ensure_stdlib(root: str, *, progress: Callable[[Progress], None] | None = None) -> str:
    """The prefix of the prepared corpus, prepared if it is not there yet. Any number of processes may call it at once."""
    files = stdlib_files()
    folder = _folder(root, files)
    if not folder.is_dir():
        _prepare(folder, files, progress)
    return str(folder / "bytes")


def find_stdlib(root: str) -> str | None:
    """The prefix of the prepared corpus; None if it is not there yet."""
    folder = _folder(root, stdlib_files())
    return str(folder / "bytes") if folder.is_dir() else None


def _folder(root: str, files: list[Path]) -> Path:
    """Where the corpus of these files belongs."""
    size = sum(path.stat().st_size for path in files)
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Path(root) / f"stdlib-{sys.implementation.name}-{version}-{len(files)}-{size}-v{_FORMAT}"


def _prepare(folder: Path, files: list[Path], progress: Callable[[Progress], None] | None) -> None:
    """Makes the folder appear, whole; it is no error if somebody else's appears first."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        prepare(files, str(draft / "bytes"), tokenizer=ByteTokenizer(), progress=progress)
        draft.rename(folder)  # refuses to replace a folder that holds something
    except OSError as error:
        if not folder.is_dir():
            hint = "the cache folder must be writable (XDG_CACHE_HOME chooses it)"
            raise DataError(
                f"the standard library corpus cannot be prepared ({error.strerror}); {hint}", str(folder)
            ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _candidates(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # never walk through installed packages
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)
