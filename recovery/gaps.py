"""Segments of a ledger that were written and are not there: seen by their names, and told where they were.

A segment may be lost, or moved away because it was damaged. Three things give it away: the numbers of an epoch have no gaps;
who takes a run up says which segment was the newest then (`RunStarted.after`); and the local folder's lock says which one was
begun last. Whoever reads the ledger gets a `SegmentsMissing` in the place of what is not there, so that nobody can take what is
left for the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from recovery.events import AnyEvent, Event, LedgerFormatError, RunStarted

_CLOSED = re.compile(r"e(\d{4,})-(\d{6})\.jsonl")


class SegmentsMissing(Event, frozen=True, kw_only=True):
    """Put in by who reads, never written. `t`: of the first event after them (at the end: of the last one before); `attempt`:
    the first one that is told of after them (at the end: -1).
    """

    segments: tuple[str, ...]
    since: float | None
    """Time of the last event before them; None: they were the first."""

    def names(self) -> str:
        """For sentences: which are missing."""
        first, last = self.segments[0], self.segments[-1]
        return f"segment {first}" if first == last else f"segments {first} to {last}"

    def sentence(self) -> str:
        """That they are missing."""
        return f"{self.missing()}: what happened then is not recorded"

    def missing(self) -> str:
        """The same without what follows from it."""
        return f"{self.names()} of the ledger {'is' if len(self.segments) == 1 else 'are'} missing"


Told = AnyEvent | SegmentsMissing
"""What a reader of a ledger gets."""


def is_segment(name: str) -> bool:
    """Whether this is the name of a segment, be it closed or, without its suffix, open."""
    return _CLOSED.fullmatch(name) is not None


def parse(name: str) -> tuple[int, int]:
    """Epoch and number of a segment; they sort in the order of writing."""
    match = _CLOSED.fullmatch(name)
    if match is None:
        raise LedgerFormatError(f"{name!r} is not the name of a ledger segment")
    return int(match[1]), int(match[2])


def segment_name(epoch: int, number: int) -> str:
    """Name of a closed segment; names sort in the order of writing."""
    return f"e{epoch:04d}-{number:06d}.jsonl"


def joined(segments: Iterable[tuple[str, Iterable[AnyEvent]]], begun: str = "") -> Iterator[Told]:
    """The events of segments in the order of writing, and what is missing among them. `begun`: the one that was begun last."""
    before: tuple[int, int] | None = None
    since: float | None = None
    for name, content in segments:
        here, events = parse(name), list(content)
        gone = _gone(before, here, events)
        if gone and events:
            attempt = next((event.attempt for event in events if event.attempt >= 0), -1)
            yield SegmentsMissing(t=events[0].t, attempt=attempt, segments=gone, since=since)
        yield from events
        before, since = here, events[-1].t if events else since
    if before is not None and is_segment(begun) and parse(begun) > before:
        yield SegmentsMissing(t=since or 0.0, segments=_up_to(before, parse(begun)), since=since)


def _gone(before: tuple[int, int] | None, here: tuple[int, int], events: Sequence[AnyEvent]) -> tuple[str, ...]:
    epoch, number = here
    if number > 0:
        return _up_to(before, (epoch, number - 1))
    first = events[0] if events else None
    if isinstance(first, RunStarted) and first.after:
        return _up_to(before, parse(first.after))
    return ()


def _up_to(before: tuple[int, int] | None, last: tuple[int, int]) -> tuple[str, ...]:
    """Those after the one that is there, up to `last`. Of an epoch between the two nothing is known."""
    epoch, number = last
    first = before[1] + 1 if before is not None and before[0] == epoch else 0
    return tuple(segment_name(epoch, at) for at in range(first, number + 1)) if before is None or last > before else ()
