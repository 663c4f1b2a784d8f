"""The strikes of a drill, made on a run that goes on: one at a time, each only once the run is over the last.

Two at once would be one interruption, with one verdict, and one of the two would have been judged by nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from ftrain.compose.course import POLL_S, Course, DrillError
from ftrain.compose.outage import begin_outage, end_outage
from ftrain.compose.strikes import BY_NAME, NONE, Kind, Strike, Struck, last_checkpoints, provable
from ftrain.compose.victims import damage, victim
from ftrain.faults import WORKER_POINTS, hold, marker

RESTARTS = 40
OUTAGE_S = 3.0
VERDICT_S = 60.0  # a run that goes on for so long without a verdict makes none: that is shown, not waited for


class Fire:
    """Strikes in their order. What a process does to itself is held (`ftrain.faults`) until it is its turn."""

    def __init__(self, course: Course, strikes: Sequence[Strike], say: Callable[[str], None]) -> None:
        self.struck: list[Struck] = []
        self._course, self._left, self._say = course, list(strikes), say
        self._began: float | None = None
        self._outage_ends = 0.0  # on the monotonic clock; 0: there is none
        self._faults = course.local / "faults"
        self._made = 0  # of those that processes make on themselves
        self._released: Strike | None = None  # to be made by a process on itself, and not made yet
        self._faults.mkdir(parents=True)
        for number in range(len(course.config.faults)):
            hold(self._faults, number).touch()

    def tick(self) -> bool:
        """Strike if it is time; whether nothing is left to do and the run has recovered from the last."""
        course = self._course
        if self._is_out() or self._is_awaited():
            return False
        if self._began is None and course.step:
            self._began = time.monotonic()
        recovered = course.goes_on and self._is_over()
        if not self._left:
            return recovered
        due = self._began is not None and time.monotonic() - self._began >= self._left[0].after_s
        if course.committed and recovered and (due or self._is_late()):
            self._strike(self._left[0])
        return False

    def _is_over(self) -> bool:
        """Whether what the last strike leads to has come: a verdict, where it is no strike that a run steps over."""
        if not self.struck:
            return True
        last = self.struck[-1]
        kind = BY_NAME[last.kind]
        if kind.target == "parent":
            return self._course.parent != last.pid
        return NONE in kind.classes or self._course.judged >= last.t or time.time() - last.t > VERDICT_S

    def _is_awaited(self) -> bool:
        """Whether a process has yet to do to itself what it is free to."""
        made = marker(self._faults, self._made)
        if self._released is not None and made.exists():
            self._note(self._released, t=made.stat().st_mtime)
            self._released = None
            self._made += 1
        return self._released is not None

    def _is_out(self) -> bool:
        """Whether storage cannot be written to; the outage is ended when it is time."""
        if self._outage_ends and time.monotonic() >= self._outage_ends:
            end_outage(self._course.url / "checkpoints")
            self._outage_ends = 0.0
        return self._outage_ends > 0

    def _is_late(self) -> bool:
        """The end is near: what is left is dealt out now, one after the other."""
        return self._began is not None and time.monotonic() - self._began >= self._left[-1].after_s

    def _strike(self, strike: Strike) -> None:
        course, kind = self._course, BY_NAME[strike.kind]
        status = course.status()
        spared = kind.what == "damage" and len(set(course.committed)) < 2  # there must be one to go back to
        if status is None or status["phase"] != "running" or spared:
            return  # not now: tried again at the next tick
        if kind.target == "inside":
            self._left.pop(0)
            self._released = strike
            hold(self._faults, self._made).unlink()
            return
        outside = kind.target in ("parent", "store")
        pid = course.parent if outside else victim(course.local, kind.target, strike.rank, status)
        if pid:
            self._left.pop(0)
            now = time.time()
            self._hit(kind, pid)
            self._note(strike, t=now, pid=pid)

    def _hit(self, kind: Kind, pid: int) -> None:
        course = self._course
        if kind.target == "store":
            begin_outage(course.url / "checkpoints")
            self._outage_ends = time.monotonic() + OUTAGE_S
            return
        if kind.what == "damage":
            newest = max(course.committed)
            damage(course.url, newest)
            course.committed = [step for step in course.committed if step < newest]  # it will be committed anew
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind.what == "damage" else signal.Signals[kind.what])

    def _note(self, strike: Strike, *, t: float, pid: int = 0) -> None:
        kind = BY_NAME[strike.kind]
        rank = strike.rank if kind.target == "worker" or (kind.target == "inside" and kind.at in WORKER_POINTS) else None
        self._course.watch(t)
        self.struck.append(Struck(kind=strike.kind, t=t, pid=pid, rank=rank, step=self._course.step))
        self._say(f"  step {self._course.step}: {strike.kind}" + ("" if rank is None else f", rank {rank}"))


def under_fire(course: Course, fire: Fire, limit_s: float) -> int:
    """Run until `fire` is over and a checkpoint is committed that comes after it all; started again whenever it ends before.

    The step of that checkpoint. Raises DrillError when that takes longer than `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while True:
        with course.running() as process:
            while process.poll() is None:
                course.look()
                found = provable(last_checkpoints(course.told, course.every), fire.struck) if fire.tick() else None
                if found is not None:
                    return found
                if time.monotonic() > deadline:
                    reached = f"no checkpoint was committed after the last strike within {limit_s:.0f} s"
                    raise DrillError(f"{reached}; see {course.log}")
                time.sleep(POLL_S)
        course.restarts += 1
        if course.restarts > RESTARTS:
            raise DrillError(f"the run under fire ended {course.restarts} times; see {course.log}")
