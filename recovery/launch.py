"""Starting processes so that none outlives its purpose, and the thin parent that keeps a coordinator alive.

Everything is started with `-P`: a user's own folder `storage/` or `recovery/` in the current directory must not shadow ours.
A process that must not survive its parent asks the kernel for SIGKILL at the parent's death (PR_SET_PDEATHSIG) between fork
and exec. Three traps, all tried: the signal fires when the starting *thread* ends, so only main threads may call `spawn`; the
parent may be dead before the request is made, so it is checked afterwards; and exec of a set-uid program would clear it.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from recovery.codes import ExitCode

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last: how a scheduler warns of the time limit

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Adopt every orphaned descendant from now on: their exit statuses come here, and none is lost to pid 1."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for the calling process when its parent's thread ends; leaves at once if that has already happened."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def python(module: str, *args: str) -> list[str]:
    """Command line that runs one of our modules with this interpreter, immune to the current folder."""
    return [sys.executable, "-P", "-m", module, *args]


def boot_id() -> str:
    """Identity of this boot of this machine: a pid means nothing after a reboot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none (a zombie counts as none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether the very process still runs, not another that got its number."""
    return start_time(pid) == started


def children() -> list[int]:
    """Pids of the direct children of this process's main thread, adopted ones included."""
    pid = os.getpid()
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without checkpoint/restore support does not tell
        return []


def descendants(pid: int) -> list[int]:
    """Pids of everything that the process `pid` has started and that still hangs on it, nearest first."""
    found: list[int] = []
    for task in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in Path(task).read_text().split()]
    return found + [other for child in found for other in descendants(child)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """How to start a process. Standard input is /dev/null; `fds` keep their numbers, everything else is closed."""

    argv: Sequence[str]
    log: Path
    """Where its stdout and stderr are appended."""
    env: Mapping[str, str] | None = None
    """Added to our own environment."""
    fds: tuple[int, ...] = ()
    dies_with_us: bool = False
    new_session: bool = False


def spawn(how: Spawn) -> subprocess.Popen[bytes]:
    """Start a process; main thread only (see above). Raises OSError if the program cannot be started."""
    parent = os.getpid()
    how.log.parent.mkdir(parents=True, exist_ok=True)
    with how.log.open("ab", buffering=0) as out:
        return subprocess.Popen(
            list(how.argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(how.env or {})},
            pass_fds=how.fds,
            start_new_session=how.new_session,
            preexec_fn=(lambda: die_with_parent(parent)) if how.dies_with_us else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How often the coordinator may be killed: more deaths within the window and the parent gives up."""

    deaths: int = 5
    window_s: float = 60.0

    def spent(self, deaths: Sequence[float], now: float) -> bool:
        """Whether the last deaths (monotonic times) are too many."""
        return sum(now - t < self.window_s for t in deaths) > self.deaths


def accept_stop_signals() -> None:
    """The coordinator calls this once its handlers stand: until then its parent has them blocked, so that none is lost."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def supervise(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    fds: tuple[int, ...] = (),
    budget: Budget = Budget(),
    on_tick: Callable[[], None] | None = None,
    tick_s: float = 0.2,
) -> int:
    """Run a coordinator to its end and return its exit code; a coordinator that dies by a signal is started again.

    Call from the main thread. SIGINT and SIGTERM are handed on. The run does not depend on this process: if it is killed,
    coordinator and agent go on. An exit code of the coordinator's own, whatever it is, is final: a bug would only repeat.
    """
    become_subreaper()  # a dead coordinator's agent is adopted here rather than by a pid 1 that may not reap
    parent = _Parent(Spawn(argv=argv, log=log, env=env, fds=fds, new_session=True))
    previous = {number: signal.signal(number, parent.on_signal) for number in STOP_SIGNALS}
    try:
        return parent.run(budget, on_tick or (lambda: None), tick_s)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def log_size(log: Path) -> int:
    """How much a log holds; what comes behind it belongs to whoever is started now."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0


def why_left(log: Path, since: int, *, held: bool) -> str:
    """Why a coordinator left of whom no ledger tells it, as its log has it after byte `since`; empty if it is not there.

    `held`: because another owns the run, which may write into the same file; else because storage failed it.
    """
    mark, said = b" INFO root: failed: " if held else b" ERROR root: ", b""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(since)
        for line in file:
            said = line.partition(mark)[2] or said
    return said.decode(errors="replace").strip()


class _Parent:
    """State of `supervise`: the current coordinator and what was asked of it."""

    def __init__(self, how: Spawn) -> None:
        self._how = how
        self._pidfd = -1
        self._stop: int | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = number
        self._forward()

    def _forward(self) -> None:
        if self._pidfd >= 0 and self._stop is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, self._stop)

    def run(self, budget: Budget, on_tick: Callable[[], None], tick_s: float) -> int:
        deaths: list[float] = []
        while True:
            status = self._run_once(on_tick, tick_s)
            if status >= 0:
                return status
            deaths.append(time.monotonic())
            if budget.spent(deaths, deaths[-1]):
                return ExitCode.GIVEN_UP

    def _run_once(self, on_tick: Callable[[], None], tick_s: float) -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process = spawn(self._how)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        self._pidfd = os.pidfd_open(process.pid)
        try:
            self._forward()  # somebody who asked the predecessor to stop asks this one too
            return self._wait(process, on_tick, tick_s)
        finally:
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)

    def _wait(self, process: subprocess.Popen[bytes], on_tick: Callable[[], None], tick_s: float) -> int:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        while not poll.poll(round(tick_s * 1000)):
            on_tick()
            reap_others(process.pid)
        status = process.wait()
        on_tick()
        reap_others(process.pid)
        return status


def reap_others(but: int) -> list[tuple[int, int]]:
    """Collect the exit statuses of adopted children, leaving the process `but` to its owner."""
    reaped = []
    with contextlib.suppress(ChildProcessError):
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None and info.si_pid != but:
            pid, status = os.waitpid(info.si_pid, os.WNOHANG)
            reaped.append((pid, os.waitstatus_to_exitcode(status)))
    return reaped
