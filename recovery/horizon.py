"""When the end of the machine time is known: does one more step still leave room for a last save?

The last save of a run is worth as many steps as would be done again without it, and it is lost if it is begun too late. So the
question is asked anew at every step boundary, from what steps and saves of this very run have taken. Pure: the clock, the end
and the pace come in, a decision with its reason in words comes out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from recovery.events import AttemptStarted, CheckpointCommitted, Event, steps_of

STEPS, SAVES = 16, 4  # looked back at: the slowest of these is what the next one is expected to take


class Notice(Struct, frozen=True, kw_only=True):
    """Somebody takes the machine away. `ends_t` None: nobody says when, so it may be at once."""

    class_: str  # of the interruption it will be: time_limit, preemption, host_maintenance
    by: str
    ends_t: float | None = None


class Pace(Struct, frozen=True, kw_only=True):
    """Seconds that a step and a save into storage are expected to take; 0: nothing is known yet."""

    step_s: float = 0.0
    save_s: float = 0.0


class LastCall(Struct, frozen=True, kw_only=True):
    """Whether to stop at the next step boundary. `fits`: the last save will probably be whole before the end."""

    stop: bool
    reason: str
    fits: bool = True


def last_call(notice: Notice, pace: Pace, *, now_t: float, margin_s: float) -> LastCall:
    """Whether the step under way must be the last one."""
    if notice.ends_t is None:
        return LastCall(stop=True, reason=f"{notice.by}; nobody says when, so this step is the last")
    left_s = notice.ends_t - now_t
    if left_s < 0:
        over = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(notice.ends_t))
        return LastCall(stop=True, fits=False, reason=f"{notice.by}: its time, {over}, is over, so this step is the last")
    needs_s = pace.save_s + margin_s
    words = f"{notice.by}: {left_s:.0f} s left; a step takes {pace.step_s:.1f} s, a save {pace.save_s:.1f} s"
    if left_s < pace.save_s:
        return LastCall(stop=True, fits=False, reason=f"{words}: the save may not be whole in time")
    if left_s - pace.step_s - pace.step_s < needs_s:  # the step under way, and the one that would begin after it
        return LastCall(stop=True, reason=f"{words}, {margin_s:g} s are kept free: this step is the last")
    return LastCall(stop=False, reason=f"{words}: there is time for another step")


def soonest(notices: Iterator[Notice]) -> Notice | None:
    """The notice that matters: one without a time comes first, then the earliest."""
    return min(notices, key=lambda notice: float("-inf") if notice.ends_t is None else notice.ends_t, default=None)


class PaceKeeper:
    """The pace, learned from the events of the run."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._saves: deque[float] = deque(maxlen=SAVES)

    def on_event(self, event: Event) -> None:
        """Learn from one event. Another attempt may have another layout, so its steps count alone."""
        if isinstance(event, AttemptStarted):
            self._steps.clear()
        elif isinstance(event, CheckpointCommitted):
            self._saves.append(event.seconds)
        else:
            self._steps.extend(max(0.0, record.t_end - record.t_begin) for record in steps_of(event))

    @property
    def pace(self) -> Pace:
        """The slowest of late."""
        return Pace(step_s=max(self._steps, default=0.0), save_s=max(self._saves, default=0.0))
