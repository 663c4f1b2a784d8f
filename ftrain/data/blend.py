"""Which source a position of the stream comes from, and which of that source's sequences it is: a pure function.

A blend is usually drawn sequence by sequence, so that position 10**9 is known only after the first 10**9 draws; Megatron
builds and stores that table. Here the stream is cut into periods of equal length. Each source has a fixed number of
places in every period (its quota), and a keyed permutation says which places. Then:

    position p -> period b = p // length, place = permutation_b(p % length)
    source     = the one whose range of places holds `place`
    index      = b * quota(source) + place's rank in that range

Every index of every source is met exactly once, in a stretch of its own period. Weights are read as the decimal numbers that
were typed: 0.7 and 0.3 give the quotas 7 and 3 and are met exactly in every ten positions. Where the common denominator
exceeds 65,536 places, quotas are rounded to the nearest of 65,536 by largest remainders, at least one place each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ftrain.data.sampler import Ints, derive, permute

LONGEST_PERIOD = 65_536


class Blend:
    """An endless stream over sources, by weight; random access, no state."""

    def __init__(self, weights: Sequence[float], key: int) -> None:
        self.quotas = quotas(weights)
        self.period = sum(self.quotas)
        self._quotas = np.array(self.quotas, np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self._quotas)))
        self._key = key

    def locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """(source number, index in that source's own stream) of each position."""
        block, offset = np.divmod(np.atleast_1d(positions), self.period)
        place = permute(self.period, derive(self._key, block), offset)
        source = np.searchsorted(self._starts, place, side="right") - 1
        return source, block * self._quotas[source] + place - self._starts[source]


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
