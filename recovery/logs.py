"""A rank's log must not fill the disk of a run that never ends: its middle is given back to the file system, in place.

The rank writes into the file itself, and nothing stands between the two that could die or hold it up. So the file cannot be
renamed, nor cut without losing what is written meanwhile; but a hole can be made in what was written long ago. It keeps its
length, so whoever follows it goes on at the same place. What stays is the beginning (how it was started), a line that says what
is missing, and the newest half of the limit and more.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path

LIMIT = "FTRAIN_LOG_MIB"
DEFAULT_MIB = 1024
MOST_DIGITS = 16
HEAD, PAGE = 1 << 20, 4096
LEAST = 4 * HEAD
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, and with it FALLOC_FL_KEEP_SIZE


def limit_in(environment: Mapping[str, str]) -> int:
    """Bytes that a rank's log may take on the disk; 0: as many as it likes. What is `misread` counts as nothing said."""
    said = environment.get(LIMIT, "")
    mib = DEFAULT_MIB if not said or misread(environment) else int(said)
    return max(LEAST, mib << 20) if mib else 0


def misread(environment: Mapping[str, str]) -> str:
    """That the limit is given and cannot be read; empty if it is not so."""
    said = environment.get(LIMIT, "")
    if not said or (said.isdecimal() and len(said) < MOST_DIGITS):
        return ""
    return f"{LIMIT}={said[:MOST_DIGITS]}: allowed: a whole number of MiB, or 0 for no limit; {DEFAULT_MIB} is used"


def trim(path: Path, limit: int) -> int:
    """Give back the middle of a log that takes more than `limit` bytes; returns the bytes that are missing from it then (0: it
    was left as it is). Raises OSError if the file system cannot do it.
    """
    with path.open("r+b", buffering=0) as file:
        held = os.fstat(file.fileno())
        if not limit or held.st_blocks * 512 <= limit:
            return 0
        begin, end = HEAD + PAGE, (held.st_size - limit // 2) // PAGE * PAGE
        if end <= begin:
            return 0
        _punch(file.fileno(), begin, end - begin)
        os.pwrite(file.fileno(), _note(end - HEAD), HEAD)
        return end - HEAD


def _note(nbytes: int) -> bytes:
    """A page that says what is missing."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    text = f"\n[ftrain: {nbytes:,} bytes of this log, from here on, were dropped at {when}: {LIMIT} limits what it takes]\n"
    return text.encode().ljust(PAGE - 1) + b"\n"


def _punch(fd: int, offset: int, nbytes: int) -> None:
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, PUNCH_HOLE, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class LogLimit:
    """The limit of an agent's ranks. One that cannot be read is reported once, in the agent's own log, and so is a file system
    that cannot keep it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._limit = limit_in(environment)
        self._told = False
        self._misread = misread(environment)

    def look(self, paths: list[Path]) -> str:
        """Trim what has grown too long; returns what a person should know of it, once."""
        if self._misread:
            said, self._misread = self._misread, ""
            return said
        for path in paths if self._limit else ():
            try:
                trim(path, self._limit)
            except FileNotFoundError:
                continue
            except OSError as error:
                told, self._told = self._told, True
                return "" if told else f"{path} is over {LIMIT} and cannot be cut short: {error}"
        return ""
