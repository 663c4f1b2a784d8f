"""Who is to blame when nobody makes progress: one recorded scene for each kind of hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from recovery.hang import Culprit, culprit, process_line, read_processes, read_stacks, with_collectives
from recovery.procfs import activity, samples

WORKER = "/run/train.py"


def dump(rank: int, *frames: tuple[str, int, str]) -> list[str]:
    """What faulthandler writes for a rank: another thread first, then the main one, innermost frame first."""
    lines = [
        "Thread 0x00007f0000000001 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait',
        "",
        "Current thread 0x00007f0000000000 (most recent call first):",
        *(f'  File "{file}", line {line} in {function}' for file, line, function in frames),
    ]
    return [f"[rank{rank}]: {line}" for line in lines]


def waiting(rank: int, line: int = 40) -> list[str]:
    """A rank inside a collective."""
    return dump(
        rank,
        ("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 2806, "all_reduce"),
        ("/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 81, "wrapper"),
        ("/src/ftrain/parallel/mesh.py", 89, "all_reduce"),
        (WORKER, line, "step"),
    )


def host(**states: tuple[str, float]) -> list[str]:
    return [process_line(int(rank[1:]), 70 + int(rank[1:]), state, cpu, 0.3) for rank, (state, cpu) in states.items()]


ASLEEP = ("S", 0.0)
LOCK = ("/usr/lib/python3.11/threading.py", 327, "wait")

SCENES = [
    pytest.param(
        [*waiting(0)], host(r0=ASLEEP, r1=("T", 0.0)), ("stopped", 1), "stopped by a signal", id="SIGSTOP, so without a stack"
    ),
    pytest.param(
        [*waiting(0), *dump(1, (WORKER, 12, "clean"), (WORKER, 40, "step"))],
        host(r0=ASLEEP, r1=("R", 0.29)),
        ("loop", 1),
        "runs without end at run/train.py:12 in clean (97% of a core)",
        id="endless loop",
    ),
    pytest.param(
        [*waiting(0), *dump(1, LOCK, (WORKER, 13, "fetch"), (WORKER, 40, "step"))],
        host(r0=ASLEEP, r1=ASLEEP),
        ("lock", 1),
        "waits for a lock or a message at run/train.py:13 in fetch",
        id="a lock never released",
    ),
    pytest.param(
        [*waiting(0), *dump(1, (WORKER, 14, "poll"))],
        host(r0=ASLEEP, r1=ASLEEP),
        ("asleep", 1),
        "sleeps at run/train.py:14 in poll",
        id="asleep",
    ),
    pytest.param(
        [*waiting(0), *dump(1, (WORKER, 15, "read"))],
        host(r0=ASLEEP, r1=("D", 0.0)),
        ("disk", 1),
        "uninterruptible wait of the kernel (disk or driver) at run/train.py:15 in read",
        id="a dead file system",
    ),
    pytest.param(
        [*waiting(0), *waiting(1, 41), *waiting(2)],
        host(r0=ASLEEP, r1=ASLEEP, r2=ASLEEP),
        ("parted", 1),
        "mismatched collectives: waits at run/train.py:41 in step, others at run/train.py:40 in step",
        id="mismatched collectives",
    ),
    pytest.param(
        [*waiting(0), *waiting(1)],
        host(r0=ASLEEP, r1=ASLEEP),
        ("network", None),
        "all 2 ranks wait in the same collective (run/train.py:40 in step)",
        id="all in the same collective",
    ),
    pytest.param([], [], ("unknown", 0), "least advanced", id="nothing is known"),
    pytest.param(
        [*waiting(0), *waiting(1)],
        host(r0=("R", 0.3), r1=("R", 0.3)),
        ("network", None),
        "same collective",
        id="spinning waits",
    ),
]


@pytest.mark.parametrize(("log", "kernel", "expected", "says"), SCENES)
def test_scenes(log: list[str], kernel: list[str], expected: tuple[str, int | None], says: str) -> None:
    ranks = [*range(max(2, len(kernel)))]
    found = culprit(ranks, log, kernel)
    assert (found.kind, found.rank) == expected
    assert says in found.reason
    assert found.line().startswith("supervisor: no progress of")


def test_the_newest_dump_counts_and_other_threads_do_not() -> None:
    stacks = read_stacks([*waiting(0), "[rank0]: step 12 loss 2.5", *dump(0, (WORKER, 99, "later"))])
    assert [(frame.line, frame.function) for frame in stacks[0]] == [(99, "later")]


def test_the_kernels_view_of_a_real_process() -> None:
    """A busy child and a stopped one, as they are seen in /proc."""
    code = "import sys; print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        before = samples({0: busy.pid})
        while samples({0: busy.pid})[0].cpu_s < before[0].cpu_s + 0.2:
            pass
        os.kill(busy.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, busy.pid, os.WSTOPPED | os.WNOWAIT)
        seen = read_processes(activity({0: busy.pid}, before, 0.2))
        busy.kill()
    assert seen[0].state == "T"
    assert seen[0].busy >= 1.0
    assert samples({0: busy.pid}) == {}


def test_the_line_decides_the_verdict() -> None:
    from recovery.classify import classify
    from recovery.evidence import Evidence

    log, kernel = (*waiting(0), *dump(1, (WORKER, 12, "clean"))), host(r0=ASLEEP, r1=("R", 0.3))
    blamed = culprit([0, 1], log, kernel).line()
    said = (*kernel, blamed, "supervisor: no progress of rank 0 for 61.0 s (step 3, forward)")
    verdict = classify(Evidence(exit={"0": None, "1": None}, log=tuple(log), scheduler=said, steps=3))
    assert (verdict.class_, verdict.first_failing_rank, verdict.action) == ("collective_timeout", 1, "restart")
    assert "runs without end at run/train.py:12 in clean" in verdict.reason


def test_collectives_that_were_counted_are_told_where_they_differ():
    found = Culprit(kind="stopped", rank=1, reason="stopped by a signal")
    assert with_collectives(found, {0: 41, 1: 40, 2: 41}).reason == (
        "stopped by a signal; it has issued 40 collectives, others up to 41"
    )
    assert with_collectives(found, {0: 41, 1: 41}) == found
    assert with_collectives(found, {}) == found, "a worker that does not count"
    assert with_collectives(Culprit(kind="network", reason="all wait"), {0: 1, 1: 2}).reason == "all wait"
