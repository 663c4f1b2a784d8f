"""How long a rank may be silent, learned from the run itself.

A fixed limit must suit the slowest thing a run ever does, so it finds a hang of a fast step late. What a run has done before is
the better yardstick: five times the slowest of late, for each kind of phase apart, because an evaluation or a save may
rightly take longer than a step. The first step of an attempt (compilation, first allocation, first contact) and what was never
seen are given the time of a start. The configured limit is never exceeded once a step is finished, and below the floor nobody
is suspected: a machine may be busy for reasons that are not ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from recovery.events import Event, StepRecord, steps_of
from recovery.heartbeat import Beat

FACTOR = 5.0
LOOKED_BACK = 32
EVALUATE, CHECKPOINT, STEP = "evaluate", "checkpoint", "step"


class Deadlines:
    """What this run has taken so far, by kind of phase."""

    def __init__(self, *, floor_s: float) -> None:
        """Nothing is known yet."""
        self._floor_s = floor_s
        self._taken: dict[str, deque[float]] = {kind: deque(maxlen=LOOKED_BACK) for kind in (EVALUATE, CHECKPOINT, STEP)}

    def learn(self, events: Iterable[Event]) -> None:
        """From finished steps, of all attempts."""
        for event in events:
            for record in steps_of(event):
                self._learn(record)

    def _learn(self, record: StepRecord) -> None:
        if record.evaluate_s > 0:
            self._taken[EVALUATE].append(record.evaluate_s)
        if record.blocked_s > 0:
            self._taken[CHECKPOINT].append(record.blocked_s)
        self._taken[STEP].append(max(0.0, record.t_end - record.t_begin - record.evaluate_s - record.blocked_s))

    def allowed_s(self, beat: Beat | None, *, warm: bool, hang_s: float, start_s: float) -> float:
        """How long the rank that said `beat` last may stay silent; `warm`: its attempt has finished a step."""
        if beat is None or beat.step < 0 or not warm:
            return start_s
        taken = self._taken[beat.phase if beat.phase in (EVALUATE, CHECKPOINT) else STEP]
        if not taken:
            return hang_s
        return min(hang_s, max(self._floor_s, FACTOR * max(taken)))
