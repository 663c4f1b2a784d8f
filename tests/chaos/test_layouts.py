"""Whole runs of other sizes, and one that changes its size on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.events import AttemptStarted, ConfigChanged, Ready, StepFinished, steps_of
from storage.objects import open_store
from storage.run import RunStore
from tests.commands import ftrain, ftrain_json
from tests.runs import TinyRun, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

CONSTANT = ("--set", "schedule.kind=constant")  # the learning rate must not depend on where the first half ends


def steps(run: TinyRun) -> dict[int, StepFinished]:
    return {record.step: record for event in run.events() for record in steps_of(event)}


def compressor_at(run: TinyRun, step: int) -> str | None:
    found = RunStore(open_store(run.url)).open(step).manifest.compressor
    return found and found.cname


def test_eight_ranks_go_on_as_seven_with_the_same_batches(corpus: str, tmp_path: Path) -> None:
    """From a compressed checkpoint; what they write themselves is not compressed."""
    unbroken = TinyRun(folder=tmp_path / "eight", corpus=corpus, ranks=8, global_batch=16, micro_batch=1, steps=12)
    code, output = unbroken.run(*CONSTANT)
    assert code == 0, output
    run = replace(unbroken, folder=tmp_path / "seven", url="")
    with no_process_left(run):
        assert run.run(*CONSTANT, "--set", "run.steps=6", "--set", "checkpoint.compression=lz4")[0] == 0
        code, output = run.run(*CONSTANT, "--set", "parallel.ranks=7")
    assert code == 0, output
    ours, theirs = steps(run), steps(unbroken)
    assert sorted(ours) == sorted(theirs) == list(range(1, 13))
    for step, record in ours.items():
        assert record.tokens == theirs[step].tokens
        assert record.loss == pytest.approx(theirs[step].loss, rel=1e-5)  # fp32 sums over other groups, a dozen updates
    assert [compressor_at(run, step) for step in (6, 12)] == ["lz4", None]
    assert [record.loss for step, record in ours.items() if step <= 6] == [theirs[step].loss for step in range(1, 7)]
    changes = [change for event in run.events() if isinstance(event, ConfigChanged) for change in event.changes]
    assert {"path": "parallel.ranks", "old": 8, "new": 7, "kind": "recorded"} in changes
    started = [event for event in run.events() if isinstance(event, AttemptStarted)]
    assert [(event.ranks, event.source, event.restored_step) for event in started] == [(8, "init", 0), (7, "storage", 6)]
    layouts = [attempt["layout"] for attempt in ftrain_json("report", run.url)["attempts"]]
    assert ["dp8" in layouts[0], "dp7" in layouts[1]] == [True, True]
    assert "dp7" in ftrain("report", run.url).stdout
    assert "parallel.ranks: 8 -> 7" in output


@pytest.mark.parametrize("ranks", [pytest.param(1, id="one-rank"), pytest.param(3, id="three-ranks", marks=pytest.mark.slow)])
def test_runs_of_other_sizes_survive_a_kill_too(ranks: int, corpus: str, tmp_path: Path) -> None:
    quiet = TinyRun(folder=tmp_path / "quiet", corpus=corpus, ranks=ranks, steps=18)
    assert quiet.run()[0] == 0
    killed = f'[[faults]]\nkind = "kill"\nat = "step"\nstep = 13\nrank = {ranks - 1}\n'
    run = replace(quiet, folder=tmp_path / "killed", url="", extra=killed)
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == stored_digests(quiet.url)
    assert [event.step for event in run.events() if isinstance(event, Ready)] == [0, 12]


@pytest.mark.parametrize("point", ["copy", pytest.param("step", marks=pytest.mark.slow)])
def test_two_slots_are_enough(point: str, corpus: str, tmp_path: Path, unbroken: dict[str, str]) -> None:
    """One is overwritten while the other is the newest whole snapshot: a death in the copy falls back on that one."""
    killed = f'[[faults]]\nkind = "kill"\nat = "{point}"\nstep = 12\nrank = 1\n'
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=killed)
    with no_process_left(run):
        code, output = run.run("--set", "checkpoint.slots=2")
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)
    ready = [event.step for event in run.events() if isinstance(event, Ready)]
    assert ready == ([0, 9] if point == "copy" else [0, 12])


@pytest.mark.slow
def test_a_run_that_copies_beside_its_steps_and_stores_less_is_the_same_run(
    corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    """Without weights, the rest compressed. Killed once, and gone on with from storage in another layout: the state at the end
    is that of a run that does none of it.

    (Report 11 of the cases: a run that resumes from a checkpoint saved asynchronously goes on as from one that was not.)
    """
    killed = '[[faults]]\nkind = "kill"\nat = "step"\nstep = 13\nrank = 0\n'
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=killed)
    small = ("--set", "checkpoint.weights=false", "--set", "checkpoint.compression=zstd")
    assert run.run(*small, "--set", "checkpoint.overlap=true")[0] == 0
    assert compressor_at(run, run.steps) == "zstd"
    step, digests = stored_digests(run.url)
    assert step == run.steps
    assert digests == {name: value for name, value in unbroken.items() if not name.startswith("weights/")}
    assert len(digests) * 4 == len(unbroken) * 3
    again = ("--set", "run.steps=33", "--set", "parallel.ranks=1")
    code, output = run.run(*again)  # weights are stored from here on
    assert code == 0, output
    assert len(stored_digests(run.url)[1]) == len(unbroken)
