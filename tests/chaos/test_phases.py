"""Whole runs in phases: short windows, another layout, long windows; killed in each of them they end with the same state."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftrain.compose.proof import stored_digests
from recovery.client import ask
from recovery.events import AttemptStarted, InterruptionClassified, PhaseBegan, Ready, steps_of
from tests.commands import ftrain, ftrain_json
from tests.nodes_run import nodes_run
from tests.runs import TinyRun, finish, halt, no_process_left

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
    assert [event.begun for event in ready] == [((0, 0),), ((0, 64), (8, 0)), ((0, 64), (8, 48), (14, 0))]
    assert all(event.proof.startswith("digests of") for event in ready[1:]), "state loaded = state saved, at each seam"
    assert "from phase 1 to 2" in ready[2].proof
    assert not any(isinstance(event, InterruptionClassified) for event in events)
    done = [record.step for event in events for record in steps_of(event)]
    assert done == list(range(1, 21)), "no step is done twice, none is left out"
    assert "phase 2 of 0 to 2" in ftrain("watch", quiet.url, "--once").stdout


def test_the_report_has_a_line_for_each_phase_size_and_source(corpus: str, quiet: TinyRun) -> None:
    told = ftrain_json("report", quiet.url)
    assert [(row["phase"], row["step"]) for row in told["phases"]] == [(1, 8), (2, 14)]
    rows = told["pace"]["rows"]
    assert [(row["phase"], row["ranks"], row["steps"], row["from_step"]) for row in rows] == [
        (0, 1, 8, 0),
        (1, 2, 6, 8),
        (2, 2, 6, 14),
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert [row["proof"][:10] for row in rows] == ["", "digests of", "digests of"]
    assert told["pace"]["read"] == [[corpus, 32, 112, 3584], [corpus, 64, 24, 1536]]
    text = " ".join(ftrain("report", quiet.url).stdout.split())
    assert "phase 1 of 0 to 2, after step 8" in text
    assert "24 sequences of 64 tokens" in text


def strike(run: TinyRun, kind: str) -> None:
    """kill -9 of one of the run's processes, if it lives just now."""
    with suppress(psutil.NoSuchProcess, IndexError):
        os.kill(run.processes()[kind][0].pid, signal.SIGKILL)


def kill(step: int, rank: int, at: str = "step") -> str:
    return f'[[faults]]\nkind = "kill"\nat = "{at}"\nstep = {step}\nrank = {rank}\n'


def check_same_end(run: TinyRun, quiet: TinyRun) -> None:
    """The same state, bit for bit, by the same steps on the same data."""
    assert stored_digests(run.url) == stored_digests(quiet.url)
    assert learned(run) == learned(quiet)
    newest = [event.phase for event in run.events() if isinstance(event, PhaseBegan)][-1]
    assert newest == 2


def test_killed_once_in_each_phase_a_run_ends_as_the_unbroken_one(corpus: str, quiet: TinyRun, tmp_path: Path) -> None:
    """A worker in each of them, by SIGKILL; and between these the coordinator, in each of them too."""
    halts = "".join(halt(step, rank=0) for step in (2, 9, 15))
    run = replace(quiet, folder=tmp_path, url="", extra=PHASES + halts + kill(5, 0) + kill(11, 1) + kill(17, 0))
    with no_process_left(run):
        parent = run.start()
        for _ in (2, 9, 15):
            halted = run.halted()
            strike(run, "coordinator")
            halted.resume()
        code, output = finish(parent)
    assert code == 0, output
    check_same_end(run, quiet)
    verdicts = [event for event in run.events() if isinstance(event, InterruptionClassified)]
    assert len(verdicts) == 3, "the coordinator's deaths interrupt nothing"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["copy", "restore", "upload", "before_commit", "after_commit"])
@pytest.mark.parametrize("step", [8, 14])
def test_a_kill_during_the_change_over_itself(point: str, step: int, corpus: str, quiet: TinyRun, tmp_path: Path) -> None:
    """While the boundary's state is copied, stored or committed, or just loaded under the next phase."""
    run = replace(quiet, folder=tmp_path, url="", extra=PHASES + kill(step, 0, point))
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    check_same_end(run, quiet)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["coordinator", "agent", "keeper", "zygote"])
@pytest.mark.parametrize("step", [7, 8, 13, 14])
def test_any_process_may_die_around_a_boundary(victim: str, step: int, corpus: str, quiet: TinyRun, tmp_path: Path) -> None:
    """With the agent the memory goes too: storage may end before the boundary, and then the phase before it is gone on with."""
    run = replace(quiet, folder=tmp_path, url="", extra=PHASES)
    with no_process_left(run):
        parent = run.start()
        run.wait_for_step(step)
        strike(run, victim)
        code, output = finish(parent)
    assert code == 0, output
    check_same_end(run, quiet)


@pytest.mark.slow
def test_a_run_stopped_in_a_phase_goes_on_in_it_and_past_phases_are_fixed(corpus: str, quiet: TinyRun, tmp_path: Path) -> None:
    run = replace(quiet, folder=tmp_path, url="", extra=PHASES)
    parent = run.start()
    run.wait_for_step(9)
    ask(run.local, "stop")  # within milliseconds: `ftrain stop` would take longer to start than the phase has steps
    assert finish(parent)[0] == 75
    code, output = run.run("--set", "phases.0.from_tokens=1000")
    assert code != 0
    assert "phases.0.from_tokens: was 2000, is 1000: this phase has begun" in output
    code, output = run.run("--set", "phases.1.optimizer.lr=1e-3")
    assert code == 0, output
    assert "phases.1: " in output, "what a later phase does otherwise stands in the ledger"
    ours, theirs = learned(run), learned(quiet)
    assert {step: ours[step][:2] for step in range(1, 15)} == {step: theirs[step][:2] for step in range(1, 15)}
    assert ours[20][2] == pytest.approx(2 * (theirs[20][2] or 0))


@pytest.mark.slow
def test_a_resize_by_hand_is_of_the_present_phase_and_those_that_inherit_it(
    corpus: str, quiet: TinyRun, tmp_path: Path
) -> None:
    """From 2 ranks to 1 in phase 1; phase 2 cuts its windows over 2 ranks, so it must be asked for as well."""
    run = replace(quiet, folder=tmp_path, url="", steps=100_000, extra=PHASES.replace("3500", "3_500_000"))
    parent = run.start("--set", "schedule.kind=constant")
    run.wait_for_step(9)
    refused = ftrain("resize", run.url, "--ranks", "1")
    assert refused.returncode == 2
    assert "phases.1.parallel.ranks: given 1, with tp x cp x pp = 1 x 2 x 1 = 2" in refused.stderr
    assert ftrain_json("resize", run.url, "--ranks", "4")["changes"] == [{"path": "parallel.ranks", "old": 2, "new": 4}]
    run.wait_for(lambda events: any(isinstance(event, Ready) and event.attempt == 2 for event in events))
    told = ftrain_json("status", run.url)
    assert (told["run"]["phase"], told["run"]["phases"], told["run"]["layout"]) == (1, 3, "tp1 x cp1 x pp1 x dp4")
    run.wait_for_step([event.step for event in run.events() if isinstance(event, Ready)][-1] + 3)
    assert ftrain_json("status", run.url)["run"]["eta_s"] > 0
    ftrain("stop", run.url)
    with no_process_left(run):
        assert finish(parent)[0] == 75
    ready = [event for event in run.events() if isinstance(event, Ready)]
    assert ready[-1].proof.startswith("digests of"), "the same seam as that of a phase"
    again = next_config(run)
    assert again["phases"][0]["parallel"] == {"ranks": 4}
    assert again["parallel"]["ranks"] == 1, "phase 0 is what it was"


@pytest.mark.slow
def test_a_run_without_phases_goes_on_from_a_state_in_a_phase(quiet: TinyRun, tmp_path: Path) -> None:
    """What the other run read in its phases counts as read; the steps go on, and so does the next start."""
    run = replace(quiet, folder=tmp_path, url="", extra="", steps=22)
    code, output = run.run("--from", f"{quiet.url}@20")
    assert code == 0, output
    assert sorted(learned(run)) == [21, 22]
    assert not any(isinstance(event, PhaseBegan) for event in run.events())
    assert run.run("--set", "run.steps=23")[0] == 0


def next_config(run: TinyRun) -> dict[str, Any]:
    """The config that the next coordinator of a run goes on with."""
    found: dict[str, Any] = json.loads((run.local / "config.json").read_text())
    return found


@pytest.mark.slow
def test_row_47_replicas_are_added_step_by_step(corpus: str, tmp_path: Path) -> None:
    """1, 2 and 4 replicas as phases: the same global batch, one line a size, and each goes on from the very state before."""
    grown = "".join(
        f"[[phases]]\nfrom_tokens = {tokens}\nparallel = {{ ranks = {ranks} }}\n" for tokens, ranks in ((2048, 2), (4096, 4))
    )
    run = TinyRun(folder=tmp_path / "grown", corpus=corpus, ranks=1, micro_batch=1, steps=24, extra=grown)
    code, output = run.run()
    assert code == 0, output
    plain = replace(run, folder=tmp_path / "plain", url="", extra="")
    assert plain.run()[0] == 0
    ours, theirs = learned(run), learned(plain)
    assert {step: it[0] for step, it in ours.items()} == {step: it[0] for step, it in theirs.items()}, "the same data"
    assert [ours[step][1] for step in ours] == pytest.approx([theirs[step][1] for step in ours], rel=1e-5)
    rows = ftrain_json("report", run.url)["pace"]["rows"]
    assert [(row["ranks"], row["steps"]) for row in rows] == [(1, 8), (2, 8), (4, 8)]
    assert len({row["tokens_per_update"] for row in rows}) == 1
    assert [row["proof"][:10] for row in rows] == ["", "digests of", "digests of"]
    assert all(row["tokens_per_s"] > 0 and row["per_rank"] > 0 for row in rows)


@pytest.mark.slow
def test_phases_on_several_nodes_take_up_more_of_them(corpus: str, tmp_path: Path) -> None:
    """One rank a node: phase 1 waits for a second node. It begins from storage, whose digests every rank proves; so does phase
    2, whose layout is the same.
    """
    phases = (
        "[[phases]]\nfrom_tokens = 2048\nparallel = { ranks = 2 }\n[[phases]]\nfrom_tokens = 3584\ndata = { seq_len = 64 }\n"
    )
    machine = "[machine]\nranks_per_node = 1\n"
    quiet = TinyRun(folder=tmp_path / "one-machine", corpus=corpus, ranks=1, steps=18, extra=phases)
    assert quiet.run()[0] == 0
    run = replace(quiet, folder=tmp_path / "nodes", url="", extra=machine + phases)
    with no_process_left(run), nodes_run(run, "n1") as nodes:
        parent = run.start()
        run.wait_for(lambda events: any(isinstance(event, PhaseBegan) for event in events) or bool(learned(run).get(8)))
        nodes.join("n2")
        code, output = finish(parent)
        assert code == 0, output
    check_same_end(run, quiet)
    started = [event for event in run.events() if isinstance(event, AttemptStarted)]
    assert [(event.ranks, event.source, event.nodes) for event in started] == [
        (1, "init", ("n1",)),
        (2, "storage", ("n1", "n2")),
        (2, "storage", ("n1", "n2")),
    ]
    assert all(event.proof.startswith("digests of") for event in run.events() if isinstance(event, Ready) and event.step)
