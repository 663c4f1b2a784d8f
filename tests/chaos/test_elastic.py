"""Whole runs that lose a place and get it back: same batches, digests proved at the seam, each decision on record first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.events import AttemptStarted, Event, InterruptionClassified, LayoutChosen, Ready, steps_of
from tests.commands import ftrain, ftrain_json
from tests.runs import TinyRun, finish, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

CONSTANT = ("--set", "schedule.kind=constant")


def losses(run: TinyRun) -> dict[int, tuple[int, float | None]]:
    """step -> tokens and loss, as finished last."""
    return {record.step: (record.tokens, record.loss) for event in run.events() for record in steps_of(event)}


def check_same_training(ours: TinyRun, theirs: TinyRun) -> None:
    """Every step saw the same tokens, and its loss is what another summation order allows."""
    mine, others = losses(ours), losses(theirs)
    assert sorted(mine) == sorted(others)
    for step, (tokens, loss) in mine.items():
        assert tokens == others[step][0]
        assert loss == pytest.approx(others[step][1], rel=1e-5)


def check_decided_first(events: list[Event]) -> None:
    """Each layout that runs was chosen, on record, before its attempt was started."""
    chosen = ""
    for event in events:
        chosen = event.layout if isinstance(event, LayoutChosen) else chosen
        if isinstance(event, AttemptStarted) and chosen:
            assert event.layout == chosen


def test_a_place_is_drained_and_given_back(corpus: str, tmp_path: Path) -> None:
    quiet = TinyRun(folder=tmp_path / "quiet", corpus=corpus, ranks=4, micro_batch=1, steps=40)
    assert quiet.run(*CONSTANT)[0] == 0
    run = replace(quiet, folder=tmp_path / "run", url="", steps=100_000)
    parent = run.start(*CONSTANT)
    run.wait_for_step(5)
    refused = ftrain("drain", run.url, "7")
    assert refused.returncode == 2
    assert "no place '7'" in refused.stderr
    assert ftrain_json("drain", run.url, "2")["taken_away"] == "localhost/2: drained by ftrain drain"
    run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 2)
    ftrain_json("admit", run.url, "2")
    run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 3)
    at = [event.step for event in run.events() if isinstance(event, Ready)]
    run.wait_for_step(max(40, at[-1] + 1))
    ftrain("stop", run.url)
    with no_process_left(run):
        assert finish(parent)[0] == 75
    events = run.events()
    check_decided_first(events)
    started = [event for event in events if isinstance(event, AttemptStarted)]
    assert [(event.ranks, event.source) for event in started] == [(4, "init"), (3, "memory"), (4, "memory")]
    assert not any(isinstance(event, InterruptionClassified) for event in events)
    ready = [event for event in events if isinstance(event, Ready)]
    assert all(event.proof.startswith("digests of") for event in ready[1:])
    done = [record.step for event in events for record in steps_of(event)]
    assert done == sorted(set(done)), "a step was done twice"
    kept = losses(run)
    for step, (tokens, loss) in losses(quiet).items():
        assert kept[step][0] == tokens
        assert kept[step][1] == pytest.approx(loss, rel=1e-5)
    assert json.loads(ftrain("report", run.url, "--json").stdout)["steps_lost"] == 0
