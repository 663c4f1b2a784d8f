"""Stops that a scheduler or a cloud causes are asked for in time and stand in the ledger as planned; a person's do not."""

from __future__ import annotations

import pytest

from ftrain.compose.endwatch import EndWatch
from recovery import events
from recovery.events import Decided, Event, InterruptionClassified
from recovery.horizon import Notice
from recovery.notice import Ask, Lookout
from recovery.report import report


def watch(*, notice: Notice | None = None, scheduler: str = "") -> EndWatch:
    asked: list[Ask] = []
    lookout = Lookout(asked, poll_s=60.0, clock=lambda: 0.0)
    if notice is not None:
        asked.append(lambda now_t: notice)
        lookout.look()
    made = EndWatch(lookout, margin_s=5.0, scheduler=scheduler)
    made.on_event(events.EpochTaken(t=0.0, epoch=3))
    made.on_event(events.AttemptStarted(t=0.0, attempt=2, ranks=1, source="init"))
    made.on_event(events.StepFinished(t=4.0, attempt=2, step=1, t_begin=0.0, t_end=4.0))
    return made


def drive(made: EndWatch, now_t: float) -> tuple[list[str], list[Event]]:
    """One tick as the desk makes it: a request is an event that the watch sees at once."""
    asked: list[str] = []

    def request(by: str) -> None:
        asked.append(by)
        made.on_event(events.StopRequested(t=now_t, by=by))

    return asked, [*made.tick(now_t, request)]


def test_a_time_limit_stops_the_run_once_and_in_time() -> None:
    made = watch(notice=Notice(class_="time_limit", by="time limit of Slurm job 1", ends_t=100.0))
    assert drive(made, 50.0) == ([], [])
    asked, told = drive(made, 90.0)
    assert asked[0].startswith("time limit of Slurm job 1: 10 s left; a step takes 4.0 s")
    classified, decided = told
    assert isinstance(classified, InterruptionClassified)
    assert isinstance(decided, Decided)
    assert (classified.verdict.class_, classified.verdict.planned, classified.attempt) == ("time_limit", True, 2)
    assert (decided.action, decided.verdict_id, classified.verdict_id) == ("finish", "e3-planned", "e3-planned")
    assert drive(made, 95.0) == ([], [])


@pytest.mark.parametrize(
    ("by", "scheduler", "planned"),
    [
        ("SIGTERM", "Slurm job 1", True),
        ("SIGUSR1", "Slurm job 1", True),
        ("SIGTERM", "", False),
        ("SIGINT", "Slurm job 1", False),
    ],
)
def test_only_a_schedulers_signals_are_interruptions(by: str, scheduler: str, planned: bool) -> None:
    made = watch(scheduler=scheduler)
    made.on_event(events.StopRequested(t=1.0, by=by))
    asked, told = drive(made, 1.0)
    assert asked == []
    assert len(told) == (2 if planned else 0)


def test_the_report_counts_it_apart_from_failures() -> None:
    made = watch(notice=Notice(class_="preemption", by="notice of spot"))
    _, told = drive(made, 10.0)
    ledger: list[Event] = [events.RunStarted(t=0.0, run_id="r"), *told, events.RunEnded(t=12.0, outcome="stopped")]
    made_of_it = report(ledger)
    assert [(row.class_, row.planned, row.share) for row in made_of_it.causes] == [("preemption", True, 1.0)]
    assert made_of_it.mtbf_s is None
