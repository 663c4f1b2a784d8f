"""Which rank is slow when nobody hangs: everybody's step takes as long as the slowest rank's, so the step times do not tell.

Each rank says with its heartbeat how many seconds it has computed so far without waiting for others (`Beat.busy_s`). Over a
window of steps the slowest is compared with the median. One slow window proves nothing (a cron job, a page cache); several in a
row are worth telling.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from msgspec import Struct

from recovery.heartbeat import Beat

WINDOW_STEPS = 20
WINDOWS = 3
FACTOR = 1.5


class Slowest(Struct, frozen=True, kw_only=True):
    """The slowest rank of the last window: its computing time over the median's. `lasting`: for several windows in a row."""

    rank: int
    ratio: float
    step_s: float
    lasting: bool = False

    def describe(self) -> str:
        """In words."""
        return f"rank {self.rank} computes {self.ratio:.2f} times as long as the median rank ({self.step_s:.3f} s a step)"


class Stragglers:
    """The watch of one attempt. Fed with the progress page, about once a second."""

    def __init__(self) -> None:
        """No window is complete."""
        self.slowest: Slowest | None = None
        self._begin: dict[int, Beat] = {}
        self._row: tuple[int, int] = (-1, 0)  # rank, windows in which it was too slow

    def see(self, beats: Iterable[Beat], *, factor: float = FACTOR, windows: int = WINDOWS) -> Slowest | None:
        """Take in the page; a straggler, once, when it has been slow for long enough."""
        now = {beat.rank: beat for beat in beats if beat.step > 0}
        if not self._begin or set(now) != set(self._begin):
            self._begin = now
            return None
        if len(now) < 2 or min(now[rank].step - self._begin[rank].step for rank in now) < WINDOW_STEPS:
            return None
        shares = {
            rank: (beat.busy_s - self._begin[rank].busy_s) / (beat.step - self._begin[rank].step) for rank, beat in now.items()
        }
        self._begin = now
        return self._judge(shares, factor, windows)

    def _judge(self, shares: dict[int, float], factor: float, most: int) -> Slowest | None:
        rank = max(shares, key=lambda it: shares[it])
        usual = statistics.median_low(shares.values())
        if usual <= 0:  # ranks whose computing time nobody knows
            self.slowest, self._row = None, (-1, 0)
            return None
        ratio = shares[rank] / usual
        windows = (self._row[1] if self._row[0] == rank else 0) + 1 if ratio >= factor else 0
        self._row = (rank, windows)
        self.slowest = Slowest(rank=rank, ratio=ratio, step_s=shares[rank], lasting=windows >= most)
        return self.slowest if windows == most else None
