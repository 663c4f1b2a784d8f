"""`ftrain supervise` around scripts that know nothing of us, a little, and everything."""

from __future__ import annotations

import difflib
import json
import os
import signal
from pathlib import Path

import pytest

from recovery.events import (
    AttemptStarted,
    CheckpointCommitted,
    InterruptionClassified,
    RunEnded,
    StepFinished,
    StopRequested,
    Suspected,
    steps_of,
)
from storage.local import LocalStore
from storage.run import RunStore
from tests.commands import ftrain, ftrain_json
from tests.hooks import hook
from tests.supervised import python, standing, supervised
from tests.undisturbed import DDP, EXAMPLES, STEPS, Ends, ends

pytestmark = [pytest.mark.dist, pytest.mark.chaos]

COUNTS = """
import os, sys, time
path = f"state-{os.environ.get('RANK', 'alone')}"
first = int(open(path).read()) + 1 if os.path.exists(path) else 1
for step in range(first, 13):
    with open(path + "-new", "w") as file:
        file.write(str(step))
    os.replace(path + "-new", path)  # the other rank may be killed at any time
    print(f"iter {step}, loss {1 / step:.4f}")
    if step == 6 and first == 1 and os.environ.get("RANK") == "1":
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
"""

TALKS = """
import os, sys, time
import ftrain
assert "torch" not in sys.modules
restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
for step in range(1, 10**9 if restarted else 5):
    time.sleep(0.01)
    if ftrain.progress(step, loss=1 / step, tokens=10):
        print("leaving as asked")
        break
else:
    print("stands still", flush=True)
    while True:
        time.sleep(1)
assert "torch" not in sys.modules
"""


def test_a_person_is_told_of_a_script_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise TypeError('lr must be a number')")
    with hook() as server:
        with supervised(tmp_path, "--webhook", server.url, *python("train.py")) as run:
            code, _, err = run.wait()
        assert code == 13, err
    (received,) = server.received
    assert received["run"] == run.url
    assert "software_error" in received["text"]


def test_a_script_that_knows_nothing_is_killed_and_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTS)
    pattern = r"iter (?P<step>\d+), loss (?P<loss>[\d.]+)"
    with supervised(tmp_path, "--nproc", "2", "--progress-pattern", pattern, *python("train.py")) as run:
        code, out, err = run.wait()
    assert code == 0, err
    assert out.splitlines()[-1] == "iter 12, loss 0.0833"
    verdicts = [event.verdict for event in run.events(InterruptionClassified)]
    assert [verdict.first_failing_rank for verdict in verdicts] == [1]
    steps = [record for event in run.events(StepFinished) for record in steps_of(event)]
    assert steps[-1].step == 12
    assert steps[-1].loss == 0.0833
    report = ftrain_json("report", run.url)
    assert report["outcome"] == "finished"
    assert len(report["attempts"]) == 2


def test_a_hang_is_found_by_progress_and_a_stop_is_seen_by_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TALKS)
    with supervised(tmp_path, "--nproc", "2", "--hang-s", "4", *python("train.py")) as run:
        run.wait_event(Suspected)
        run.wait_event(StepFinished, lambda event: event.attempt == 1)
        refused = ftrain("save", run.url)
        assert refused.returncode == 2
        assert "a script saves when it decides to" in refused.stderr
        assert ftrain("stop", run.url).returncode == 0
        code, _, err = run.wait()
    assert code == 75, err
    assert "leaving as asked" in run.log(attempt=1)
    assert "train.py" in run.log(attempt=0)  # the stacks of a script that has no handler of its own
    assert "time.sleep" not in run.log(attempt=0).split("stands still")[0]
    assert [event.outcome for event in run.events(RunEnded)] == ["stopped"]


LOGS = """
import os, time
for step in range(1, 31):
    time.sleep(0.01)
    if step % 10 == 0:
        print(f"step {step}", flush=True)
    while step == 25 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1)
"""


def test_a_hang_is_found_in_a_script_that_only_logs_some_of_its_steps_and_the_rest_is_counted(tmp_path: Path) -> None:
    """Told are 10 and 20, then 10, 20 and 30: 11 and 21 steps at least, and of those 10 to 20 were done twice."""
    (tmp_path / "train.py").write_text(LOGS)
    words = ("--nproc", "1", "--hang-s", "4", "--progress-pattern", r"step (\d+)", *python("train.py"))
    with supervised(tmp_path, *words) as run:
        run.wait_event(Suspected)
        code, _, err = run.wait()
    assert code == 0, err
    report = ftrain_json("report", run.url)
    assert (report["steps_finished"], report["steps_lost"], report["at_least"]) == (11 + 21, 11, True)
    assert [row["steps_lost"] for row in report["interruptions"]] == [11]
    assert [row["restored_step"] for row in report["attempts"]] == [None, None]
    assert "scheduler: " not in report["interruptions"][0]["reason"]


def test_a_script_that_does_not_see_a_stop_is_terminated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    with supervised(tmp_path, *python("train.py")) as run:
        run.workers()
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.wait()
    assert code == 75, err


LEAVES_BADLY = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3 if rank else 0))
for step in range(1, 10**9):
    print(f"step {step}", flush=True)
    if step == 3 and rank and "crash" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
"""


def test_workers_that_end_in_any_way_after_a_stop_are_the_stop_and_a_crash_before_it_is_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVES_BADLY)
    words = ("--nproc", "2", "--progress-pattern", r"step (\d+)", *python("train.py", "crash"))
    with supervised(tmp_path, *words) as run:
        run.wait_event(StepFinished, lambda event: event.attempt == 1)
        run.process.send_signal(signal.SIGINT)
        code, _, err = run.wait()
    assert code == 75, err
    assert [event.attempt for event in run.events(InterruptionClassified)] == [0]
    assert len(run.events(StopRequested)) == 1
    assert "stopped on request: SIGINT" in err
    assert "saving" not in err
    report = ftrain_json("report", run.url)
    assert [row["ended_by"] for row in report["script"]["attempts"]][1:] == ["user_interrupt"]


def test_every_process_has_what_torchrun_would_tell_it(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT GROUP_RANK"
    (tmp_path / "show.py").write_text(
        f"import json, os\nprint(json.dumps({{name: os.environ[name] for name in {names.split()!r}}}))\n"
        "print(os.environ.get('OPENBLAS_NUM_THREADS'), os.getcwd(), os.environ['MINE'])\n"
    )
    with supervised(tmp_path, "--nproc", "2", *python("show.py"), env={"MINE": "7"}) as run:
        code, _, err = run.wait()
    assert code == 0, err
    told = [json.loads(run.log(rank=rank).splitlines()[0]) for rank in (0, 1)]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in told] == [("0", "0"), ("1", "1")]
    assert {each["WORLD_SIZE"] for each in told} == {each["LOCAL_WORLD_SIZE"] for each in told} == {"2"}
    assert len({each["MASTER_PORT"] for each in told}) == 1
    assert run.log().splitlines()[1] == f"{os.environ.get('OPENBLAS_NUM_THREADS')} {tmp_path} 7"


def test_a_failing_script_is_given_up_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no such column: price')\n")
    with supervised(tmp_path, *python("train.py")) as run:
        code, _, err = run.wait()
    assert code not in (0, 75)
    assert "no such column: price" in err
    assert len(run.events(AttemptStarted)) <= 3


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--", "no-such-program"), 3, "no program"),
        (("--progress-pattern", "step (", "--", "true"), 2, "regular expression"),
        (("--progress-pattern", "step", "--", "true"), 2, "no group"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path, words: tuple[str, ...], code: int, expected: str
) -> None:
    done = ftrain("supervise", "--run", str(tmp_path / "run"), *words)
    assert done.returncode == code
    assert expected in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_limit_of_the_logs_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTRAIN_LOG_MIB", "abc")
    with supervised(tmp_path, "true") as script:
        code, _, err = script.wait()
    assert code == 0
    assert "ftrain: FTRAIN_LOG_MIB=abc: allowed: a whole number of MiB" in err


def test_a_run_of_a_config_leaves_the_folder_of_a_script_alone(tmp_path: Path) -> None:
    with supervised(tmp_path, "true") as script:
        assert script.wait()[0] == 0
        before = sorted(script.local.rglob("*"))
        done = ftrain("run", "configs/tiny-dp2.toml", "--set", f"run.url={script.url}")
        assert done.returncode == 3
        assert "is the folder of a supervised command (`ftrain supervise`): give run.url another place" in done.stderr
        assert sorted(script.local.rglob("*")) == before


def test_ddp_with_a_checkpointer_is_killed_and_goes_on_bit_for_bit(tmp_path: Path, undisturbed: Ends) -> None:
    with supervised(tmp_path, "--nproc", "2", *standing("1:0:125", *DDP)) as run:
        run.wait_event(CheckpointCommitted, lambda event: event.step >= 20)
        os.kill(run.workers()[1], signal.SIGKILL)
        code, out, err = run.wait()
    assert code == 0, err
    assert len(run.events(InterruptionClassified)) == 1
    assert ends(out, tmp_path / "run") == undisturbed
    assert undisturbed.step == STEPS
    store = RunStore(LocalStore(str(tmp_path / "run")))
    valid = [info for info in store.checkpoints() if str(info.state) == "valid"]
    assert {event.step for event in run.events(CheckpointCommitted)} == {info.step for info in valid}
    assert {info.attempt for info in valid} == {0, 1}


@pytest.mark.slow
def test_the_plain_ddp_script_survives_a_kill(tmp_path: Path) -> None:
    words = ("--nproc", "2", "--progress-pattern", r"step (\d+) loss (?P<loss>\S+)")
    words += python(str(EXAMPLES / "plain_ddp.py"), "--steps", "400", "--batch", "256", "--width", "256")
    with supervised(tmp_path, *words) as run:
        run.wait_event(StepFinished, lambda event: event.step >= 20)
        os.kill(run.workers()[1], signal.SIGKILL)
        code, out, err = run.wait()
    assert code == 0, err
    assert out.splitlines()[-1].startswith("final ")
    killed, *later = run.events(InterruptionClassified)
    assert (killed.verdict.first_failing_rank, "SIGKILL" in killed.verdict.reason) == (1, True)
    for each in later:  # PyTorch's own threads, seen once in the end of a rank that had done its work and said so
        rank = each.verdict.first_failing_rank
        assert rank is not None
        assert "terminate called without an active exception" in run.log(attempt=each.attempt, rank=rank)


@pytest.mark.slow
def test_fsdp2_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    said = []
    for ranks, steps in (("4", "20"), ("3", "40")):
        with supervised(tmp_path, "--nproc", ranks, *python(str(EXAMPLES / "fsdp2.py"), "--steps", steps)) as run:
            code, out, err = run.wait()
        assert code == 0, err
        said.append(out.splitlines()[-1])
    unread = 10_000 - 4 * 20 * 8  # dealt out to three, who read 8 a step
    assert said[0] == "from step 0 to 20, 2340 samples unread by rank 0"
    assert said[1] == f"from step 20 to 40, {unread // 3 - 20 * 8} samples unread by rank 0"


def test_the_two_examples_differ_by_ten_lines() -> None:
    plain, ours = ((EXAMPLES / name).read_text() for name in ("plain_ddp.py", "ddp.py"))
    code = [text.split('"""', 2)[2].splitlines() for text in (plain, ours)]
    assert len(plain.splitlines()) <= 62
    assert "ftrain" not in "".join(code[0])
    changed = [line for line in difflib.ndiff(*code) if line.startswith("+ ") and line.strip() != "+"]
    assert len(changed) <= 10, changed
