"""The zygote's rules, seen from its socket: it is driven here by a test that adopts its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from toy_run import PATIENCE_S, gone, toy_env, wait_until

from recovery.classify import classify
from recovery.evidence import ErrorReport, Evidence
from recovery.heartbeat import CONTROL_SIZE, RECORD_SIZE
from recovery.launch import become_subreaper, python
from recovery.memory import memfd
from recovery.messages import Fork, Forked, FromWorkerProcess, FromZygote, Payload, WorkerHello, ZygoteReady
from recovery.wire import channel, close_all, socket_pair
from recovery.worker import resolve

pytestmark = [pytest.mark.dist, pytest.mark.chaos]


class DrivenZygote:
    """One zygote, whose workers are adopted by the test's process."""

    def __init__(self, folder: Path, preload: str) -> None:
        become_subreaper()
        self.folder = folder
        ours, theirs = socket_pair()
        argv = python("recovery.zygote", "--preload", preload, "--socket-fd", str(theirs.fileno()))
        with (folder / "zygote.log").open("wb") as out:
            self.process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), env=toy_env(), stdout=out, stderr=out)
        theirs.close()
        self.link = channel(ours, FromZygote)

    def receive(self):
        frame = self.link.receive(PATIENCE_S)
        assert frame is not None, (self.folder / "zygote.log").read_text()
        return frame.message

    def fork(self, entry: str, *, agent_pid: int | None = None, **args):
        """A worker: the zygote's answer and the channel to the worker."""
        ours, theirs = socket_pair()
        log = os.open(self.folder / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        fds = {
            "log": log,
            "channel": theirs.fileno(),
            "heartbeat": memfd("h", RECORD_SIZE),
            "control": memfd("c", CONTROL_SIZE),
        }
        request = Fork(
            attempt=0,
            epoch=3,
            rank=0,
            index=0,
            entry=entry,
            args=args,
            env={"TOY": "yes"},
            fd_names=tuple(fds),
            agent_pid=agent_pid or os.getpid(),
            error_file=str(self.folder / "error.json"),
        )
        self.link.send(request, tuple(fds.values()))
        theirs.close()
        close_all([fds["log"], fds["heartbeat"], fds["control"]])
        return self.receive(), channel(ours, FromWorkerProcess)

    def close(self) -> None:
        self.link.close()
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture
def zygote(tmp_path):
    made = DrivenZygote(tmp_path, "toy")
    assert isinstance(made.receive(), ZygoteReady)
    yield made
    made.close()


def test_workers_are_adopted_and_their_status_is_ours_to_read(zygote, tmp_path):
    forked, worker = zygote.fork("toy_entries:leave", code=5)
    assert isinstance(forked, Forked)
    hello = worker.receive(PATIENCE_S).message
    assert hello == WorkerHello(pid=forked.pid)
    pid, status = os.waitpid(forked.pid, 0)
    assert (pid, os.waitstatus_to_exitcode(status)) == (forked.pid, 5)
    worker.close()


def test_a_workers_environment_and_name_are_its_own(zygote):
    forked, worker = zygote.fork("toy_entries:tell")
    worker.receive(PATIENCE_S)
    told = worker.receive(PATIENCE_S).message
    assert told == Payload(payload=b"yes 0 0 3")  # TOY, rank, attempt, epoch
    assert os.waitpid(forked.pid, 0)[1] == 0
    worker.close()


def test_the_entry_sees_signals_as_flags(zygote):
    forked, worker = zygote.fork("toy_entries:wait_for_flag")
    worker.receive(PATIENCE_S)
    assert worker.receive(PATIENCE_S).message == Payload(payload=b"waiting")
    os.kill(forked.pid, signal.SIGTERM)
    assert worker.receive(PATIENCE_S).message == Payload(payload=b"terminated True")
    assert os.waitpid(forked.pid, 0)[1] == 0
    worker.close()


def test_an_import_error_is_reported_before_the_exit(zygote, tmp_path):
    forked, worker = zygote.fork("toy_that_is_not_there:main")
    worker.receive(PATIENCE_S)
    failing = worker.receive(PATIENCE_S).message
    assert failing.error.startswith("ModuleNotFoundError: No module named 'toy_that_is_not_there'")
    assert os.waitstatus_to_exitcode(os.waitpid(forked.pid, 0)[1]) == 1
    report = msgspec.json.decode((tmp_path / "error.json").read_bytes(), type=ErrorReport)
    assert (report.type, report.rank) == ("ModuleNotFoundError", 0)
    verdict = classify(Evidence(log=report.log()))
    assert (verdict.class_, verdict.first_failing_rank) == ("dependency_error", 0)
    assert "No module named 'toy_that_is_not_there'" in verdict.reason
    assert "toy_that_is_not_there" in (tmp_path / "worker.log").read_text()
    worker.close()


def test_a_worker_nobody_adopts_does_not_stay(zygote):
    dead = subprocess.Popen([sys.executable, "-P", "-c", ""], stdin=subprocess.DEVNULL)
    dead.wait()
    forked, worker = zygote.fork("toy_entries:tell", agent_pid=dead.pid)
    assert worker.receive(PATIENCE_S) is None
    assert os.waitstatus_to_exitcode(os.waitpid(forked.pid, 0)[1]) == 1
    assert "not adopted by agent" in (zygote.folder / "zygote.log").read_text() + (zygote.folder / "worker.log").read_text()
    worker.close()


def test_a_killed_zygote_leaves_its_workers_alone(tmp_path):
    zygote = DrivenZygote(tmp_path, "toy")
    zygote.receive()
    forked, worker = zygote.fork("toy_entries:wait_for_flag")
    worker.receive(PATIENCE_S)
    assert worker.receive(PATIENCE_S).message == Payload(payload=b"waiting")
    zygote.process.kill()
    zygote.process.wait()
    assert not gone(forked.pid)
    os.kill(forked.pid, signal.SIGTERM)
    assert worker.receive(PATIENCE_S).message == Payload(payload=b"terminated True")
    assert os.waitpid(forked.pid, 0)[1] == 0
    worker.close()
    zygote.link.close()


def test_threads_at_import_are_refused(tmp_path):
    zygote = DrivenZygote(tmp_path, "toy_threads")
    assert zygote.link.receive(PATIENCE_S) is None
    assert zygote.process.wait(PATIENCE_S) == 1
    assert "Start threads in the worker's entry function" in (tmp_path / "zygote.log").read_text()


def test_a_zygote_keeps_no_descriptor_and_no_zombie(zygote):
    def count() -> int:
        return len(os.listdir(f"/proc/{zygote.process.pid}/fd"))

    before = count()
    for _ in range(5):
        forked, worker = zygote.fork("toy_entries:tell")
        os.waitpid(forked.pid, 0)
        worker.close()
    wait_until(lambda: count() == before, "descriptors given back")
    children = Path(f"/proc/{zygote.process.pid}/task/{zygote.process.pid}/children").read_text()
    assert children == ""


def test_entries_are_functions_of_modules():
    assert resolve("os:getpid") is os.getpid
    with pytest.raises(TypeError, match="an entry is `module:function`"):
        resolve("os")
