"""Whole runs with a gradient that is no number, a flipped bit, and a learning rate that cannot work."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.codes import ExitCode
from recovery.events import AttemptStarted, Decided, EpochTaken, InterruptionClassified, PlaceLost, Ready, Suspected, steps_of
from storage.objects import open_store
from storage.run import RunStore
from tests.chaos.test_kills import check_same_end, fault
from tests.commands import ftrain
from tests.runs import FTRAIN, TinyRun, finish, no_process_left
from tests.spoiled import WATCH, spoiled_corpus

pytestmark = [pytest.mark.dist, pytest.mark.chaos]


def test_a_gradient_that_is_no_number_once_costs_one_repetition_and_nothing_else(
    tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=fault("gradients", 7, kind="nan"))
    with no_process_left(run):
        code, output = run.run()
    assert code == ExitCode.DONE, output
    check_same_end(run, unbroken)
    told = run.events()
    (suspected,) = [event for event in told if isinstance(event, Suspected)]
    assert "step 7 was not finite, and finite when repeated: silent corruption" in suspected.reason
    assert all(record.applied for event in told for record in steps_of(event))
    assert sum(isinstance(event, AttemptStarted) for event in told) == 1


def test_a_run_that_cannot_work_goes_back_and_then_stops_for_a_person(tmp_path: Path, corpus: str) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus)
    often = ("--set", "checkpoint.every_steps=1", "--set", "checkpoint.snapshot_steps=1")
    # so many steps need more slots than there are: the first of them is stored before the doubt is told
    code, output = run.run("--set", "optimizer.lr=1e30", "--set", "recovery.nonfinite_steps=9", *often)
    assert code == ExitCode.NUMERICS, output
    told = run.events()
    verdicts = [event.verdict for event in told if isinstance(event, InterruptionClassified)]
    assert {verdict.class_ for verdict in verdicts} == {"numeric_divergence"}
    onsets = {event.reason.rpartition(" ")[2] for event in told if isinstance(event, Suspected)}
    assert len(onsets) == 1  # the repetition fails at the same step: data or code
    epochs = [event for event in told if isinstance(event, EpochTaken)]
    assert all((epoch.starts_from or 0) < int(next(iter(onsets))) for epoch in epochs)
    assert len(epochs) > 1
    stored = RunStore(open_store(run.url))
    keys = {info.key for info in stored.store.list("checkpoints/")}
    tainted = [key for key in keys if "/tainted-e" in key]
    assert tainted
    assert all(key.replace("/tainted-", "/commit-") in keys for key in tainted), "what it went back from is still there"
    doubtful = [info for info in stored.checkpoints() if info.step >= int(next(iter(onsets)))]
    assert {str(info.state) for info in doubtful} <= {"tainted", "incomplete"}, "what was on its way is let go"
    assert all(stored.open(info.step).verify().ok for info in doubtful if info.state == "tainted")


def test_a_flipped_bit_that_nobody_saw_is_found_when_its_steps_are_done_again(
    tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    extra = fault("gradients", 10, kind="flip") + fault("step", 11)  # killed before a snapshot holds the wrong state
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=extra)
    code, output = run.run()
    assert code == ExitCode.DONE, output
    assert stored_digests(run.url) == (run.steps, unbroken)
    assert any("step 11 was done again and its loss differs" in e.reason for e in run.events() if isinstance(e, Suspected))


@pytest.mark.slow
def test_a_flipped_bit_is_found_before_it_is_applied_and_names_its_rank(
    tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    """The gradient norm is far above the usual: the step is done again, and one rank's share is not what it was."""
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=fault("gradients", 22, kind="flip"))
    with no_process_left(run):
        code, output = run.run()
    assert code == ExitCode.DONE, output
    check_same_end(run, unbroken)
    (suspected,) = [event for event in run.events() if isinstance(event, Suspected)]
    assert suspected.rank == 1
    assert "silent corruption; rank 1 computed something else" in suspected.reason
    assert sum(isinstance(event, AttemptStarted) for event in run.events()) == 1, "two places: the breaker keeps both"


@pytest.mark.slow
def test_a_rank_that_computes_wrongly_is_left_out(tmp_path: Path, corpus: str) -> None:
    extra = fault("gradients", 22, kind="flip").replace("rank = 1", "rank = 2")
    run = TinyRun(folder=tmp_path, corpus=corpus, ranks=4, micro_batch=1, extra=extra, steps=40)
    with no_process_left(run):
        code, output = run.run()
    assert code == ExitCode.DONE, output
    told = run.events()
    (lost,) = [event for event in told if isinstance(event, PlaceLost)]
    assert lost.slot == 2
    assert lost.reason.startswith("silent_corruption: step 22 had a gradient norm of")
    assert [event.ranks for event in told if isinstance(event, AttemptStarted)] == [4, 3]
    steps = [record.step for event in told for record in steps_of(event)]
    assert steps == list(range(1, 41)), "a step was done twice in the history"


def newest_valid(run: TinyRun) -> int:
    return max(info.step for info in RunStore(open_store(run.url)).checkpoints() if info.state == "valid")


def begun_at(run: TinyRun, since: int = 0) -> list[int]:
    """The steps at which attempts began, after so many events."""
    return [event.step for event in run.events()[since:] if isinstance(event, Ready)]


@pytest.mark.slow
def test_a_stop_in_the_back_off_of_a_roll_back_leaves_nothing_from_after_the_onset_to_go_on_from(tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path / "run", corpus=spoiled_corpus(tmp_path, (30, 32), steps=60), steps=60)
    slowly = ("--set", "recovery.spike_steps=3", "--set", "recovery.backoff_s=60")
    with no_process_left(run):
        parent = run.start(*WATCH, *slowly)
        run.wait_for(lambda events: sum(isinstance(event, Decided) for event in events) == 2)
        assert ftrain("stop", run.url).returncode == 0
        code, output = finish(parent)
        assert code == ExitCode.STOPPED, output
        assert newest_valid(run) < 30
        told = len(run.events())
        code, output = run.run(*WATCH, *slowly)
        assert code == ExitCode.NUMERICS, output
    assert begun_at(run, told) == [27]
    assert newest_valid(run) == 27


@pytest.mark.slow
def test_after_code_12_the_same_command_tries_again_from_before_the_onset_and_a_person_may_say_that_it_is_fine(
    tmp_path: Path,
) -> None:
    """What makes no sense is the very last update: without going back the run would be over, and finished."""
    run = TinyRun(folder=tmp_path / "run", corpus=spoiled_corpus(tmp_path, (40, 40), steps=40), steps=40)
    watch = (*WATCH, "--set", "recovery.spike_steps=1")
    with no_process_left(run):
        for _ in range(2):
            told = len(run.events())
            code, output = run.run(*watch)
            assert code == ExitCode.NUMERICS, output
            assert newest_valid(run) == 36
        assert begun_at(run, told) == [36], "one try, and the same failure"
        (*_, packet) = (json.loads(path.read_text()) for path in sorted((run.local / "packets").glob("*.json")))
        (option,) = [option for option in packet["options"] if option["what"].startswith("the losses are fine")]
        pasted = option["command"].replace("&& ftrain ", f"&& {shlex.join(FTRAIN)} ")
        done = subprocess.run(pasted, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == ExitCode.DONE, done.stdout + done.stderr
    assert newest_valid(run) == 40


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_of_a_spike_does_not_make_the_one_before_it_go(tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path / "run", corpus=spoiled_corpus(tmp_path, (39, 43), steps=60), steps=60)
    keep = ("--set", "checkpoint.every_steps=10", "--set", "checkpoint.retention=[{keep='last', n=1}]")
    with no_process_left(run):
        code, output = run.run(*WATCH, *keep, "--set", "recovery.spike_steps=3", "--set", "checkpoint.snapshot_steps=5")
        assert code == ExitCode.NUMERICS, output
    assert begun_at(run) == [0, 30, 30]
    assert newest_valid(run) == 30
