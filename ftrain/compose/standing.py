"""What a run that is started again brings with it from its past, told before anything is forked.

Two things surprise whoever left a run alone for a night. Places that somebody took away stay away, so the run starts smaller
than its config says. And a run that has done all of its steps has nothing left to do, which need not cost a start to find out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftrain.compose.layouts import RESIZABLE
from ftrain.compose.ledgers import read_ledger
from ftrain.compose.skips import missed, ranges
from ftrain.compose.stores import open_configured
from ftrain.config import Config
from recovery.events import ConfigChanged, Event, LedgerFormatError, PlaceLost, PlaceReturned, RunStarted
from recovery.gaps import SegmentsMissing
from recovery.places import WHOLE_NODE, Place
from recovery.state import fold
from storage.errors import StorageError
from storage.run import RunStore

READ_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """A place that is still taken away. Times in unix seconds; `until` None: until a person gives it back."""

    place: Place
    since: float
    reason: str
    until: float | None

    def line(self, run_url: str) -> str:
        """Which, since when, why, and how it comes back."""
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        what = f"the whole of {self.place}" if self.place.slot == WHOLE_NODE else str(self.place)
        if self.until is not None:
            back = f"back by itself at {time.strftime('%H:%M:%S', time.localtime(self.until))}, or sooner"
        else:
            back = "back when the run is under way"
        return f"{what} is out since {begun} ({self.reason}); {back}: ftrain admit {run_url} {self.place}"


def away(events: Iterable[Event], now_t: float) -> list[Away]:
    """The places that are out at `now_t`, in the order in which they went."""
    found: dict[Place, Away] = {}
    for event in events:
        if isinstance(event, PlaceLost | PlaceReturned):
            place = Place(node=event.node, slot=event.slot)
            found = {other: it for other, it in found.items() if not place.covers(other)}
            if isinstance(event, PlaceLost):
                found[place] = Away(place=place, since=event.t, reason=event.reason, until=event.until)
    return [it for it in found.values() if it.until is None or it.until > now_t]


def reminders(config: Config) -> Iterator[str]:
    """What to say at the start of a run that has a past. Nothing of one without, or whose ledger cannot be reached now.

    Raises LedgerFormatError of one that is damaged: its coordinator could not read it either.
    """
    try:
        events = read_ledger(config.run.url, config.run.local_dir)
    except StorageError:
        return
    for event in events:
        if isinstance(event, SegmentsMissing):
            yield f"{event.sentence()}. Checkpoints are apart from it; `ftrain report` says what is left of the books"
    gone = away(events, time.time())
    yield from (it.line(config.run.url) for it in gone)
    if gone:
        yield "the run starts without them, with the best layout for the places that are left"


def really_changed(config: Config, made: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Without what only seems to be changed: the newest checkpoint remembers the layout that it was made with, which may have
    been one for the places that were left. What was asked for last, at a start or by `ftrain resize`, is in the ledger.
    """
    sizes = [change for change in made if str(change["path"]).startswith(RESIZABLE)]
    if not sizes:
        return list(made)
    try:
        known = asked(read_ledger(config.run.url, config.run.local_dir))
    except (StorageError, LedgerFormatError):
        return list(made)
    return [change for change in made if change not in sizes or known.get(str(change["path"]), ()) != change["new"]]


def asked(events: Iterable[Event]) -> dict[str, object]:
    """Path -> value of all that the run was asked for last."""
    found: dict[str, object] = {}
    for event in events:
        if isinstance(event, RunStarted):
            tables = ((section, values) for section, values in event.config.items() if isinstance(values, dict))
            found = {f"{section}.{name}": value for section, values in tables for name, value in values.items()}
        elif isinstance(event, ConfigChanged):
            found |= {str(change["path"]): change["new"] for change in event.changes}
    return found


def finished_step(config: Config) -> int | None:
    """The step of the last checkpoint of a run that has nothing left to do, else None.

    Its ledger ends with it finished (or, where fewer steps are wanted now than it has done, in any way), storage holds a
    checkpoint of the config's last step (or of a later one) that verifies (of one above 2 GiB so much of it) and has passed
    over all data that it is to, and no copy of it is wanted elsewhere that could still be missing. A damaged one is not the
    end: the start passes it over, and does its steps again.
    """
    if config.checkpoint.mirror_url:
        return None
    try:
        state = fold(read_ledger(config.run.url, config.run.local_dir))
        if not state.outcome:
            return None
        store = open_configured(config.storage, config.run.url)
        try:
            last = RunStore(store).open(tainted=False)
            seen = missed(ranges(config, state.skips), last.step, last.progress)
            least = config.run.steps + (state.outcome != "finished")
            if last.step < least or last.passed_over or seen is not None:
                return None
            nbytes = sum(pack.nbytes for pack in last.manifest.packs)
            return last.step if last.verify(sample=min(1.0, READ_BYTES / max(1, nbytes))).ok else None
        finally:
            store.close()
    except (StorageError, ValueError):
        return None  # whatever it is, the start meets it, and says so
