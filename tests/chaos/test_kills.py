"""kill -9 of every kind of process at named points: the continued run ends bit for bit where the unbroken one did."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.events import CheckpointCommitted, Event, InterruptionClassified, ProcessDied, Ready, steps_of
from storage.objects import open_store
from storage.run import RunStore
from tests.runs import TinyRun, finish, halt, kill_tree, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

SNAPSHOT_STEPS, STORE_STEPS = 3, 9
PRESSED = ("--set", "checkpoint.compression=lz4", "--set", "checkpoint.retention=[]")


def fault(at: str, step: int, rank: int = 1, kind: str = "kill") -> str:
    return f'[[faults]]\nkind = "{kind}"\nat = "{at}"\nstep = {step}\nrank = {rank}\n'


def redone(events: list[Event]) -> int:
    """The largest number of steps that one interruption cost."""
    reached, most = 0, 0
    for event in events:
        if isinstance(event, Ready):
            most = max(most, reached - event.step)
        for record in steps_of(event):
            reached = record.step if isinstance(event, Ready) else max(reached, record.step)
    return most


def check_same_end(run: TinyRun, unbroken: dict[str, str]) -> None:
    step, digests = stored_digests(run.url)
    assert step == run.steps
    assert digests == unbroken


WORKER_POINTS = [
    pytest.param("step", 10, id="between-steps"),
    pytest.param("step", 12, id="right-after-a-snapshot"),
    pytest.param("copy", 12, id="in-the-copy"),
    pytest.param("copy", 18, id="in-the-copy-of-an-upload", marks=pytest.mark.slow),
    pytest.param("copy", 30, id="in-the-last-copy", marks=pytest.mark.slow),
    pytest.param("step", 1, id="before-any-snapshot", marks=pytest.mark.slow),
    pytest.param("step", 30, id="after-the-last-step", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("point", "step"), WORKER_POINTS)
def test_row_76_a_killed_worker_costs_at_most_a_snapshot_interval(
    point: str, step: int, tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=fault(point, step))
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    check_same_end(run, unbroken)
    events = run.events()
    assert redone(events) <= SNAPSHOT_STEPS
    verdicts = [event.verdict for event in events if isinstance(event, InterruptionClassified)]
    assert [verdict.first_failing_rank for verdict in verdicts] == [1]
    assert any("-9" in line.text or "SIGKILL" in line.text for line in verdicts[0].evidence)
    assert verdicts[0].class_ == "unknown"  # of a SIGKILL nothing more is known, whoever sent it
    said = "[rank1]: injected by this run's config: faults.0 kill at "
    assert any(line.text.startswith(said) for line in verdicts[0].evidence)
    assert "SIGKILL, injected by this run's config" in verdicts[0].reason


@pytest.mark.slow
def test_a_worker_killed_in_a_copy_that_the_keeper_already_stores_leaves_nothing_of_it(tmp_path: Path, corpus: str) -> None:
    """One rank on two cores: its keeper works behind the copy. What is stored of step 18 is the second attempt's."""
    runs = {
        name: TinyRun(folder=tmp_path / name, corpus=corpus, ranks=1, extra=extra)
        for name, extra in (("unbroken", ""), ("killed", fault("copy", 18, rank=0)))
    }
    for run in runs.values():
        with no_process_left(run):
            code, output = run.run()
        assert code == 0, output
    assert stored_digests(runs["killed"].url) == stored_digests(runs["unbroken"].url)
    assert sorted(path.name for path in Path(runs["killed"].url).glob("checkpoints/step-00000018/*.pack")) == [
        "e0000-a0001-r00000.pack"
    ]


@pytest.mark.parametrize(
    "point",
    [
        "upload",
        "before_commit",
        "after_commit",
        pytest.param("before_manifest", marks=pytest.mark.slow),
        pytest.param("after_manifest", marks=pytest.mark.slow),
    ],
)
def test_keeper_and_coordinator_die_and_the_workers_step_on(
    point: str, tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    """After the commit the next keeper may send a pack again: compressed, it must be the same bytes, too."""
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=fault(point, STORE_STEPS))
    with no_process_left(run):
        code, output = run.run(*(PRESSED if point == "after_commit" else ()))
    assert code == 0, output
    check_same_end(run, unbroken)
    if point == "after_commit":
        assert RunStore(open_store(run.url)).open(STORE_STEPS).verify().ok
    events = run.events()
    assert {event.attempt for event in events if isinstance(event, Ready)} == {0}, "the workers were restarted"
    assert not any(isinstance(event, InterruptionClassified) for event in events)


@pytest.mark.parametrize("kind", ["keeper", "zygote", "coordinator"])
def test_helpers_killed_between_steps_take_nobody_along(
    kind: str, tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=halt(5))
    parent = run.start()
    halted = run.halted()
    os.kill(run.processes()[kind][0].pid, signal.SIGKILL)
    halted.resume()
    with no_process_left(run):
        code, output = finish(parent)
    assert code == 0, output
    check_same_end(run, unbroken)
    died = [event for event in run.events() if isinstance(event, ProcessDied)]
    assert kind in {event.kind for event in died if event.status != 0}
    assert [event.status for event in died if event.kind == "worker"] == [0, 0], "no worker went with it"
    attempts = {event.attempt for event in run.events() if isinstance(event, Ready)}
    assert attempts == {0}  # a coordinator's successor may be told of it once more


def test_a_killed_agent_costs_at_most_the_steps_since_the_last_commit(
    tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=halt(STORE_STEPS + 2))
    parent = run.start()
    run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
    os.kill(run.processes()["agent"][0].pid, signal.SIGKILL)
    with no_process_left(run):
        code, output = finish(parent)
    assert code == 0, output
    check_same_end(run, unbroken)
    events = run.events()
    again = next(number for number, event in enumerate(events) if isinstance(event, Ready) and event.attempt == 1)
    committed = [event.step for event in events[:again] if isinstance(event, CheckpointCommitted)]
    assert (events[again].source, events[again].step) == ("storage", max(committed))


def test_row_48_the_whole_tree_is_killed_and_the_same_command_goes_on(
    tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=halt(STORE_STEPS + 2))
    parent = run.start()
    run.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
    kill_tree(run, parent)
    with no_process_left(run):
        code, output = run.run()
    assert code == 0, output
    check_same_end(run, unbroken)
