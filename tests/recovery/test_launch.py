"""Starting processes, and the thin parent that keeps a coordinator alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from toy_run import gone, wait_until

from recovery.codes import ExitCode
from recovery.launch import Budget, Spawn, boot_id, children, is_alive, python, reap_others, spawn, start_time, supervise

pytestmark = pytest.mark.dist

PREAMBLE = "import os, signal, sys, time\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n"


def script(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(PREAMBLE + body)
    return [sys.executable, "-P", str(path), str(tmp_path)]


def run_supervise(tmp_path: Path, body: str, **options) -> tuple[int, list[int]]:
    """supervise() in a process of its own (it changes signal handlers and adopts); its code and the pids of each life."""
    argv = script(tmp_path, "(folder / 'lives').open('a').write(f'{os.getpid()}\\n')\n" + body)
    code = (
        "import sys; from pathlib import Path; from recovery.launch import Budget, supervise\n"
        f"sys.exit(supervise({argv!r}, log=Path({str(tmp_path / 'log')!r}), {options.get('extra', '')}))"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", code])
    if "during" in options:
        options["during"](process)
    status = process.wait(60)
    return status, [int(word) for word in (tmp_path / "lives").read_text().split()]


def lives(tmp_path: Path) -> list[int]:
    path = tmp_path / "lives"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def test_identity_of_processes():
    own = start_time(os.getpid())
    assert own is not None
    assert is_alive(os.getpid(), own)
    assert not is_alive(os.getpid(), own + 1)
    assert start_time(2**22 + 1) is None
    assert len(boot_id()) == 36


def test_a_zombie_is_not_alive():
    process = subprocess.Popen([sys.executable, "-P", "-c", ""], stdin=subprocess.DEVNULL)
    wait_until(lambda: start_time(process.pid) is None, "its end")
    assert Path(f"/proc/{process.pid}").exists()
    assert process.pid in children()
    process.wait()


def test_spawn_closes_everything_but_what_is_passed(tmp_path):
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)  # even then
    body = "import json\nprint(json.dumps(sorted(int(n) for n in os.listdir('/proc/self/fd'))), os.environ['TOY'])"
    process = spawn(Spawn(argv=script(tmp_path, body), log=tmp_path / "sub" / "log", env={"TOY": "yes"}, fds=(writer,)))
    assert process.wait(20) == 0
    words = (tmp_path / "sub" / "log").read_text()
    seen = {int(word.strip("[],")) for word in words.split()[:-1]}
    assert seen - {3} - {writer} == {0, 1, 2}  # 3: the listing itself
    assert words.split()[-1] == "yes"
    os.close(reader)
    os.close(writer)


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        spawn(Spawn(argv=["/nowhere/program"], log=tmp_path / "log", dies_with_us=True))


@pytest.mark.chaos
def test_a_child_that_dies_with_its_parent(tmp_path):
    child = tmp_path / "child.py"
    child.write_text("import signal\nwhile True: signal.pause()\n")
    body = (
        "from recovery.launch import Spawn, spawn\n"
        f"process = spawn(Spawn(argv=[sys.executable, {str(child)!r}], log=folder / 'log', dies_with_us=True))\n"
        "(folder / 'pid').write_text(str(process.pid))\n"
        "while True: signal.pause()\n"
    )
    parent = subprocess.Popen(script(tmp_path, body))
    text = wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "pid")
    assert not gone(int(text))
    parent.kill()
    parent.wait()
    wait_until(lambda: gone(int(text)), "the child's end")


def test_our_modules_are_started_immune_to_the_current_folder(tmp_path):
    (tmp_path / "recovery.py").write_text("raise RuntimeError('the wrong one')")
    code = subprocess.run(python("recovery.zygote", "--help"), cwd=tmp_path, capture_output=True, check=False)
    assert code.returncode == 0
    assert b"--preload" in code.stdout


@pytest.mark.parametrize("code", [0, 1, 13, 75])
def test_an_exit_code_of_its_own_is_final(tmp_path, code):
    status, pids = run_supervise(tmp_path, f"sys.exit({code})")
    assert (status, len(pids)) == (code, 1)


@pytest.mark.chaos
def test_a_killed_coordinator_is_started_again(tmp_path):
    body = "if len((folder / 'lives').read_text().split()) < 4: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(75)"
    status, pids = run_supervise(tmp_path, body)
    assert (status, len(pids)) == (75, 4)


@pytest.mark.chaos
def test_but_not_for_ever(tmp_path):
    status, pids = run_supervise(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", extra="budget=Budget(deaths=2)")
    assert (status, len(pids)) == (ExitCode.GIVEN_UP, 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_is_handed_on_and_never_lost(tmp_path, number):
    # The signal arrives long before the coordinator has handlers: it stays pending until they stand.
    body = (
        "(folder / 'started').touch()\n"
        "while not (folder / 'sent').exists(): time.sleep(0.01)\n"
        "from recovery.launch import accept_stop_signals\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(75))\n"
        "accept_stop_signals()\n"
        "while True: signal.pause()\n"
    )

    def during(process):
        wait_until((tmp_path / "started").exists, "start")
        process.send_signal(number)
        (tmp_path / "sent").touch()

    status, pids = run_supervise(tmp_path, body, during=during)
    assert (status, len(pids)) == (75, 1)


@pytest.mark.chaos
def test_who_was_asked_to_stop_asks_the_successor_too(tmp_path):
    body = (
        "first = len((folder / 'lives').read_text().split()) == 1\n"
        "from recovery.launch import accept_stop_signals\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL) if first else sys.exit(75))\n"
        "(folder / 'ready').touch()\n"
        "accept_stop_signals()\n"
        "while True: signal.pause()\n"
    )

    def during(process):
        wait_until((tmp_path / "ready").exists, "start")
        process.send_signal(signal.SIGTERM)

    status, pids = run_supervise(tmp_path, body, during=during)
    assert (status, len(pids)) == (75, 2)


def test_supervise_reaps_what_it_adopts_and_ticks(tmp_path):
    # The coordinator leaves an orphan (as it leaves its agent when it is killed), which ends while the parent still lives.
    body = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    orphan = os.fork()\n"
        "    if orphan == 0: os._exit(0)\n"
        "    (folder / 'orphan').write_text(str(orphan))\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "orphan = (folder / 'orphan').read_text()\n"
        "while Path('/proc', orphan).exists(): time.sleep(0.01)\n"
        "sys.exit(9)\n"
    )
    extra = f"on_tick=lambda: Path({str(tmp_path / 'ticks')!r}).open('a').write('.'), tick_s=0.02"
    status, _ = run_supervise(tmp_path, body, extra=extra)
    assert status == 9
    assert (tmp_path / "ticks").read_text()


def test_reap_others_leaves_the_owners_child_alone():
    owned = subprocess.Popen([sys.executable, "-P", "-c", ""], stdin=subprocess.DEVNULL)
    wait_until(lambda: start_time(owned.pid) is None, "its end")
    assert owned.pid not in [pid for pid, _ in reap_others(owned.pid)]
    assert owned.wait() == 0


@pytest.mark.parametrize(
    ("deaths", "now", "spent"),
    [
        pytest.param([0.0, 1.0], 1.0, False, id="few"),
        pytest.param([0.0, 1.0, 2.0], 2.0, True, id="many"),
        pytest.param([0.0, 1.0, 11.5], 11.5, False, id="long ago"),
    ],
)
def test_budget(deaths, now, spent):
    assert Budget(deaths=2, window_s=10.0).spent(deaths, now) is spent


def test_supervise_gives_the_signals_back(tmp_path):
    assert threading.current_thread() is threading.main_thread()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert supervise(script(tmp_path, "sys.exit(3)"), log=tmp_path / "log") == 3
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {signal.SIGINT, signal.SIGTERM}
