"""A rank that leaves without a word is what began it, whatever its peers say afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.proof import stored_digests
from recovery.classify import classify
from recovery.events import InterruptionClassified
from recovery.evidence import Evidence
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
