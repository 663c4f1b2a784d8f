"""Whole runs that the supervisor stops on purpose: what the person, the scheduler and the ledger are told."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from ftrain.compose.proof import stored_digests
from recovery.codes import ExitCode
from recovery.events import InterruptionClassified, Ready, SignalSent, StopRequested
from tests.chaos.table import SLOWLY
from tests.chaos.test_kills import fault
from tests.commands import ftrain, ftrain_json
from tests.hooks import hook
from tests.runs import TinyRun, asked_to_stop, finish, halt, no_process_left

pytestmark = [pytest.mark.dist, pytest.mark.chaos]


def test_a_program_error_ends_in_a_packet_that_the_report_shows(tmp_path: Path, corpus: str) -> None:
    with hook() as server, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        extra = f'webhook = "{server.url}"\nmetrics_port = {port}\n' + fault("step", 4, kind="raise")
        run = TinyRun(folder=tmp_path, corpus=corpus, extra=extra)
        with no_process_left(run):
            code, output = run.run()
    assert code == ExitCode.GIVEN_UP, output
    assert stored_digests(run.url)[0] == 3, "the newest snapshot, which only memory had"
    report = ftrain_json("report", run.url)
    packet = report["packet"]
    unserved = f"no metrics are served on port {port} of 127.0.0.1 (Address already in use): set another recovery.metrics_port"
    assert unserved in output
    (notice,) = (told for told in report["checkpoints"]["notices"] if told["topic"] == "metrics")
    assert notice["text"].startswith(unserved)
    assert [told["packet"] for told in server.received] == [packet]  # once
    assert "software_error in software, first rank 1" in packet["headline"]
    assert packet["command"] == f"ftrain run {run.config}"
    text = ftrain("report", run.url).stdout
    assert unserved in " ".join(text.split())
    assert f"go on     ftrain run {run.config}" in text
    assert "ftrain_interruptions_total" in (run.local / "metrics.prom").read_text()
    (incident,) = (run.local / "incidents").glob("*.json")
    again = ftrain_json("classify", str(incident))
    assert (again["class"], again["first_failing_rank"]) == ("software_error", 1)


def test_a_spot_notice_is_followed_and_the_same_command_goes_on(tmp_path: Path, corpus: str, unbroken: dict[str, str]) -> None:
    notice = tmp_path / "notice"
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=SLOWLY + halt(4))
    options = ("--set", f'recovery.notice="{notice}"', "--set", "recovery.notice_poll_s=0.1")
    parent = run.start(*options)
    halted = run.halted()
    notice.write_text('{"action": "terminate", "time": "2017-09-18T08:22:00Z"}')
    run.wait_for(asked_to_stop)
    halted.resume()
    with no_process_left(run):
        code, output = finish(parent)
    assert code == ExitCode.STOPPED, output
    (cause,) = ftrain_json("report", run.url)["causes"]
    assert (cause["class"], cause["planned"]) == ("preemption", True)
    notice.unlink()
    code, output = run.run(*options)
    assert code == ExitCode.DONE, output
    assert stored_digests(run.url) == (run.steps, unbroken)


def test_the_warning_of_a_scheduler_saves_and_its_sigterm_does_not_hurry(tmp_path: Path, corpus: str) -> None:
    slurm = {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=SLOWLY + halt(4), env=slurm)
    parent = run.start()
    halted = run.halted()
    parent.send_signal(signal.SIGUSR1)
    run.wait_for(asked_to_stop)
    parent.send_signal(signal.SIGTERM)
    halted.resume()
    with no_process_left(run):
        code, output = finish(parent)
    assert code == ExitCode.STOPPED, output
    told = run.events()
    assert [event.by for event in told if isinstance(event, StopRequested)] == ["SIGUSR1"]
    assert not any(isinstance(event, SignalSent) for event in told)
    assert [event.verdict.class_ for event in told if isinstance(event, InterruptionClassified)] == ["preemption"]


@pytest.mark.slow
def test_a_run_that_must_go_on_elsewhere_takes_its_newest_snapshot_along(
    tmp_path: Path, corpus: str, unbroken: dict[str, str]
) -> None:
    error = "CUDA error: uncorrectable ECC error encountered"
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=fault("step", 17, kind="raise") + f'text = "{error}"\n')
    with no_process_left(run):
        code, output = run.run("--set", "recovery.elastic=false")
    assert code == ExitCode.RETRY_ELSEWHERE, output
    assert stored_digests(run.url)[0] == 15
    with no_process_left(run):
        code, output = run.run("--set", "recovery.elastic=false")
    assert code == ExitCode.DONE, output
    assert [(event.source, event.step) for event in run.events() if isinstance(event, Ready)] == [("init", 0), ("storage", 15)]
    assert ftrain_json("report", run.url)["steps_lost"] <= 17 - 15
    assert stored_digests(run.url) == (run.steps, unbroken)


@pytest.mark.slow
def test_a_stop_that_the_workers_cannot_follow_stores_what_memory_holds(tmp_path: Path, corpus: str) -> None:
    run = TinyRun(folder=tmp_path, corpus=corpus, extra=fault("step", 8, kind="loop"))
    parent = run.start("--set", "recovery.stop_s=4")
    run.wait_for_step(8)  # the newest snapshot is that of step 6; nothing has gone to storage
    ftrain("stop", run.url)
    with no_process_left(run):
        code, output = finish(parent)
    assert code == ExitCode.STOPPED, output
    assert stored_digests(run.url)[0] == 6
