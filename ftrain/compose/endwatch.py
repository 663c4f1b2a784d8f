"""Stops a run in time for what takes its machine away, and says in the ledger that this was planned.

A stop that a scheduler or a cloud caused is an interruption like any other in the books, only planned: it gets a verdict, so
that `ftrain report` counts it apart from failures. A stop that a person asked for is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recovery.events import Decided, EpochTaken, Event, EvidenceLine, InterruptionClassified, StopRequested, Verdict
from recovery.horizon import Notice, PaceKeeper, last_call
from recovery.notice import Lookout
from recovery.state import RunState

WARNINGS = ("SIGTERM", "SIGUSR1")
"""Signals by which a scheduler announces the end."""


class EndWatch:
    """Sees every event; `tick` asks for a stop when it is time. One thread, the lookout's apart."""

    def __init__(self, lookout: Lookout, *, margin_s: float, scheduler: str = "") -> None:
        """`scheduler`: whose signals end this run, in words; empty: a signal comes from a person."""
        self._lookout, self._margin_s, self._scheduler = lookout, margin_s, scheduler
        self._pace = PaceKeeper()
        self._attempt, self._epoch = -1, 0
        self._stopping: Notice | None = None
        self._told: list[Event] = []

    def on_event(self, event: Event) -> None:
        """Learn the pace; note who asked for a stop."""
        self._pace.on_event(event)
        self._attempt = max(self._attempt, event.attempt)
        if isinstance(event, EpochTaken):
            self._epoch = event.epoch
        if isinstance(event, StopRequested):
            self._stop_asked(event)

    def _stop_asked(self, event: StopRequested) -> None:
        notice = self._stopping
        if notice is None and self._scheduler and event.by in WARNINGS:
            ending = self._lookout.notice
            class_ = ending.class_ if ending is not None else "preemption"
            notice = Notice(class_=class_, by=f"{event.by} from {self._scheduler}")
        self._stopping = notice or Notice(class_="", by=event.by)
        if notice is not None:
            self._told = [*planned(notice, event, verdict_id=planned_id(self._epoch), attempt=self._attempt)]

    def tick(self, now_t: float, request_stop: Callable[[str], None]) -> Sequence[Event]:
        """Ask for a stop if this must be the last step; what the ledger should know about a stop that was asked for."""
        notice = self._lookout.notice
        if self._stopping is None and notice is not None:
            call = last_call(notice, self._pace.pace, now_t=now_t, margin_s=self._margin_s)
            if call.stop:
                self._stopping = notice
                request_stop(call.reason)
        told, self._told = self._told, []
        return told

    def close(self) -> None:
        """Watch no more."""
        self._lookout.close()


def planned_id(epoch: int) -> str:
    """Of the verdict on a stop that a scheduler or a cloud caused."""
    return f"e{epoch}-planned"


def planned_end(state: RunState) -> str:
    """What took the machine away from the run that has just been stopped, in words; empty if a person stopped it."""
    if planned_id(state.epoch) not in state.verdict_ids or state.last_decision is None:
        return ""
    return state.last_decision.reason


def planned(notice: Notice, asked: StopRequested, *, verdict_id: str, attempt: int) -> tuple[Event, Event]:
    """The interruption in the books: known before it came, followed without counting against any budget."""
    verdict = Verdict(
        class_=notice.class_,
        component="host" if notice.class_ == "host_maintenance" else "scheduler",
        planned=True,
        action="finish",
        confidence=1.0,
        reason=notice.by,
        evidence=(EvidenceLine(where="scheduler", line=0, text=asked.by),),
        signature="planned.stop",
    )
    return (
        InterruptionClassified(t=asked.t, attempt=attempt, verdict_id=verdict_id, verdict=verdict),
        Decided(t=asked.t, attempt=attempt, action="finish", reason=f"{notice.by}: save and leave", verdict_id=verdict_id),
    )
