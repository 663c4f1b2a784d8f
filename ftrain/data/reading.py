"""How a phase goes on reading its sources, and how much of each source a run has read.

A phase that leaves data alone reads on where the one before stopped: the same stream, the same order. With another blend, each
source goes on at its own next window. Only windows of another length are other windows: such a reading of a source begins
anew. So every window of a length comes once per pass over its source, in whichever phases it is read, and all of it follows
from the config and the cursor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ftrain.config import Config, Data
from ftrain.course import Cursor
from ftrain.data.blend import Blend
from ftrain.data.sampler import derive
from ftrain.phases import effective

ORDER, BLEND, HELDOUT = 1, 2, 3
"""Purposes, so that no two keys are the same."""

Key = tuple[str, int]
"""A source in the whole run: its path, and which one of the same path."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Where the stream of a phase begins."""

    start: int
    """Sequences of this very stream that earlier phases have read or passed over."""
    numbers: tuple[int, ...]
    """Of each source: its number in the whole run, for the key of its order."""
    before: tuple[int, ...]
    """Of each source: windows of this length that other blends of earlier phases have read or passed over."""


class Consumed(NamedTuple):
    """What a run has read of a source in windows of one length, with what it passed over."""

    path: str
    seq_len: int
    sequences: int
    tokens: int


class _Stretch(NamedTuple):
    """Phases in a row that read the same stream."""

    data: Data
    sequences: int


def blend_key(seed: int, purpose: int) -> int:
    """The key of a stream's blend."""
    return int(derive(seed, BLEND, purpose)[0])


def reading(config: Config, cursor: Cursor) -> Reading:
    """How the newest phase of the cursor reads."""
    phases = [effective(config, number).data for number in range(cursor.phase + 1)]
    stretches = list(_stretches(phases, cursor))
    now, own = phases[-1], stretches[-1]
    known = list(dict.fromkeys(key for data in phases for key in _keys(data)))
    read = Counter[Key]()
    for part in stretches[:-1]:
        if part.data.seq_len == now.seq_len:
            read.update(_counts(config, part))
    keys = _keys(now)
    start = own.sequences - cursor.sequences - cursor.begun[-1].passed
    return Reading(start, tuple(known.index(key) for key in keys), tuple(read[key] for key in keys))


def consumed(config: Config, cursor: Cursor) -> tuple[Consumed, ...]:
    """What a run has read of each source up to the cursor, in windows of each length; in the order of their first use."""
    phases = [effective(config, number).data for number in range(cursor.phase + 1)]
    totals: dict[tuple[Key, int], int] = {}
    for part in _stretches(phases, cursor):
        for key, count in _counts(config, part).items():
            place = (key, part.data.seq_len)
            totals[place] = totals.get(place, 0) + count
    return tuple(Consumed(key[0], seq_len, count, count * seq_len) for (key, seq_len), count in totals.items())


def _stretches(phases: list[Data], cursor: Cursor) -> Iterator[_Stretch]:
    """Streams, one after the other, with the sequences read of each."""
    data, sequences = phases[0], 0
    for here, part in zip(phases, cursor.begun, strict=True):
        if (here.sources, here.seq_len) != (data.sources, data.seq_len):
            yield _Stretch(data, sequences)
            sequences = 0
        data, sequences = here, sequences + part.sequences + part.passed
    yield _Stretch(data, sequences)


def _keys(data: Data) -> list[Key]:
    seen = Counter[str]()
    keys = []
    for source in data.sources:
        keys.append((source.path, seen[source.path]))
        seen[source.path] += 1
    return keys


def _counts(config: Config, part: _Stretch) -> dict[Key, int]:
    """How many of a stream's first sequences came from each source."""
    blend = Blend([source.weight for source in part.data.sources], blend_key(config.run.seed, ORDER))
    return dict(zip(_keys(part.data), blend.counts(part.sequences), strict=True))
