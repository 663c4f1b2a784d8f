"""What a run's processes are made of and what they leave: no torch in the supervisor, nothing of ours shadowed, no leaks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from ftrain.compose.proof import stored_digests
from recovery.client import ask
from recovery.events import InterruptionClassified, Ready
from tests.commands import ftrain
from tests.runs import FTRAIN, MARKS, TinyRun, finish, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

ENDLESS = 100_000


def has_torch(process: psutil.Process) -> bool:
    """Whether torch's library is mapped."""
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_torch_lives_in_the_workers_and_their_zygote_only(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=ENDLESS)
    parent = run.start()
    run.wait_for(lambda events: any(type(event).__name__ == "CheckpointCommitted" for event in events))
    with_torch = {kind: {has_torch(process) for process in processes} for kind, processes in run.processes().items()}
    assert with_torch == {"worker": {True}, "zygote": {True}, "coordinator": {False}, "agent": {False}, "keeper": {False}}
    assert not has_torch(psutil.Process(parent.pid))
    ask(run.local, "stop")
    assert finish(parent)[0] == 75


@pytest.mark.parametrize(
    "words",
    [
        ("report", "{url}"),
        ("report", "{url}", "--json"),
        ("status", "{url}"),
        ("ckpt", "ls", "{url}"),
        ("ckpt", "show", "{url}"),
        ("ckpt", "verify", "{url}@30"),
        ("ckpt", "diff", "{url}@27", "{url}@30"),
        ("run", "{config}", "--dry-run"),
        ("--help",),
    ],
    ids=" ".join,
)
def test_commands_import_no_torch(words: tuple[str, ...], unbroken_run: TinyRun) -> None:
    filled = [word.format(url=unbroken_run.url, config=unbroken_run.config) for word in words]
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", *FTRAIN[2:], *filled],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ftrain.cli.render" in imported or words == ("--help",), "the command did nothing"
    assert not {name for name in imported if name.partition(".")[0] == "torch"}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder in which packages with our names, and torch's, cannot be imported."""
    for name in ("storage", "recovery", "ftrain", "torch", "zarr"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "__init__.py").write_text(f"raise ImportError('a foreign {name} was imported')\n")
    return tmp_path / "work"


def test_foreign_packages_where_the_user_stands_shadow_nothing(
    foreign: Path, corpus: str, tmp_path: Path, unbroken: dict[str, str]
) -> None:
    run = TinyRun(folder=tmp_path / "run", corpus=corpus)
    script = str(Path(sys.executable).with_name("ftrain"))
    done = subprocess.run(
        [script, "run", str(run.config)], cwd=foreign, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert stored_digests(run.url) == (run.steps, unbroken)
    for words in (["report", run.url], ["ckpt", "verify", run.url], ["sample", run.url, "--tokens", "2"]):
        assert ftrain(*words, cwd=foreign).returncode == 0


# -- many restarts ------------------------------------------------------------------------------------------------------------


def deaths(count: int) -> str:
    """A worker killed after each step, the ranks in turn."""
    fault = '[[faults]]\nkind = "kill"\nat = "step"\nstep = {step}\nrank = {rank}\n'
    return "".join(fault.format(step=step, rank=step % 2) for step in range(1, count + 1))


def held(processes: Mapping[str, list[psutil.Process]]) -> Mapping[str, tuple[int, int]]:
    """Open descriptors of each supervising process, and how many children it has."""
    return {
        kind: (process.num_fds(), len(process.children()))
        for kind, of_kind in processes.items()
        if kind != "worker"
        for process in of_kind
    }


def zombies(agents: list[psutil.Process], parent: subprocess.Popen[str]) -> list[psutil.Process]:
    family = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
    family += [child for agent in agents for child in agent.children(recursive=True)]
    return [process for process in set(family) if process.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("restarts", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_restarts_leave_no_descriptor_zombie_or_orphan(restarts: int, corpus: str, tmp_path: Path) -> None:
    """Each restart makes progress (a snapshot each step), so the budget of restarts is never used up."""
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=ENDLESS, extra=deaths(restarts))
    options = ("--set", "checkpoint.snapshot_steps=1", "--set", "checkpoint.every_steps=0")
    once = TinyRun(folder=tmp_path / "once", corpus=corpus, steps=ENDLESS, extra=deaths(1))
    samples = []
    for each, count in ((once, 1), (run, restarts)):
        parent = each.start(*options)
        each.wait_for(
            lambda events, count=count: sum(isinstance(event, Ready) for event in events) == count + 1,
            timeout_s=20 + 10 * count,
        )
        each.wait_for_step(count + 3)
        samples.append(settled(each, parent, samples[0] if samples else None))
        ask(each.local, "stop")
        with no_process_left(each):
            code, output = finish(parent)
        assert code == 75, output
    assert samples[1] == samples[0]
    verdicts = [event for event in run.events() if isinstance(event, InterruptionClassified)]
    assert len(verdicts) == restarts


def settled(run: TinyRun, parent: subprocess.Popen[str], wanted: object) -> Mapping[str, tuple[int, int]]:
    """What is held once nothing passes through any more: the same twice in a row, and what is wanted if that comes.

    Nobody is asked meanwhile: on a busy machine the coordinator holds the connection of one who asked for a while.
    """
    processes = run.processes()
    assert {kind: len(of_kind) for kind, of_kind in processes.items() if kind != "worker"} == dict.fromkeys(
        (*MARKS, "zygote"), 1
    )
    deadline = time.monotonic() + 20
    before = held(processes)
    while True:
        time.sleep(0.1)
        now, left = held(processes), zombies(processes["agent"], parent)
        if (now == before and (wanted is None or now == wanted) and not left) or time.monotonic() > deadline:
            assert left == []
            return now
        before = now
