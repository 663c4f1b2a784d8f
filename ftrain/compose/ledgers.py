"""A run's ledger, wherever its segments are: the local folder, the run's store, or both."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ftrain.compose.paths import absolute_url, local_dir_of
from ftrain.compose.stores import open_known
from recovery.events import AnyEvent, LedgerFormatError, decode_line
from recovery.ledger import read_all
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


def read_ledger(url: str, local_override: str = "") -> list[AnyEvent]:
    """Every event of the run at `url`, oldest first. Raises StorageError if neither a ledger nor a run is there."""
    url = absolute_url(url)
    folder = local_dir_of(url, local_override) / "ledger"
    sink: StoreSink | None = None
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
        if not from_start:
            self._read = {name: path.stat().st_size for name, path in self._segments().items()}

    def _segments(self) -> dict[str, Path]:
        """Segment name (whether open or closed) to file, in the order of writing."""
        if not self._folder.is_dir():
            return {}
        paths = sorted(self._folder.glob("e*.jsonl*"))
        return {path.name.removesuffix(".open"): path for path in paths}

    def new(self) -> list[AnyEvent]:
        """Whole events written since the last call. A torn line waits for its rest."""
        events: list[AnyEvent] = []
        newest = max(self._read, default="")
        for name, path in self._segments().items():
            if name < newest:
                continue  # closed and read: a segment is only ever followed by a later one
            try:
                with path.open("rb") as file:
                    file.seek(self._read.get(name, 0))
                    data = file.read()
            except FileNotFoundError:  # it was closed (renamed) between the two looks: the next call reads it
                continue
            whole = data.rfind(b"\n") + 1
            self._read[name] = self._read.get(name, 0) + whole
            events += _events(data[:whole])
        return events


def _events(data: bytes) -> Iterable[AnyEvent]:
    for line in data.splitlines():
        try:
            yield decode_line(line)
        except LedgerFormatError:
            continue  # the report says what is wrong with a ledger; a view goes on
