"""When numbers stop making sense: what is a bad step, since when, and whether it is the data or the machine.

All ranks know the same sums, so all of them judge alike and none has to tell the others. Two kinds of trouble:

- A step that is not finite was skipped by all ranks, so the state is still the one before it: the step is simply done again at
  once. Finite now, it was the machine (silent corruption), and the run goes on with the right result; not finite again, it is
  data or code, and a few such steps in a row end the attempt.
- A loss far above what it was, step after step, comes too late to be repeated in place: the attempt ends, the run goes back to
  before the *onset*, and what is done again is the repetition. One high loss is no trouble; training recovers from those.

"Far above" is measured in robust deviations (median and median absolute deviation of a window): the spike itself must not move
the yardstick, and a bad step never enters the window.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

SIGMA = 1.4826  # of a normal distribution, per median absolute deviation
LEAST_SHARE = 0.01  # of the median: a window of equal losses has no deviation, yet 1 % above it is no spike
LEAST_WINDOW = 16
NORMS = LEAST_WINDOW  # what a checkpoint remembers, so that a restart need not wait for a usual gradient norm


class NumericsError(ArithmeticError):
    """Training does not make sense any more; raised by all ranks at the same step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong, since which step, and after which step it was certain."""

    onset: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is tolerated; 0 switches a watch off."""

    nonfinite_steps: int = 3
    spike_z: float = 10.0
    spike_steps: int = 10
    replay_norm: float = 0.0
    window: int = 64


@dataclass(slots=True, kw_only=True)
class Watch:
    """The watch of one attempt."""

    bounds: Bounds
    losses: deque[float] = field(default_factory=deque)
    norms: deque[float] = field(default_factory=deque)
    nonfinite: int = 0
    spiking: int = 0

    @property
    def norm_limit(self) -> float:
        """The gradient norm above which a step is not believed at once: so many times the usual, once there is a usual."""
        if not self.bounds.replay_norm or len(self.norms) < LEAST_WINDOW:
            return math.inf
        return self.bounds.replay_norm * statistics.median(self.norms)

    def bad_since(self, step: int) -> int | None:
        """Since when steps have been bad without a break, the one just seen included: what may turn out to be an onset."""
        bounds = self.bounds
        length = max(self.nonfinite if bounds.nonfinite_steps else 0, self.spiking if bounds.spike_z else 0)
        return step - length + 1 if length else None

    def see(self, *, step: int, loss: float, applied: bool, norm: float = math.nan) -> Trouble | None:
        """Take in a finished step; what is wrong now, if anything."""
        if applied and math.isfinite(norm):
            self.norms.append(norm)
            if len(self.norms) > self.bounds.window:
                self.norms.popleft()
        if not applied or not math.isfinite(loss):
            self.nonfinite += 1
            limit = self.bounds.nonfinite_steps
            reason = f"loss or gradients not finite in {self.nonfinite} consecutive steps, also when repeated"
            return self._trouble(step, self.nonfinite, reason) if limit and self.nonfinite >= limit else None
        self.nonfinite = 0
        return self._see_loss(step, loss)

    def _see_loss(self, step: int, loss: float) -> Trouble | None:
        bounds = self.bounds
        z = deviation(loss, self.losses, least=bounds.spike_z)
        if not bounds.spike_z or z is None or z < bounds.spike_z:
            self.spiking = 0
            self.losses.append(loss)
            if len(self.losses) > bounds.window:
                self.losses.popleft()
            return None
        self.spiking += 1
        if self.spiking < bounds.spike_steps:
            return None
        usual = statistics.median(self.losses)
        reason = f"loss spike: {loss:.4g} is {z:.1f} robust deviations above {usual:.4g}, for {self.spiking} steps"
        return self._trouble(step, self.spiking, reason)

    def _trouble(self, step: int, length: int, reason: str) -> Trouble:
        onset = step - length + 1
        return Trouble(onset=onset, step=step, reason=f"{reason}; it began at step {onset}")


def deviation(loss: float, window: deque[float], *, least: float = -math.inf) -> float | None:
    """How far a loss lies above the window, in robust deviations; None while the window is too short to say, and where less
    than `least` can be told from the median alone: nearly always, and it is asked in every step.
    """
    if len(window) < LEAST_WINDOW:
        return None
    middle = statistics.median(window)
    if loss - middle < least * LEAST_SHARE * abs(middle):
        return None
    spread = statistics.median(abs(value - middle) for value in window)
    return (loss - middle) / max(SIGMA * spread, LEAST_SHARE * abs(middle), 1e-12)
