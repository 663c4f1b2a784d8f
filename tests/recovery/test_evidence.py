"""Collectors against files made by hand; the deadline against a source that never answers."""

from __future__ import annotations

import threading
from pathlib import Path

from recovery.evidence import Finding, OomWatch, error_files, filesystem_state, gather, kernel_log, log_tails


def test_log_tails_say_who_speaks_and_keep_the_given_order(tmp_path: Path) -> None:
    logs = {1: tmp_path / "one", 0: tmp_path / "zero", 2: tmp_path / "missing"}
    logs[1].write_text("[rank1]: already marked\nplain\n")
    logs[0].write_bytes(b"\xff odd bytes\n")
    found = log_tails(logs)
    assert found.log == ("[rank1]: already marked", "[rank1]: plain", "[rank0]: � odd bytes")
    assert len(found.notes) == 1
    assert "log of rank 2" in found.notes[0]


def test_long_logs_are_cut_at_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n:05d}\n" for n in range(1000)))
    found = log_tails({0: log}, max_bytes=105)
    assert found.log == tuple(f"[rank0]: line {n:05d}" for n in range(991, 1000))


def test_error_files_become_lines(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text('{"type": "ValueError", "message": "x", "traceback": "Traceback:\\n  File\\nValueError: x", "t": 1.0}')
    bad.write_text("{")
    found = error_files({3: good, 4: bad, 5: tmp_path / "absent"})
    assert found.log == ("[rank3]: Traceback:", "[rank3]:   File", "[rank3]: ValueError: x")
    assert len(found.notes) == 1


def test_oom_kills_are_seen_as_differences_on_both_cgroup_versions(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    for pid, membership in (("11", "0::/job\n"), ("12", "7:cpu:/x\n5:memory,hugetlb:/job1\n")):
        (proc / pid).mkdir(parents=True)
        (proc / pid / "cgroup").write_text(membership)
    v2, v1 = groups / "job" / "memory.events", groups / "memory" / "job1" / "memory.oom_control"
    for file in (v2, v1):
        file.parent.mkdir(parents=True)
    v2.write_text("low 0\nhigh 0\nmax 3\noom 1\noom_kill 2\noom_group_kill 0\n")
    v1.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")

    watch = OomWatch([11, 12, 99], proc=proc, cgroups=groups)
    assert watch.source() == Finding()
    v2.write_text("oom_kill 3\n")
    v1.write_text("oom_kill 1\n")
    found = watch.source()
    assert [line.split("oom_kill ")[1] for line in found.scheduler] == ["2 -> 3", "0 -> 1"]


def test_kernel_log_keeps_what_is_recent_and_says_when_it_may_not_look(tmp_path: Path) -> None:
    records = tmp_path / "kmsg"
    records.write_text("6,101,7000000,-;old news\n")
    assert kernel_log(since_s=8.0, path=str(records)).kernel == ()
    assert kernel_log(since_s=6.0, path=str(records)).kernel == ("[    7.000000] old news",)
    (note,) = kernel_log(since_s=0.0, path=str(tmp_path / "absent")).notes
    assert "kernel log: not readable" in note


def test_a_healthy_file_system_is_not_evidence(tmp_path: Path) -> None:
    assert filesystem_state([str(tmp_path)]) == Finding()


def test_a_source_that_never_answers_costs_only_the_limit() -> None:
    release = threading.Event()

    def stuck() -> Finding:
        release.wait()
        return Finding(log=("too late",))

    def broken() -> Finding:
        raise OSError(5, "Input/output error")

    found = gather({"stuck": stuck, "broken": broken, "good": lambda: Finding(log=("here",))}, limit_s=0.05)
    release.set()
    assert found.log == ("here",)
    assert found.notes == ("stuck: no answer within 0.05 s", "broken: not readable: [Errno 5] Input/output error")
