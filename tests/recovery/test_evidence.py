"""Collectors against files made by hand; the deadline against a source that never answers."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from recovery.evidence import (
    Finding,
    OomWatch,
    error_files,
    filesystem_state,
    gather,
    kernel_and_kills,
    kernel_log,
    log_tails,
    our_kernel_log,
)


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
    said = {"type": "ValueError", "message": "x", "traceback": "Traceback:\n  File\nValueError: x"}
    good.write_text(json.dumps({**said, "t": 1.0, "rank": 3, "attempt": 0}))
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


def test_reports_of_kills_in_other_cgroups_are_left_out_of_the_kernel_log() -> None:
    """The kernel has one log: what it says of others' memory limits stands there too."""
    xid = "[  1.0] NVRM: Xid (PCI:0000:9b:00): 79, pid=7, GPU has fallen off the bus."
    report = (
        "[  2.0] python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0",
        "[  2.0] oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/other,task_memcg=/other,task=python,pid=9,uid=0",
        "[  2.0] Memory cgroup out of memory: Killed process 9 (python) total-vm:1kB",
    )
    after = "[  3.0] EXT4-fs error (device sda1): bad block"
    left = our_kernel_log(Finding(kernel=(xid, *report, after)))
    assert left.kernel == (xid, after)
    assert left.notes == ("kernel log: 1 OOM kill(s) in memory cgroups that are not ours left out",)
    machine = Finding(kernel=(report[0], "[  2.0] Out of memory: Killed process 9 (python)", after))
    assert our_kernel_log(machine) == machine  # the machine's own memory concerns everybody on it


def in_the_root_cgroup(proc: Path) -> None:
    """`proc` says so of the process that reads it."""
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text("0::/\n")


def test_a_report_of_a_kill_is_ours_if_a_counter_of_ours_has_grown_or_nothing_counts(tmp_path: Path) -> None:
    log, counter = tmp_path / "kmsg", tmp_path / "memory.events"
    log.write_text("6,1,2000000,-;Memory cgroup out of memory: Killed process 9 (python) total-vm:1kB\n")
    counter.write_text("oom_kill 0\n")
    in_the_root_cgroup(tmp_path)
    watch = OomWatch(proc=tmp_path, cgroups=tmp_path)
    assert kernel_and_kills(watch, since_s=0.0, path=str(log)).kernel == ()
    uncounted = kernel_and_kills(OomWatch(proc=tmp_path / "none", cgroups=tmp_path), since_s=0.0, path=str(log))
    assert (len(uncounted.kernel), uncounted.scheduler) == (1, ())
    counter.write_text("oom_kill 1\n")
    ours = kernel_and_kills(watch, since_s=0.0, path=str(log))
    assert (len(ours.kernel), ours.notes) == (1, ())
    assert ours.scheduler == (f"host state: cgroup {tmp_path}: oom_kill 0 -> 1",)


def test_a_kill_right_after_the_counters_were_read_is_not_taken_for_somebody_else_s(tmp_path: Path) -> None:
    """The kernel may kill while we look: a report in the log is judged by a count that is not older than it."""
    counter, log = tmp_path / "memory.events", tmp_path / "kmsg"
    counter.write_text("oom_kill 0\n")
    log.write_text("")
    in_the_root_cgroup(tmp_path)

    class Soon(OomWatch):
        reads = 0

        def source(self) -> Finding:
            self.reads += 1
            found = super().source()
            counter.write_text("oom_kill 1\n")
            log.write_text("6,1,1000000,-;Memory cgroup out of memory: Killed process 9 (python) total-vm:1kB\n")
            return found

    watch = Soon(proc=tmp_path, cgroups=tmp_path)
    assert kernel_and_kills(watch, since_s=0.0, path=str(log)) == Finding()
    assert watch.reads == 1
    assert len(kernel_and_kills(watch, since_s=0.0, path=str(log)).kernel) == 1


def test_kernel_log_keeps_what_is_recent_and_says_when_it_may_not_look(tmp_path: Path) -> None:
    records = tmp_path / "kmsg"
    records.write_text("6,101,7000000,-;old news\n")
    assert kernel_log(since_s=8.0, path=str(records)).kernel == ()
    assert kernel_log(since_s=6.0, path=str(records)).kernel == ("[    7.000000] old news",)
    (note,) = kernel_log(since_s=0.0, path=str(tmp_path / "absent")).notes
    assert "kernel log: not readable" in note


def test_a_healthy_file_system_is_not_evidence(tmp_path: Path) -> None:
    assert filesystem_state([str(tmp_path)]) == Finding()


def test_nobody_is_taken_for_silent_because_we_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process was stopped for a minute while it waited: its sources were stopped with it."""
    awake, times = threading.Event(), iter([0.0])

    def clock() -> float:
        now = next(times, 60.0)
        if now:
            awake.set()
        return now

    def source() -> Finding:
        awake.wait()
        return Finding(log=("here",))

    monkeypatch.setattr("recovery.evidence.time.monotonic", clock)
    assert gather({"stopped with us": source}, limit_s=20.0) == Finding(log=("here",))


def test_a_source_that_never_answers_costs_only_the_limit() -> None:
    release = threading.Event()

    def stuck() -> Finding:
        release.wait()
        return Finding(log=("too late",))

    def broken() -> Finding:
        raise OSError(5, "Input/output error")

    found = gather({"stuck": stuck, "broken": broken, "good": lambda: Finding(log=("here",))}, limit_s=0.2)
    release.set()
    assert found.log == ("here",)
    assert found.notes == ("stuck: no answer within 0.2 s", "broken: not readable: [Errno 5] Input/output error")
