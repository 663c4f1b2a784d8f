"""The learning rate as a pure function of the step: nothing to save, nothing to restore, the same on every rank.

Updates are numbered from 1 to `total`; warm-up reaches the peak at update `warmup_steps`, and the last update runs at
`min_ratio` of the peak (Loshchilov and Hutter, arXiv 1608.03983, for the cosine; Hu et al., arXiv 2404.06395, for
warm-up, stable, decay).

    cosine     half a cosine from the peak to the minimum
    wsd        the peak, then a straight line to the minimum over the last `decay_steps`
    constant   the peak
"""

from __future__ import annotations

import math

from ftrain.config import Schedule


def learning_rate(number: int, *, schedule: Schedule, peak: float, total: int) -> float:
    """The learning rate of update `number` (from 1) of `total`."""
    if number <= schedule.warmup_steps:
        return peak * number / schedule.warmup_steps
    return peak * _ratio(number, schedule, total)


def _ratio(number: int, schedule: Schedule, total: int) -> float:
    """Between 1 at the end of warm-up and `min_ratio` at the last update (and after it)."""
    if schedule.kind == "constant":
        return 1.0
    length = total - schedule.warmup_steps if schedule.kind == "cosine" else min(schedule.decay_steps, total)
    if length <= 0:
        return 1.0
    progress = min(1.0, max(0.0, (number - (total - length)) / length))
    falling = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.min_ratio + (1 - schedule.min_ratio) * falling
