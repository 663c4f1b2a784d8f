"""Whole runs that lose a place and get it back: same batches, digests proved at the seam, each decision on record first."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.codes import ExitCode
from recovery.events import (
    AttemptStarted,
    ConfigChanged,
    Decided,
    Event,
    InterruptionClassified,
    LayoutChosen,
    PlaceLost,
    PlaceReturned,
    Ready,
    RunStarted,
    Straggler,
    steps_of,
)
from tests.commands import ftrain, ftrain_json
from tests.runs import TinyRun, finish, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

ECC = "CUDA error: uncorrectable ECC error encountered"
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


@pytest.mark.slow
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


def blamed(step: int, rank: int) -> str:
    """A rank whose GPU is broken, by the words of the driver."""
    return f'[[faults]]\nkind = "raise"\ntext = "{ECC}"\nstep = {step}\nrank = {rank}\n'


def test_one_of_eight_replicas_is_lost_and_the_batches_stay(corpus: str, tmp_path: Path) -> None:
    """Global batch 16: seven replicas take 3 or 2 micro-batches each."""
    quiet = TinyRun(folder=tmp_path / "eight", corpus=corpus, ranks=8, global_batch=16, micro_batch=1, steps=12)
    assert quiet.run()[0] == 0
    run = replace(quiet, folder=tmp_path / "seven", url="", extra=blamed(7, 3))
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    check_same_training(run, quiet)
    events = run.events()
    check_decided_first(events)
    (verdict,) = [event.verdict for event in events if isinstance(event, InterruptionClassified)]
    assert (verdict.class_, verdict.first_failing_rank, verdict.action) == ("gpu_memory_error", 3, "restart_exclude_node")
    (lost,) = [event for event in events if isinstance(event, PlaceLost)]
    assert (lost.node, lost.slot) == ("localhost", 3)
    started = [event for event in events if isinstance(event, AttemptStarted)]
    assert [(event.ranks, event.layout) for event in started] == [(8, "tp1 x cp1 x pp1 x dp8"), (7, "tp1 x cp1 x pp1 x dp7")]
    ready = [event for event in events if isinstance(event, Ready)][-1]
    assert (ready.step, ready.source) == (6, "memory")
    assert ready.proof.startswith("digests of")
    assert "dp8 -> tp1 x cp1 x pp1 x dp7" in output


@pytest.mark.slow
def test_a_spare_takes_the_part_of_a_lost_place_and_the_layout_stays(
    corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=blamed(7, 1))
    with no_process_left(run):
        code, output = run.run("--set", "recovery.spares=2")
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)
    (chosen,) = [event for event in run.events() if isinstance(event, LayoutChosen)]
    assert chosen.layout == chosen.was
    assert chosen.costs == "a restart; the layout stays"


@pytest.mark.slow
def test_without_elastic_a_lost_place_ends_the_run_for_another_machine(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, ranks=4, micro_batch=1, extra=blamed(7, 1))
    with no_process_left(run):
        code, output = run.run("--set", "recovery.elastic=false")
    assert code == ExitCode.RETRY_ELSEWHERE, output
    said = " ".join(output.split())
    assert "the run cannot go on without localhost/1: 3 places left for 4 ranks, and recovery.elastic is false, so" in said


@pytest.mark.slow
def test_a_link_that_fails_twice_within_minutes_costs_its_place_and_once_does_not(corpus: str, tmp_path: Path) -> None:
    words = "NET/IB : Got async event : port error"
    extra = "".join(f'[[faults]]\nkind = "raise"\ntext = "{words}"\nstep = {step}\nrank = 2\n' for step in (7, 14))
    run = TinyRun(folder=tmp_path, corpus=corpus, ranks=4, micro_batch=1, extra=extra)
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    events = run.events()
    assert [event.action for event in events if isinstance(event, Decided)] == ["restart", "restart_exclude_node"]
    assert [(event.node, event.slot) for event in events if isinstance(event, PlaceLost)] == [("localhost", 2)]
    assert [event.ranks for event in events if isinstance(event, AttemptStarted)] == [4, 4, 3]


@pytest.mark.slow
def test_a_place_that_the_breaker_keeps_is_named_on_the_screen_and_in_the_report(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=blamed(7, 1))
    with no_process_left(run):
        code, output = run.run()
    assert code == ExitCode.RETRY_ELSEWHERE, output
    stays = "localhost/1 is not left out: 1 of 2 places would be, more than recovery.breaker_share = 0.25 allows"
    for text in (output, ftrain("report", run.url).stdout):
        assert stays in " ".join(text.split())
        assert "the only node" not in text


@pytest.mark.slow
def test_resize_by_hand_to_tensor_parallelism_and_back(corpus: str, tmp_path: Path) -> None:
    quiet = TinyRun(folder=tmp_path / "quiet", corpus=corpus, steps=60)
    assert quiet.run(*CONSTANT)[0] == 0
    run = replace(quiet, folder=tmp_path / "run", url="", steps=100_000)
    parent = run.start(*CONSTANT)
    run.wait_for_step(5)
    refused = ftrain("resize", run.url, "--set", "parallel.tp=3")
    assert refused.returncode == 2
    assert "parallel.tp" in refused.stderr
    ftrain_json("resize", run.url, "--ranks", "4", "--set", "parallel.tp=2")
    run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 2)
    os.kill(run.processes()["coordinator"][0].pid, signal.SIGKILL)  # its successor must know of the new layout
    run.wait_for(lambda events: sum(isinstance(event, RunStarted) for event in events) == 2)
    ftrain_json("resize", run.url, "--ranks", "2", "--set", "parallel.tp=1")
    run.wait_for(lambda events: sum(isinstance(event, Ready) for event in events) == 3)
    run.wait_for_step(60)
    ftrain("stop", run.url)
    with no_process_left(run):
        assert finish(parent)[0] == 75
    kept = losses(run)
    for step, (tokens, loss) in losses(quiet).items():
        assert kept[step][0] == tokens
        assert kept[step][1] == pytest.approx(loss, rel=1e-4)
    layouts = [event.layout for event in run.events() if isinstance(event, AttemptStarted)]
    assert layouts == ["tp1 x cp1 x pp1 x dp2", "tp2 x cp1 x pp1 x dp2", "tp1 x cp1 x pp1 x dp2"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["report", "restart", "exclude"])
def test_a_straggler_is_reported_restarted_or_left_out(policy: str, corpus: str, tmp_path: Path) -> None:
    slow = '[[faults]]\nkind = "slow"\nstep = 3\nrank = 2\n'
    run = TinyRun(folder=tmp_path, corpus=corpus, ranks=4, micro_batch=1, steps=70, extra=slow)
    with no_process_left(run):
        code, output = run.run("--set", f"recovery.straggler={policy}", "--set", "recovery.straggler_windows=1")
    assert code == 0, output
    told = [event for event in run.events() if isinstance(event, Straggler)]
    assert told[0].rank == 2
    started = [event.ranks for event in run.events() if isinstance(event, AttemptStarted)]
    assert started == {"report": [4], "restart": [4, 4], "exclude": [4, 3]}[policy]
    done = [record.step for event in run.events() for record in steps_of(event)]
    assert done == list(range(1, 71)), "a step was done twice"


def test_a_place_that_is_out_is_no_change_of_the_config(corpus: str, tmp_path: Path) -> None:
    """Two ranks, one drained, stopped, and the same command again."""
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=400)
    run.start(*CONSTANT)
    run.wait_for_step(3)
    ftrain_json("drain", run.url, "1")
    run.wait_for(lambda events: any(isinstance(event, Ready) and event.attempt == 1 for event in events))
    ftrain_json("stop", run.url)
    assert run.parent is not None
    code, said = finish(run.parent)
    assert code == ExitCode.STOPPED, said
    code, said = run.run(*CONSTANT, "--set", f"run.steps={done_steps(run) + 1}")
    assert code == 0, said
    assert "localhost/1 is out since" in said
    changed = [change["path"] for event in run.events() if isinstance(event, ConfigChanged) for change in event.changes]
    assert changed == ["run.steps"]
    assert not [event for event in run.events() if isinstance(event, PlaceReturned)]


def done_steps(run: TinyRun) -> int:
    return max(record.step for event in run.events() for record in steps_of(event))
