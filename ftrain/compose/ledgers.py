"""A run's ledger, wherever its segments are: the local folder, the run's store, or both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ftrain.compose.paths import absolute_url, local_dir_of
from ftrain.compose.stores import open_known
from recovery.events import AnyEvent, LedgerFormatError, decode_line
from recovery.gaps import SegmentsMissing, Told, is_segment, joined
from recovery.ledger import begun, read_all
from storage.errors import StorageError
from storage.objects import ObjectStore

PREFIX = "ledger/"


class StoreSink:
    """The run's store as the place where closed segments go."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, name: str, data: bytes) -> None:
        """Store a closed segment, whole or not at all."""
        self._store.put(PREFIX + name, data)

    def get(self, name: str) -> bytes:
        """The bytes of a segment."""
        return self._store.get(PREFIX + name)

    def names(self) -> Iterable[str]:
        """Names of all stored segments."""
        return [info.key.removeprefix(PREFIX) for info in self._store.list(PREFIX)]


def read_ledger(url: str, local_override: str = "") -> list[Told]:
    """Every event of the run at `url`, oldest first, and what of the ledger is missing.

    Raises StorageError if neither a ledger nor a run is there, LedgerFormatError if what is there is damaged.
    """
    url = absolute_url(url)
    try:
        return _read(url, local_dir_of(url, local_override) / "ledger")
    except LedgerFormatError as error:
        raise LedgerFormatError(f"the ledger of {url} is damaged: {error}") from error


def _read(url: str, folder: Path) -> list[Told]:
    try:
        sink = StoreSink(open_known(url))
        return read_all(folder if folder.is_dir() else None, sink)
    except StorageError:
        if not folder.is_dir():
            raise
        return read_all(folder, None)


class LedgerTail:
    """New events of a live run, read from its local segments as they grow. Holds no lock and disturbs nobody."""

    def __init__(self, folder: Path, *, from_start: bool = False) -> None:
        """`folder` is the ledger's; what is there already is passed over unless `from_start`."""
        self._folder = folder
        self._read: dict[str, int] = {}
        self._open: tuple[str, str] | None = None  # name and path of the segment that was being written at the last look
        if not from_start:
            self._read = {name: path.stat().st_size for name, path in self._segments().items()}

    def _segments(self) -> dict[str, Path]:
        """Segment name (whether open or closed) to file, in the order of writing."""
        if not self._folder.is_dir():
            return {}
        paths = sorted(self._folder.glob("e*.jsonl*"))
        found = {path.name.removesuffix(".open"): path for path in paths}
        return {name: path for name, path in found.items() if is_segment(name)}

    def first(self, whole: Callable[[], Sequence[Told]]) -> list[Told]:
        """What is there at the first look. Only if segments are not in this folder, `whole` is asked: they may be in storage,
        or it says that they are missing.
        """
        last = begun(self._folder)
        here: list[tuple[str, list[AnyEvent]]] = self._by_segment()
        told = list(joined(here, last))
        if not any(isinstance(event, SegmentsMissing) for event in told):
            return told
        events, newest = list(whole()), next((event for _, content in reversed(here) for event in reversed(content)), None)
        while newest is not None and newest in events and events[-1] != newest and not isinstance(events[-1], SegmentsMissing):
            events.pop()  # written since: it comes with the next look
        return events

    def new(self) -> list[AnyEvent]:
        """Whole events written since the last call. A torn line waits for its rest."""
        if self._open is not None:  # while it is being written nothing comes after it: one look is enough
            with contextlib.suppress(FileNotFoundError):
                name, path = self._open
                return self._grown(name, path) if os.stat(path).st_size > self._read.get(name, 0) else []
        return self._of_all()

    def _of_all(self) -> list[AnyEvent]:
        return [event for _, content in self._by_segment() for event in content]

    def _by_segment(self) -> list[tuple[str, list[AnyEvent]]]:
        found: list[tuple[str, list[AnyEvent]]] = []
        newest, segments = max(self._read, default=""), self._segments()
        for name, path in segments.items():
            if name < newest:
                continue  # closed and read: a segment is only ever followed by a later one
            try:
                found.append((name, self._grown(name, str(path))))
            except FileNotFoundError:  # closed, that is renamed, between the two looks
                with contextlib.suppress(FileNotFoundError):  # or empty, and removed by the next coordinator
                    found.append((name, self._grown(name, str(self._folder / name))))
        self._open = next(((name, str(path)) for name, path in reversed(segments.items()) if path.suffix == ".open"), None)
        return found

    def _grown(self, name: str, path: str) -> list[AnyEvent]:
        """What was added to one segment."""
        with open(path, "rb") as file:
            file.seek(self._read.get(name, 0))
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read[name] = self._read.get(name, 0) + whole
        return list(_events(data[:whole]))


def _events(data: bytes) -> Iterable[AnyEvent]:
    for line in data.splitlines():
        try:
            yield decode_line(line)
        except LedgerFormatError:
            continue  # the report says what is wrong with a ledger; a view goes on
