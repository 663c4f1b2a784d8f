"""Events survive the trip through a line, and nothing that is not an event passes."""

from __future__ import annotations

import json
import math

import pytest

from recovery import events as ev
from recovery.gaps import SegmentsMissing

EXAMPLES: list[ev.Event] = [
    ev.RunStarted(t=1.5, run_id="r", config={"a": {"b": 1}}, owner={"pid": 3}, epoch=2),
    ev.AttemptStarted(t=2.0, attempt=0, ranks=2, source="init", pids={0: 11, 1: 12}),
    ev.StepsFinished(t=3.0, attempt=0, steps=(ev.StepRecord(step=1, t_begin=2.0, t_end=2.5, loss=3.25),)),
    ev.ProcessDied(t=4.0, attempt=0, kind="worker", pid=12, status=-9, rank=1),
    ev.InterruptionClassified(
        t=5.0,
        attempt=0,
        verdict_id="v0",
        verdict=ev.Verdict(
            class_="process_crash",
            component="software",
            evidence=(ev.EvidenceLine(where="exit", line=1, text="rank 1 ended with -9"),),
        ),
    ),
    ev.RunEnded(t=9.0, outcome="finished", step=10),
]


@pytest.mark.parametrize("event", [pytest.param(e, id=type(e).__name__) for e in EXAMPLES])
def test_line_round_trip(event: ev.Event) -> None:
    line = ev.encode_line(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert ev.decode_line(line) == event
    assert json.loads(line)["event"] == type(event).__name__


def test_verdict_says_class_in_json() -> None:
    line = json.loads(ev.encode_line(EXAMPLES[4]))
    assert line["verdict"]["class"] == "process_crash"


def test_all_events_are_in_the_union() -> None:
    """But for the one that a reader puts in, and nobody writes."""
    assert set(ev.AnyEvent.__args__) == set(ev.Event.__subclasses__()) - {SegmentsMissing}  # type: ignore[attr-defined]


def test_loss_that_is_not_a_number_becomes_null() -> None:
    event = ev.StepFinished(t=1.0, attempt=0, step=1, t_begin=0.0, t_end=1.0, loss=math.nan)
    back = ev.decode_line(ev.encode_line(event))
    assert isinstance(back, ev.StepFinished)
    assert back.loss is None


def test_step_finished_has_the_fields_of_a_record() -> None:
    event = ev.StepFinished(t=1.0, attempt=0, step=7, t_begin=0.0, t_end=1.0, tokens=5, lr=0.1)
    (record,) = ev.steps_of(event)
    assert record == ev.StepRecord(step=7, t_begin=0.0, t_end=1.0, tokens=5, lr=0.1)
    assert list(ev.steps_of(EXAMPLES[0])) == []


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"event":"Nonsense","t":1}', b'{"event":"Ready","t":1}', b"\xff\xfe"])
def test_what_is_not_an_event_is_refused(line: bytes) -> None:
    with pytest.raises(ev.LedgerFormatError):
        ev.decode_line(line)
