"""What is known of an interruption, gathered under a time limit and in a form that can be kept and replayed.

Evidence has the shape of the public cases (`exit`, `log`, `kernel`, `scheduler`), so an incident of a real run becomes a test
by writing the struct to a file, and a case file is classified by the very code that runs in the supervisor. Every source may
hang (a dead NFS server blocks a mere `stat` for ever) or be forbidden (`/dev/kmsg` in a container): each has its own thread
and all share one deadline, and what could not be read is said in `notes` instead of being taken for good news.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

TAIL_BYTES = 256 * 1024  # of each rank's log: the end is where the error is, and a verdict must not wait for gigabytes

LOOK_S = 0.01  # how often who waits for the sources looks at the clock

NO_AGENT = "the agent did not answer"
NO_COUNTER = "no memory cgroup counts out-of-memory kills here"


class Evidence(Struct, frozen=True, kw_only=True):
    """Everything a verdict may rest on. Unknown fields of a case file (labels) are ignored."""

    id: str = ""
    exit: dict[str, int | None] = {}  # rank -> status: negative = killed by that signal, None = running or unknown; "agent"
    log: tuple[str, ...] = ()  # the ranks' output, in order; a `[rankN]:` prefix says who speaks
    kernel: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()  # scheduler, container, cloud, and what the supervisor itself saw of the machine
    ours: tuple[str, ...] = ()  # ranks that died by a signal which the supervisor sent
    order: tuple[str, ...] = ()  # ranks in the order of their death, as far as known
    nodes: dict[str, str] = {}  # rank -> node
    steps: int | None = None  # finished in this attempt; None: not known, the log may tell
    notes: tuple[str, ...] = ()  # what could not be read


class Finding(Struct, frozen=True, kw_only=True):
    """What one source contributes."""

    log: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class ErrorReport(Struct, frozen=True, kw_only=True):
    """What a worker wrote down of the exception that ended it (`rank-00003.error.json`)."""

    type: str
    message: str
    traceback: str
    t: float
    rank: int
    attempt: int

    def log(self) -> tuple[str, ...]:
        """As the rank's log has it: what Python printed, each line saying who speaks."""
        text = self.traceback or f"{self.type}: {self.message}"
        return tuple(_spoken_by(self.rank, line) for line in text.splitlines())


Source = Callable[[], Finding]


def gather(sources: Mapping[str, Source], *, limit_s: float) -> Finding:
    """Ask all sources at once; what has not answered after `limit_s` is left behind, with a note. Time in which this process
    itself stood still (stopped, or without a processor) is nobody's silence.
    """
    answers: dict[str, Finding] = {}
    threads = [
        threading.Thread(target=_ask, args=(name, source, answers), name=f"evidence-{name}", daemon=True)
        for name, source in sources.items()
    ]
    for thread in threads:
        thread.start()
    left_s = limit_s
    for thread in threads:
        while thread.is_alive() and left_s > 0:
            began, look_s = time.monotonic(), min(LOOK_S, left_s)
            thread.join(look_s)
            left_s -= min(look_s, time.monotonic() - began)
    answered = dict(answers)
    return merge(answered.get(name) or Finding(notes=(f"{name}: no answer within {limit_s:g} s",)) for name in sources)


def merge(findings: Iterable[Finding]) -> Finding:
    """All findings as one, in order."""
    parts = list(findings)
    return Finding(
        **{name: tuple(line for part in parts for line in getattr(part, name)) for name in Finding.__struct_fields__}
    )


def _ask(name: str, source: Source, answers: dict[str, Finding]) -> None:
    try:
        answers[name] = source()
    except OSError as error:
        answers[name] = Finding(notes=(f"{name}: not readable: {error}",))


def log_tails(logs: Mapping[int, Path], *, max_bytes: int = TAIL_BYTES) -> Finding:
    """The end of each rank's log, each line saying which rank wrote it. Give the ranks in the order of their death."""
    lines: list[str] = []
    notes: list[str] = []
    for rank, path in logs.items():
        try:
            lines += [_spoken_by(rank, line) for line in _tail(path, max_bytes)]
        except OSError as error:
            notes.append(f"log of rank {rank}: not readable: {error}")
    return Finding(log=tuple(lines), notes=tuple(notes))


def error_files(files: Mapping[int, Path]) -> Finding:
    """Uncaught exceptions that workers wrote down before they exited (`ErrorReport`)."""
    lines: list[str] = []
    notes: list[str] = []
    for rank, path in files.items():
        if not path.exists():
            continue
        try:
            lines += msgspec.json.decode(path.read_bytes(), type=ErrorReport).log()
        except (OSError, msgspec.DecodeError) as error:
            notes.append(f"error file of rank {rank}: not readable: {error}")
    return Finding(log=tuple(lines), notes=tuple(notes))


def kernel_log(*, since_s: float, path: str = "/dev/kmsg") -> Finding:
    """Kernel messages since a moment of the monotonic clock, which is the kernel log's own."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        return Finding(notes=(f"kernel log: not readable: {error}",))
    try:
        return Finding(kernel=tuple(_kernel_lines(fd, since_s)))
    finally:
        os.close(fd)


def kernel_and_kills(watch: OomWatch, *, since_s: float, path: str = "/dev/kmsg") -> Finding:
    """Kernel messages since then that concern us, and the OOM kills that were counted.

    One source, because they must agree: the counters are read once, and after the log, so that no report is taken for somebody
    else's because its kill was not counted yet.
    """
    told = kernel_log(since_s=since_s, path=path)
    kills = watch.source() if watch.counts else Finding(notes=(NO_COUNTER,))
    return merge([our_kernel_log(told) if watch.counts and not kills.scheduler else told, kills])


def our_kernel_log(finding: Finding) -> Finding:
    """Kernel messages without reports of OOM kills in memory cgroups; for where none was in ours: the kernel has one log for
    all.
    """
    kept: list[str] = []
    left_out = 0
    report: list[str] = []
    for line in finding.kernel:
        if "invoked oom-killer" in line:
            kept += report
            report = []
        report.append(line)
        if "Memory cgroup out of memory: Killed process" in line:
            report, left_out = [], left_out + 1
        elif "invoked oom-killer" not in report[0]:
            kept += report
            report = []
    note = f"kernel log: {left_out} OOM kill(s) in memory cgroups that are not ours left out"
    return Finding(kernel=(*kept, *report), notes=(*finding.notes, *([note] if left_out else [])))


def filesystem_state(paths: Iterable[str]) -> Finding:
    """A line for each file system that is full, out of inodes, or read-only; nothing for healthy ones."""
    lines: list[str] = []
    for path in paths:
        state = os.statvfs(path)
        if state.f_blocks and state.f_bavail * state.f_frsize < 1 << 20:
            lines.append(f"host state: file system of {path} is full: {state.f_bavail * state.f_frsize} bytes free")
        if state.f_files and state.f_favail == 0:
            lines.append(f"host state: file system of {path} is full: no inode free")
        if state.f_flag & os.ST_RDONLY:
            lines.append(f"host state: file system of {path} is read-only")
    return Finding(scheduler=tuple(lines))


class OomWatch:
    """Counts of OOM kills in the memory cgroups of some processes, now and later: only the difference is evidence.

    A cgroup OOM kill leaves nothing but status -9 behind: no output, and often a kernel log that may not be read.
    """

    def __init__(self, pids: Iterable[int] = (), *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        names = [str(pid) for pid in pids] or ["self"]
        files = {file for name in names for file in _counter_files(proc / name / "cgroup", cgroups)}
        self._before = {file: _oom_kills(file) for file in sorted(files)}

    @property
    def counts(self) -> bool:
        """Whether there is a counter at all."""
        return bool(self._before)

    def source(self) -> Finding:
        """A line for each cgroup in which processes were killed since the watch began."""
        lines = []
        for file, before in self._before.items():
            after = _oom_kills(file)
            if after > before:
                lines.append(f"host state: cgroup {file.parent}: oom_kill {before} -> {after}")
        return Finding(scheduler=tuple(lines))


def _counter_files(membership: Path, cgroups: Path) -> list[Path]:
    """The files that count OOM kills for a process: cgroup v2 (`0::/path`) and v1 (`N:memory:/path`)."""
    try:
        rows = [row.split(":", 2) for row in membership.read_text().splitlines()]
    except OSError:
        return []
    found: list[Path] = []
    for _, controllers, path in (row for row in rows if len(row) == 3):
        if controllers == "":
            found += _existing(cgroups, path, "memory.events")
        elif "memory" in controllers.split(","):
            found += _existing(cgroups / "memory", path, "memory.oom_control")
    return found


def _existing(root: Path, path: str, name: str) -> list[Path]:
    """The counter in the process's own group; inside a container that path may be mounted as the root."""
    return [file for file in (root / path.strip("/") / name, root / name) if file.exists()][:1]


def _oom_kills(file: Path) -> int:
    try:
        match = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:  # the group was removed with its last process
        return 0
    return int(match[1]) if match else 0


def _kernel_lines(fd: int, since_s: float) -> Iterable[str]:
    while True:
        try:
            record = os.read(fd, 8192).decode("utf-8", "replace")
        except BlockingIOError:
            return
        except BrokenPipeError:  # records were overwritten before we read them: go on with the oldest that is left
            continue
        if not record:  # a recorded log, not the device: it has an end
            return
        head, separator, text = record.partition(";")
        fields = head.split(",")
        if separator and len(fields) > 2 and fields[2].isdecimal() and int(fields[2]) >= since_s * 1e6:
            yield f"[{int(fields[2]) / 1e6:12.6f}] {text.splitlines()[0] if text else ''}"


def _tail(path: Path, max_bytes: int) -> list[str]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return lines[1:] if size > max_bytes else lines  # the first is cut


def _spoken_by(rank: int, line: str) -> str:
    return line if line.startswith("[rank") else f"[rank{rank}]: {line}"
