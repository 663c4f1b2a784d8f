"""Two runs on one URL: one proceeds, the other is told who holds it; a zombie of an older epoch does no harm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from ftrain.compose.launch import checked
from ftrain.compose.proof import stored_digests
from ftrain.load import load
from recovery.client import ask
from recovery.codes import ExitCode
from recovery.events import CheckpointCommitted, RunEnded, RunStarted, StorageNotice
from recovery.owner import this_process
from storage.lease import read_holder, renew
from storage.objects import open_store
from storage.run import RunStore
from tests.runs import TinyRun, finish, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]


def test_the_second_of_two_runs_on_one_url_is_told_who_holds_it(corpus: str, tmp_path: Path) -> None:
    """They share nothing but the URL: another local folder, as on another machine."""
    first, second = (
        TinyRun(
            folder=tmp_path / name,
            corpus=corpus,
            url=str(tmp_path / "run"),
            local_dir=str(tmp_path / name / "local"),
            steps=100_000,
        )
        for name in ("a", "b")
    )
    parent = first.start()
    first.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
    held = read_holder(open_store(first.url))
    assert held is not None
    code, output = second.run()
    assert code == ExitCode.HELD, output
    assert f"is held by process {held.record.owner['pid']} on {held.record.owner['host']}" in " ".join(output.split())
    ask(first.local, "stop")
    assert finish(parent)[0] == ExitCode.STOPPED
    assert RunStore(open_store(first.url)).open().verify().ok
    after = read_holder(open_store(first.url))
    assert after is not None
    assert after.over, "it let go"


def wait_for_one(starts: list[subprocess.Popen[str]]) -> int:
    """The number of the one that ends."""
    while True:
        for number, start in enumerate(starts):
            if start.poll() is not None:
                return number
        time.sleep(0.02)


def test_of_two_starts_at_once_the_refused_one_changes_nothing(corpus: str, tmp_path: Path) -> None:
    """What the winner's next coordinator would read is the winner's; the loser names who holds the run."""
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=100_000)
    rates = (2e-3, 5e-3)
    starts = [run.start("--set", f"optimizer.lr={rate}") for rate in rates]
    run.parent = None  # whichever
    run.wait_for(lambda events: any(isinstance(event, RunStarted) for event in events))
    lost = wait_for_one(starts)
    code, output = finish(starts[lost])
    assert code == ExitCode.HELD, output
    assert re.search(r"process \d+ on ", " ".join(output.split())), output
    won = 1 - lost
    run.parent = starts[won]
    written = [msgspec.json.decode((run.local / name).read_bytes()) for name in ("config.json", "launch.json")]
    assert [record.get("config", record)["optimizer"]["lr"] for record in written] == [rates[won]] * 2
    ask(run.local, "stop")
    assert finish(starts[won])[0] == ExitCode.STOPPED
    (began,) = [event for event in run.events() if isinstance(event, RunStarted)]
    assert began.config["optimizer"]["lr"] == rates[won]


def test_a_start_that_has_not_begun_yet_holds_the_run(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=3)
    config = load(str(run.config), [])
    _, held = checked(config, accept_change=False, origin=None, take_over=False)
    with held:
        code, output = run.run("--set", "optimizer.lr=5e-3")
        assert code == ExitCode.HELD, output
        assert f"process {os.getpid()} on" in " ".join(output.split())
        assert [path.name for path in run.local.glob("*.json")] == ["owner.json"]
    assert run.run()[0] == ExitCode.DONE


def test_a_live_owner_on_another_host_is_refused_until_it_is_taken_over(corpus: str, tmp_path: Path) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, steps=3)
    elsewhere = msgspec.structs.replace(this_process(), host="node-b", pid=77)
    renew(open_store(run.url), epoch=0, owner=msgspec.to_builtins(elsewhere), lease_s=600.0)
    code, output = run.run()
    assert code == ExitCode.HELD, output
    assert "process 77 on node-b" in " ".join(output.split())
    assert "--take-over" in output
    code, output = run.run("--take-over")
    assert code == 0, output


def test_a_zombie_that_was_taken_over_leaves_and_the_new_history_is_unharmed(corpus: str, tmp_path: Path) -> None:
    """The first coordinator and all of its processes are stopped, a second run takes over, then the first wake up again."""
    lease = "[storage]\nlease_s = 10"
    first = TinyRun(
        folder=tmp_path / "a",
        corpus=corpus,
        url=str(tmp_path / "run"),
        local_dir=str(tmp_path / "a/local"),
        steps=100_000,
        extra=lease,
    )
    second = TinyRun(folder=tmp_path / "b", corpus=corpus, url=first.url, local_dir=str(tmp_path / "b/local"), extra=lease)
    parent = first.start()
    with no_process_left(first):
        first.wait_for(lambda events: any(isinstance(event, CheckpointCommitted) for event in events))
        asleep = [process.pid for group in first.processes().values() for process in group]
        for pid in asleep:
            os.kill(pid, signal.SIGSTOP)
        code, output = second.run("--take-over")
        before = stored_digests(second.url)
        for pid in asleep:
            os.kill(pid, signal.SIGCONT)
        assert code == 0, output
        first.wait_for(lambda events: any(isinstance(event, StorageNotice) and event.topic == "owner" for event in events))
        finish(parent)
    assert any(isinstance(event, RunEnded) for event in first.events())
    assert stored_digests(second.url) == before
    assert before[0] == 30


def test_two_runs_do_not_share_a_local_folder_and_one_that_was_moved_keeps_its_own(corpus: str, tmp_path: Path) -> None:
    first, second = (
        TinyRun(
            folder=tmp_path / name, corpus=corpus, url=str(tmp_path / name / "run"), local_dir=str(tmp_path / "local"), steps=3
        )
        for name in ("a", "b")
    )
    assert first.run()[0] == 0
    before = first.events()
    code, output = second.run()
    assert code == ExitCode.CONFIG, output
    assert f"holds the run at {first.url}" in " ".join(output.split())
    assert "run.local_dir" in output
    assert not Path(second.url).exists()
    assert first.events() == before
    Path(first.url).rename(second.url)
    code, output = second.run("--set", "run.steps=4")
    assert code == 0, output
    assert second.events()[: len(before)] == before
