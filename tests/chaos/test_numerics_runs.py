"""Whole runs with a gradient that is no number, a flipped bit, and a learning rate that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.codes import ExitCode
from recovery.events import AttemptStarted, EpochTaken, InterruptionClassified, Suspected, steps_of
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
