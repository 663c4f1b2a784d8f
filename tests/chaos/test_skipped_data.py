"""Data that make no sense are passed over if that was declared: recorded, and the same bits after any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.codes import ExitCode
from recovery.events import (
    AttemptStarted,
    CheckpointCommitted,
    Decided,
    InterruptionClassified,
    LayoutChosen,
    Ready,
    RunStarted,
    Suspected,
)
from storage.compress import Compressor
from storage.objects import open_store
from storage.run import RunStore
from tests.chaos.table import SLOWLY
from tests.commands import ftrain, ftrain_json
from tests.nodes_run import nodes_run
from tests.runs import TinyRun, kill_tree, no_process_left
from tests.spoiled import BATCH, spoiled_corpus
from tests.spoiled import WATCH as SEEN

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

STEPS = 40
BAD = (30, 31)  # updates whose data make no sense
WATCH = (*SEEN, "--set", "recovery.spike_steps=1")


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A corpus that is learnt at once (two tokens in turn), but for what the updates in BAD read: that is noise."""
    return spoiled_corpus(tmp_path_factory.mktemp("spoiled"), BAD, steps=STEPS)


@pytest.fixture(scope="module")
def declared(spoiled: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The end of an unbroken run that was told beforehand."""
    run = TinyRun(folder=tmp_path_factory.mktemp("declared"), corpus=spoiled, steps=STEPS)
    code, output = run.run(*WATCH, "--set", f"data.skip=[{{first={BAD[0]}, last={BAD[1]}}}]")
    assert code == 0, output
    assert sum(isinstance(event, AttemptStarted) for event in run.events()) == 1
    return stored_digests(run.url)[1]


def test_what_makes_no_sense_twice_is_passed_over_within_the_declared_budget_and_a_kill_changes_nothing(
    spoiled: str, declared: dict[str, str], tmp_path: Path
) -> None:
    extra = '[[faults]]\nkind = "kill"\nat = "step"\nstep = 38\nrank = 1\n'
    run = TinyRun(folder=tmp_path, corpus=spoiled, steps=STEPS, extra=extra)
    with no_process_left(run):
        code, output = run.run(*WATCH, "--set", "recovery.skip_updates=2")
    assert code == 0, output
    told = run.events()
    skips = [event.skip for event in told if isinstance(event, Decided) and event.skip is not None]
    assert skips == [(30, 30), (30, 30)], "each only after the same data made no sense twice"
    doubts = [event.onset for event in told if isinstance(event, Suspected) and event.onset is not None]
    assert doubts == [30, 30, 30, 30]
    assert not [event for event in told if isinstance(event, Suspected) and "silent corruption" in event.reason]
    assert stored_digests(run.url) == (STEPS, declared)
    progress = RunStore(open_store(run.url)).open().progress
    assert progress["skipped"] == [[30, 30, BATCH], [30, 30, BATCH]]
    assert progress["sequences"] == STEPS * BATCH, "what was trained on counts, what was passed over does not"
    assert [(row["first"], row["last"]) for row in ftrain_json("report", run.url)["skips"]] == skips
    assert "data passed over" in ftrain("report", run.url).stdout


@pytest.mark.slow
def test_not_declared_it_stops_for_a_person_with_the_command_that_does_and_the_command_does(
    spoiled: str, declared: dict[str, str], tmp_path: Path
) -> None:
    run = TinyRun(folder=tmp_path, corpus=spoiled, steps=STEPS)
    with no_process_left(run):
        code, output = run.run(*WATCH)
        assert code == ExitCode.NUMERICS, output
        (packet,) = (json.loads(path.read_text()) for path in (run.local / "packets").glob("*.json"))
        (option,) = [option for option in packet["options"] if option["what"].startswith("pass over the data of update 30")]
        assert option["command"].endswith("--set 'data.skip=[{first=30, last=30}]' --accept-change")
        assert not [event for event in run.events() if isinstance(event, Decided) and event.skip is not None]
        code, output = run.run(*WATCH, "--set", f"data.skip=[{{first={BAD[0]}, last={BAD[1]}}}]", "--accept-change")
        assert code == 0, output
    assert stored_digests(run.url) == (STEPS, declared)


@pytest.mark.slow
def test_a_range_that_lies_behind_takes_the_run_back_to_before_it(
    spoiled: str, declared: dict[str, str], tmp_path: Path
) -> None:
    extra = '[[faults]]\nkind = "stop"\nat = "step"\nstep = 37\nrank = 1\n'
    run = TinyRun(folder=tmp_path, corpus=spoiled, steps=STEPS, extra=extra)
    blind = ("--set", "optimizer.lr=1e-2", "--set", "recovery.spike_z=0", "--set", "recovery.replay_norm=0")
    blind += ("--set", f'checkpoint.local_url="{tmp_path}/disk"', "--set", "checkpoint.local_every_steps=3")
    parent = run.start(*blind)
    run.wait_for(lambda events: any(isinstance(it, CheckpointCommitted) and it.step == 36 for it in events))
    kill_tree(run, parent)
    with no_process_left(run):
        code, output = run.run(*blind, "--set", f"data.skip=[{{first={BAD[0]}, last={BAD[1]}}}]", "--accept-change")
    assert code == 0, output
    assert [event.step for event in run.events() if isinstance(event, Ready)] == [0, 27]
    assert stored_digests(run.url) == (STEPS, declared)
    before = [info for info in RunStore(open_store(run.url)).checkpoints() if info.state == "tainted"]
    assert all("data.skip passes over the data of update 30" in info.reason for info in before)


def skip(first: int, last: int) -> tuple[str, ...]:
    return ("--set", f"data.skip=[{{first={first}, last={last}}}]", "--accept-change")


@pytest.fixture(scope="module")
def other_data(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The end of an unbroken run that passed over what updates 20 and 21 would have read."""
    run = TinyRun(folder=tmp_path_factory.mktemp("other"), corpus=corpus)
    code, output = run.run(*skip(20, 21))
    assert code == 0, output
    return stored_digests(run.url)[1]


def orphaned(run: TinyRun, parent: subprocess.Popen[str], step: int) -> None:
    """Nobody is in charge any more, and the workers go on, a fifth of a second a step."""
    run.wait_for_step(step)
    for victim in (parent.pid, run.processes()["coordinator"][0].pid):
        os.kill(victim, signal.SIGKILL)
    parent.communicate()


def handed_over(run: TinyRun) -> list[tuple[str, int]]:
    """That the workers were found and made way, without an interruption; where each attempt began."""
    told = run.events()
    changed = [event.reason for event in told if isinstance(event, LayoutChosen)]
    assert changed == ["the config was changed while no coordinator lived"]
    assert not [event for event in told if isinstance(event, InterruptionClassified)]
    return [(event.source, event.step) for event in told if isinstance(event, Ready)]


@pytest.mark.slow
def test_workers_whose_coordinator_died_hear_of_what_may_change_and_what_may_not_is_refused(
    corpus: str, unbroken: dict[str, str], tmp_path: Path
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=SLOWLY)
    orphaned(run, run.start(), 12)
    code, output = run.run(*skip(20, 21))
    assert code == ExitCode.CONFIG
    assert "still step under another config" in output
    with no_process_left(run):
        code, output = run.run("--set", "checkpoint.snapshot_steps=5", "--set", "checkpoint.compression=lz4")
    assert code == 0, output
    assert RunStore(open_store(run.url)).open().manifest.compressor == Compressor(), "a keeper that was found, too"
    begun = handed_over(run)
    assert [event.readopted for event in run.events() if isinstance(event, RunStarted)] == [False, True]
    assert begun[0] == ("init", 0)
    assert begun[-1][0] == "memory"
    assert begun[-1][1] >= 12
    assert stored_digests(run.url) == (run.steps, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("orphaned_at", [pytest.param(12, id="ahead"), pytest.param(23, id="behind")])
def test_workers_of_other_nodes_whose_coordinator_died_learn_of_a_changed_range(
    orphaned_at: int, corpus: str, other_data: dict[str, str], tmp_path: Path
) -> None:
    """They are taken over as they are and still go by the old config; what they do with the wrong data does not count."""
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=f"[machine]\nranks_per_node = 1\n{SLOWLY}")
    with no_process_left(run), nodes_run(run, "n1", "n2"):
        orphaned(run, run.start(), orphaned_at)
        code, output = run.run(*skip(20, 21))
        assert code == 0, output
    begun = handed_over(run)
    assert begun[0] == ("init", 0)
    if orphaned_at < 20:
        assert orphaned_at <= begun[-1][1] < 20
    else:
        assert begun[-1] == ("storage", 18)
    assert stored_digests(run.url) == (run.steps, other_data)
