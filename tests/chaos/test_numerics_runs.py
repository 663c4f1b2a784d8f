"""Whole runs with a gradient that is no number, a flipped bit, and a learning rate that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.codes import ExitCode
from recovery.events import AttemptStarted, EpochTaken, InterruptionClassified, PlaceLost, Suspected, steps_of
from storage.objects import open_store
from storage.run import RunStore
from tests.chaos.test_kills import check_same_end, fault
from tests.runs import TinyRun, no_process_left

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
    code, output = run.run(
        "--set", "optimizer.lr=1e30", "--set", "checkpoint.every_steps=2", "--set", "checkpoint.snapshot_steps=2"
    )
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
    assert all(info.state == "tainted" or info.epoch == epochs[-1].epoch for info in doubtful)
    assert all(stored.open(info.step).verify().ok for info in doubtful)


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
