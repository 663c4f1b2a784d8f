"""Whole runs in phases: short windows, another layout, long windows; killed in each of them they end with the same state."""

from __future__ import annotations

import pytest

from recovery.events import AttemptStarted, InterruptionClassified, PhaseBegan, Ready, steps_of
from tests.runs import TinyRun

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

PHASES = """
[[phases]] # another layout, for the same windows: 8 x 32 tokens an update, so from step 8 on
from_tokens = 2000
[phases.parallel]
ranks = 2

[[phases]] # longer windows, fewer of them, another curve: from step 14 on
from_tokens = 3500
[phases.data]
seq_len = 64
[phases.batch]
global_batch = 4
micro_batch = 1
[phases.parallel]
cp = 2
[phases.optimizer]
lr = 5e-4
[phases.schedule]
warmup_steps = 2
[phases.model]
rope_base = 1e6
"""
FIRSTS = [0, 8, 14]


@pytest.fixture(scope="module")
def quiet(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Three phases, undisturbed."""
    run = TinyRun(folder=tmp_path_factory.mktemp("phases"), corpus=corpus, ranks=1, steps=20, extra=PHASES)
    code, output = run.run()
    assert code == 0, output
    return run


def learned(run: TinyRun) -> dict[int, tuple[int, float | None, float | None]]:
    """step -> tokens, loss and learning rate, as finished last."""
    found = {}
    for event in run.events():
        for record in steps_of(event):
            found[record.step] = (record.tokens, record.loss, record.lr)
    return found


def test_a_run_changes_over_at_each_boundary_through_its_own_checkpoint(quiet: TinyRun) -> None:
    events = quiet.events()
    began = [event for event in events if isinstance(event, PhaseBegan)]
    assert [(event.phase, event.phases, event.step, event.from_tokens) for event in began] == [
        (1, 3, 8, 2000),
        (2, 3, 14, 3500),
    ]
    assert {"path": "data.seq_len", "old": 32, "new": 64} in began[1].changes
    started = [event for event in events if isinstance(event, AttemptStarted)]
    assert [(event.ranks, event.source, event.restored_step) for event in started] == [
        (1, "init", 0),
        (2, "memory", 8),
        (2, "memory", 14),
    ]
    ready = [event for event in events if isinstance(event, Ready)]
    assert [event.step for event in ready] == FIRSTS
    assert all(event.proof.startswith("digests of") for event in ready[1:]), "state loaded = state saved, at each seam"
    assert "from phase 1 to 2" in ready[2].proof
    assert not any(isinstance(event, InterruptionClassified) for event in events)
    done = [record.step for event in events for record in steps_of(event)]
    assert done == list(range(1, 21)), "no step is done twice, none is left out"
