"""The append-only record of a run: written to the local disk first, copied to storage when it can be.

A ledger must survive every process of the run, and a run must survive its storage being away. So an event is one line in the
open segment on local disk; decisions are fsynced before `append` returns (they are carried out only afterwards), everything
else has left the process and survives any kill short of a power loss. Full segments are closed by a rename and handed to the
sink. A line is either whole or, at the end of a segment whose writer died, torn: readers drop a torn tail, and the next
coordinator cuts it off when it closes that segment.

    <folder>/e0003-000000.jsonl        closed: complete lines only, never changes again
    <folder>/e0003-000001.jsonl.open   being written by the coordinator of epoch 3
    <folder>/ledger.lock               flock of the one writer; says which segment was begun last
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from recovery.events import DECISIONS, AnyEvent, Event, LedgerFormatError, RunStarted, decode_line, encode_line
from recovery.files import append_whole
from recovery.gaps import Told, is_segment, joined, parse, segment_name
from recovery.uploader import ByteSink, Uploader

__all__ = ["ByteSink", "Ledger", "LedgerBusyError", "LedgerFormatError", "begun", "read_all", "read_past", "segment_name"]

LOCK = "ledger.lock"
_OPEN_SUFFIX = ".open"
READERS = 16  # requests at a time, where a ledger is read from storage


class LedgerBusyError(RuntimeError):
    """Another live process writes this ledger."""


class Ledger:
    """The writer. One per run at a time, from one thread; the folder is locked while it lives."""

    def __init__(
        self,
        folder: Path,
        sink: ByteSink | None = None,
        epoch: int = 0,
        *,
        after: str | None = None,
        segment_bytes: int = 1 << 20,
        retry_s: float = 1.0,
    ):
        """`after`: the newest segment of the run that there has been (`read_past`), for who reads the next one."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._epoch = epoch
        self._after = after
        self._segment_bytes = segment_bytes
        self._lock = _lock(folder)
        self._fd: int | None = None
        self._size = 0
        _close_abandoned(folder, self._lock)
        self._uploader = Uploader(sink, self._read, first_pause_s=retry_s) if sink is not None else None
        self._number = 1 + max((n for e, n in map(parse, _closed_names(folder)) if e == epoch), default=-1)
        self._submit(_closed_names(folder))

    @property
    def pending(self) -> tuple[str, ...]:
        """Closed segments that are not in the sink yet."""
        return self._uploader.pending if self._uploader is not None else ()

    @property
    def sink_error(self) -> str:
        """Why the last upload failed; empty when all is well."""
        return self._uploader.last_error if self._uploader is not None else ""

    def append(self, *together: Event) -> None:
        """Atomic: all of it is in the file or, after an OSError, none. Durable on return if a decision is among it."""
        lines = b"".join(encode_line(self._linked(event)) for event in together)
        fd, begins = self._open(), self._size == 0
        self._size = append_whole(fd, lines, self._size)
        if begins:
            _write_begun(self._lock, segment_name(self._epoch, self._number))
        if any(isinstance(event, DECISIONS) for event in together):
            os.fdatasync(fd)
        if self._size >= self._segment_bytes:
            self.rotate()

    def _linked(self, event: Event) -> Event:
        return replace(event, after=self._after) if isinstance(event, RunStarted) and self._after is not None else event

    def rotate(self) -> None:
        """Close the open segment, if it holds anything, and queue it for the sink."""
        if self._fd is None:
            return
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = None
        name = segment_name(self._epoch, self._number)
        _rename(self._folder / (name + _OPEN_SUFFIX), self._folder / name)
        self._number += 1
        self._submit([name])

    def close(self, *, timeout_s: float = 5.0) -> bool:
        """Close the segment, wait a bounded time for the sink, unlock. Says whether everything is in the sink."""
        self.rotate()
        done = self._uploader.drain(timeout_s) if self._uploader is not None else True
        os.close(self._lock)
        return done

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self) -> int:
        if self._fd is None:
            path = self._folder / (segment_name(self._epoch, self._number) + _OPEN_SUFFIX)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = 0
            _fsync_folder(self._folder)
        return self._fd

    def _submit(self, names: list[str]) -> None:
        if self._uploader is not None:
            self._uploader.submit(names)

    def _read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()


def read_all(folder: Path | None, sink: ByteSink | None = None) -> list[Told]:
    """Every event of the run, oldest first, from the folder, the sink, or both; a live writer does not disturb."""
    return read_past(folder, sink)[0]


def read_past(folder: Path | None, sink: ByteSink | None = None) -> tuple[list[Told], str]:
    """The same, and the name of the newest segment that there has been (empty: none)."""
    last = begun(folder) if folder is not None else ""  # before the folder is listed: it is there by then
    local = _local_names(folder) if folder is not None else set()
    names = local | {name for name in (sink.names() if sink is not None else ()) if is_segment(name)}
    ordered = sorted(names, key=parse)
    fetched = _fetched(sink, [name for name in ordered if name not in local]) if sink is not None else {}

    def segments() -> Iterator[tuple[str, Iterator[AnyEvent]]]:
        for name in ordered:
            data = _read_local(folder, name) if folder is not None and name in local else fetched.pop(name)
            yield name, decode_segment(name, data)

    return list(joined(segments(), last)), max([*ordered, *([last] if last else [])], key=parse, default="")


def begun(folder: Path) -> str:
    """Which segment of this folder was begun last; empty if that is not told."""
    try:
        name = (folder / LOCK).read_text(errors="replace").strip()
    except OSError:
        return ""
    return name if is_segment(name) else ""


def _write_begun(lock: int, name: str) -> None:
    text = f"{name}\n".encode()
    with contextlib.suppress(OSError):  # no room: it serves only to miss a segment that is lost
        os.pwrite(lock, text, 0)
        os.ftruncate(lock, len(text))


def _fetched(sink: ByteSink, names: Sequence[str]) -> dict[str, bytes]:
    """Several at a time: a run of weeks has a segment for each of thousands of checkpoints, and each is a request."""
    if not names:
        return {}
    from concurrent.futures import ThreadPoolExecutor  # who writes a ledger needs none

    with ThreadPoolExecutor(READERS, thread_name_prefix="ledger") as pool:
        return dict(zip(names, pool.map(sink.get, names), strict=True))


def decode_segment(name: str, data: bytes) -> Iterator[AnyEvent]:
    """The events of one segment. A torn tail is dropped; any other line that is no event is a LedgerFormatError."""
    whole = data[: _whole_lines(data)]
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            yield decode_line(line)
        except LedgerFormatError as error:
            raise LedgerFormatError(f"{name}, line {number}: {error}") from error


def _whole_lines(data: bytes) -> int:
    """How many bytes at the start are complete lines: what a killed writer or a lost page left behind them is no line."""
    end = data.rfind(b"\n") + 1
    zeros = data.find(b"\0")  # a file that grew before its page was written reads as zeros
    return end if zeros < 0 else min(end, data.rfind(b"\n", 0, zeros) + 1)


def _lock(folder: Path) -> int:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise LedgerBusyError(f"{folder} is being written by another live process; stop that run first") from error
    return fd


def _close_abandoned(folder: Path, lock: int) -> None:
    """Close the segments that a dead coordinator left open. We hold the lock, so nobody writes them."""
    for path in sorted(folder.glob(f"e*.jsonl{_OPEN_SUFFIX}")):
        size = _whole_lines(path.read_bytes())
        if size == 0:
            path.unlink()
            if begun(folder) == path.name.removesuffix(_OPEN_SUFFIX):
                _write_begun(lock, "")
            continue
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
        _rename(path, path.with_name(path.name.removesuffix(_OPEN_SUFFIX)))
    _fsync_folder(folder)


def _closed_names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir() if is_segment(path.name)), key=parse)


def _local_names(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    names = {path.name.removesuffix(_OPEN_SUFFIX) for path in folder.iterdir()}
    return {name for name in names if is_segment(name)}


def _read_local(folder: Path, name: str) -> bytes:
    for candidate in (name, name + _OPEN_SUFFIX, name):  # it may be closed, that is renamed, while we look
        try:
            return (folder / candidate).read_bytes()
        except FileNotFoundError:
            continue
    return b""  # an abandoned empty segment, just removed by the next coordinator


def _rename(old: Path, new: Path) -> None:
    os.rename(old, new)
    _fsync_folder(new.parent)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
