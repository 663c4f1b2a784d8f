"""What a failure is taken for when its rank says nothing, and what repeated failures leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.proof import stored_digests
from recovery.classify import classify
from recovery.events import InterruptionClassified, Ready
from recovery.evidence import Evidence
from storage.objects import open_store
from tests.runs import TinyRun, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos, pytest.mark.slow]


def test_a_rank_that_leaves_with_1_and_no_word_is_blamed_and_not_the_network(
    corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    extra = '[[faults]]\nkind = "exit"\nat = "gradients"\nstep = 10\nrank = 1\n'
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=extra)
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)
    (verdict,) = [event.verdict for event in run.events() if isinstance(event, InterruptionClassified)]
    assert (verdict.class_, verdict.first_failing_rank, verdict.action) == ("unknown", 1, "restart")
    (kept,) = (run.local / "incidents").glob("*.json")
    assert classify(msgspec.json.decode(kept.read_bytes(), type=Evidence)) == verdict, (
        "the recorded evidence says the same again"
    )
    assert json.loads(kept.read_text())["order"][0] == "1"


def test_what_a_retry_from_an_older_checkpoint_leaves_behind_is_tainted_and_kept(
    corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    """Four times the same failure at the same step: the next attempt begins with the checkpoint before the newest."""
    failing = '[[faults]]\nkind = "kill"\nat = "step"\nstep = 14\nrank = 1\n'
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=4 * failing)
    with no_process_left(run):
        patient = ("--set", "recovery.unknown_restarts=5", "--set", "recovery.max_restarts=5")
        code, output = run.run("--set", "checkpoint.every_steps=3", *patient)
    assert code == 0, output
    assert stored_digests(run.url) == (run.steps, unbroken)
    assert [event.step for event in run.events() if isinstance(event, Ready)][-1] == 9
    keys = {info.key for info in open_store(run.url).list("checkpoints/")}
    (taint,) = [key for key in keys if "/tainted-" in key]
    assert "step-00000012" in taint
    assert taint.replace("/tainted-", "/commit-") in keys
