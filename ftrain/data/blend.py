"""Which source a position of the stream comes from, and which of that source's sequences it is: a pure function.

A blend is usually drawn sequence by sequence, so that position 10**9 is known only after the first 10**9 draws; Megatron
builds and stores that table. Here the stream is cut into periods of equal length. Each source has a fixed number of
places in every period (its quota), and a keyed permutation says which places. Then:

    position p -> period b = p // length, offset = p % length
    source     = the one whose range of places holds permutation_b(offset)
    index      = b * quota(source) + how many earlier offsets of this period went to the same source

Every source's indices thus come in ascending order, each exactly once, and any position can be computed on its own from a
table of at most 65,536 places, kept only while it is used. Weights are read as the decimal numbers that were typed: 0.7
and 0.3 give the quotas 7 and 3 and are met exactly in every ten positions. Where the common denominator exceeds 65,536 places,
quotas are rounded to the nearest of 65,536 by largest remainders, at least one place each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ftrain.data.sampler import Ints, derive, permute

LONGEST_PERIOD = 65_536
_TABLE = 4_096  # positions looked up together where periods are short
_TABLES = 2  # kept: the one in use and the one before


class Blend:
    """An endless stream over sources, by weight; random access, nothing to save."""

    def __init__(self, weights: Sequence[float], key: int) -> None:
        self.quotas = quotas(weights)
        self.period = sum(self.quotas)
        self._quotas = np.array(self.quotas, np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self._quotas)))
        self._key = key
        self._periods = max(1, _TABLE // self.period)
        self._tables: dict[int, tuple[Ints, Ints]] = {}

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """(source number, index in that source's own stream) of each position."""
        number, offset = np.divmod(np.atleast_1d(positions), self.period * self._periods)
        source, index = np.empty_like(number), np.empty_like(number)
        for one in np.unique(number).tolist():
            mine = number == one
            sources, indices = self._table(one)
            source[mine], index[mine] = sources[offset[mine]], indices[offset[mine]]
        return source, index

    def counts(self, positions: int) -> tuple[int, ...]:
        """How many of the first positions go to each source."""
        whole, rest = divmod(positions, self.period * self._periods)
        counts = self._quotas * (whole * self._periods)
        if rest:
            counts = counts + np.bincount(self._table(whole)[0][:rest], minlength=len(self.quotas))
        return tuple(int(count) for count in counts)

    def _table(self, number: int) -> tuple[Ints, Ints]:
        """(source, index) of every position in the `number`-th group of periods."""
        if number not in self._tables:
            blocks = np.repeat(np.arange(number * self._periods, (number + 1) * self._periods), self.period)
            offsets = np.tile(np.arange(self.period), self._periods)
            place = permute(self.period, derive(self._key, blocks), offsets)
            source = np.searchsorted(self._starts, place, side="right") - 1
            by_source = np.argsort(source, kind="stable")
            index = np.empty_like(place)
            for mine in np.split(by_source, self._starts[1:-1] * self._periods):
                index[mine] = number * len(mine) + np.arange(len(mine))
            while len(self._tables) >= _TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[number] = (source, index)
        return self._tables[number]


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Places of each source in a period: the weights as small whole numbers."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    if not exact or min(exact) <= 0:
        raise ValueError(f"weights must be above zero, given {list(weights)}")
    shares = [weight / sum(exact) for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    return tuple(int(share * period) for share in shares) if period <= LONGEST_PERIOD else _rounded(shares)


def _rounded(shares: list[Fraction]) -> tuple[int, ...]:
    """Largest remainders over the longest period, at least one place each."""
    if len(shares) > LONGEST_PERIOD:
        raise ValueError(f"at most {LONGEST_PERIOD} sources can be blended, given {len(shares)}")
    places = [max(1, math.floor(share * LONGEST_PERIOD)) for share in shares]
    by_lack = sorted(range(len(shares)), key=lambda i: (places[i] - shares[i] * LONGEST_PERIOD, i))
    for i in by_lack[: max(0, LONGEST_PERIOD - sum(places))]:
        places[i] += 1
    return tuple(places)
