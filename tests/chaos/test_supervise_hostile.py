"""`ftrain supervise` around scripts that behave badly: what they leave behind, what they write, what they ignore."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from recovery.events import AttemptStarted, InterruptionClassified, RunEnded, StepFinished, Suspected
from tests.runs import FTRAIN
from tests.supervised import python, supervised

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

DAEMONS = """
import multiprocessing, os, time

again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again:
    assert not [pid for pid in open("pids").read().split() if os.path.exists(f"/proc/{pid}")]

def rest():
    with open("pids", "a") as file:
        file.write(f"{os.getpid()} ")
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=rest, daemon=True).start()  # a data loader
if (child := os.fork()) == 0:
    os.setsid()
    if os.fork() == 0:  # a daemon, in a session of its own, and one of its own that it has sent away likewise
        os.setsid()
        if os.fork() == 0:
            os.setsid()
        rest()
    os._exit(0)
os.waitpid(child, 0)
while not os.path.exists("pids") or len(open("pids").read().split()) < (6 if again else 3):
    time.sleep(0.01)
os._exit(0 if again else 5)
"""

SPEAKS_MUCH = """
import os

os.write(1, bytes(range(256)) * 4)  # no text in any encoding
line = b"x" * (1 << 20)
for _ in range(150):
    os.write(1, line)
os.write(1, b"\\nstep 7 of 7\\nlast")
"""

LEAVES_ALONE = """
import os, time
import ftrain

rank = int(os.environ["RANK"])
for step in range(1, 4):
    ftrain.progress(step)
    time.sleep(0.02)
if rank == 0:
    time.sleep(600)
"""


def test_what_a_script_leaves_behind_is_gone_before_the_next_attempt_and_at_the_end(tmp_path: Path) -> None:
    """Data loaders, daemons in sessions of their own, and what those have started."""
    (tmp_path / "train.py").write_text(DAEMONS)
    with supervised(tmp_path, "--nproc", "1", *python("train.py")) as run:
        code, out, err = run.wait()
    assert code == 0, out + err
    assert len(run.events(AttemptStarted)) == 2
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 6
    assert not [pid for pid in pids if psutil.pid_exists(int(pid))]


def test_output_without_end_or_newline_passes_byte_for_byte_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPEAKS_MUCH)
    argv = [*FTRAIN, "supervise", "--run", "run", "--progress-pattern", r"step (\d+) of", *python("train.py")]
    most = 0  # KiB, by the process's own account: rusage counts what it was forked from, too
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.DEVNULL, cwd=tmp_path)
        while process.poll() is None:
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
            most = max(most, int(found[1])) if found else most
            time.sleep(0.01)
    assert process.returncode == 0
    written = (tmp_path / "out").read_bytes()
    assert written == bytes(range(256)) * 4 + b"x" * (150 << 20) + b"\nstep 7 of 7\nlast"
    assert 0 < most < 140 * 1024  # less than what was written


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPEAKS_MUCH)
    process = subprocess.Popen(
        [*FTRAIN, "supervise", "--run", "run", *python("train.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(60) == 0, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_working_folder_that_is_gone_is_told_and_not_tried_for_ever(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "train.py").write_text("import os, shutil\nshutil.rmtree(os.getcwd())\nos._exit(1)\n")
    argv = [*FTRAIN, "supervise", "--run", "../run", *python(str(tmp_path / "train.py"))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path / "work")
    assert done.returncode == 3, done.stderr
    assert f"cannot be started: No such file or directory ({tmp_path / 'work'})" in done.stdout + done.stderr
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
def test_a_rank_that_leaves_alone_is_no_failure_but_the_one_that_waits_for_it_hangs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES_ALONE)
    with supervised(tmp_path, "--nproc", "2", "--hang-s", "1", "--max-restarts", "1", *python("train.py")) as run:
        code, _, err = run.wait()
    assert code == 13, err
    assert {event.rank for event in run.events(Suspected)} == {0}
    assert {event.verdict.first_failing_rank for event in run.events(InterruptionClassified)} <= {0, None}
    assert max(event.step for event in run.events(StepFinished)) == 3


@pytest.mark.slow
def test_a_script_that_is_deaf_to_signals_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import signal, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\ntime.sleep(600)\n"
    )
    with supervised(tmp_path, "--stop-s", "4", *python("train.py")) as run:
        (pid,) = run.workers().values()
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.wait()
    assert code == 75, err
    said = "1 process had to be killed (SIGKILL), still running 4.0 s after the stop; the script told no checkpoint"
    assert err.index(said) < err.index("run stopped")
    assert not psutil.pid_exists(pid)
    assert [event.outcome for event in run.events(RunEnded)] == ["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "attempts"),
    [
        ("import os\nos.closerange(0, 4096)\nos._exit(0)\n", 1),  # as daemons do; nothing it was given is left to it
        ("import os\nos.setpgid(0, os.getpgid(os.getppid()))\nos._exit(0)\n", 1),  # into the agent's own group
        (
            "import os, time\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
            "    os.kill(os.getppid(), 9)\n    time.sleep(600)\n",
            2,
        ),  # the agent itself
    ],
)
def test_a_script_that_meddles_with_what_it_was_given_harms_itself_only(tmp_path: Path, body: str, attempts: int) -> None:
    (tmp_path / "train.py").write_text(body)
    with supervised(tmp_path, "--nproc", "1", *python("train.py")) as run:
        code, _, err = run.wait()
    assert code == 0, err
    assert len(run.events(AttemptStarted)) == attempts


@pytest.mark.slow
def test_data_loaders_of_a_killed_rank_end_with_it_and_the_script_goes_on(tmp_path: Path) -> None:
    """Forked workers inherit the way to the supervisor, and leave it alone."""
    (tmp_path / "train.py").write_text(
        "import os, time, torch, ftrain\n"
        "from torch.utils.data import DataLoader\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 200\n"
        "    def __getitem__(self, index):\n"
        "        ftrain.progress(index + 1000)\n"
        "        return torch.tensor(index)\n"
        "for step, x in enumerate(DataLoader(Data(), batch_size=10, num_workers=2), start=1):\n"
        "    ftrain.progress(step, loss=float(x.sum()))\n"
        "    if step == 10 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)\n"
    )
    with supervised(tmp_path, "--nproc", "1", *python("train.py")) as run:
        code, _, err = run.wait()
    assert code == 0, err
    assert {event.step for event in run.events(StepFinished)} == set(range(1, 21))
    assert len(run.events(AttemptStarted)) == 2
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
