"""How often to save: the closed formulas, as plain functions of seconds.

w is the time that training is *blocked* by a save (not the time the upload takes), M the mean time between failures. The
estimator of effective time is Meta's (Revisiting reliability, arXiv 2410.21680): a failure costs the restart and, on average,
half an interval; valid while that is small against M. The simulation in `ftrain.plan.simulate` checks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

YOUNG = "Young 1974: sqrt(2 w M)"
DALY = "Daly 2006, higher order: sqrt(2wM) [1 + sqrt(w/2M)/3 + (w/2M)/9] - w"
ESTIMATOR = "arXiv 2410.21680: (1 - (u0 + dt/2)/M) / (1 + w/dt)"


def young(stall_s: float, mtbf_s: float) -> float:
    """The interval that balances saving against repeating."""
    return sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Young's interval with the terms that matter when saves are slow or failures frequent."""
    ratio = stall_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return sqrt(2 * stall_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s


def effective(interval_s: float, *, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected share of the time that ends up in the final history; 0 where a failure costs more than the time between two."""
    lost = (restart_s + interval_s / 2) / mtbf_s
    return max(0.0, 1 - lost) / (1 + stall_s / interval_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What limits the effective time: the share that each cost takes."""

    saving: float
    restarting: float
    repeating: float

    @property
    def effective(self) -> float:
        """What is left."""
        return 1 - self.saving - self.restarting - self.repeating

    def largest(self) -> str:
        """The assumption to work on first."""
        parts = {"saving": self.saving, "restarting": self.restarting, "repeating lost steps": self.repeating}
        return max(parts, key=lambda name: parts[name])


def reach(interval_s: float, *, stall_s: float, restart_s: float, mtbf_s: float) -> Reach:
    """The estimator, taken apart; the three shares and `effective` add up to one."""
    work = 1 / (1 + stall_s / interval_s)
    return Reach(
        saving=1 - work,
        restarting=work * min(1.0, restart_s / mtbf_s),
        repeating=work * min(1.0, interval_s / 2 / mtbf_s),
    )
