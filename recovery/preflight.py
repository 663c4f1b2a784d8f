"""Health checks of a node before work is given to it: each may hang, so none may hang us.

The checks run one after the other in a child process that says when each is done; one that does not answer in time is recorded
as hung, the child is killed (and left to the kernel if even that does not help: a process in an uninterruptible wait on a dead
file system cannot be waited for), and another child goes on with the rest. One process for all checks, because starting an
interpreter costs more than most of them.

A check is a function "module:function" of plain arguments. It returns what it found in words; it raises `Concern` for what a
person should know but training survives; anything else it raises is a failure.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import IO, Any, Literal, cast

import msgspec
from msgspec import Struct

from recovery.launch import python

Status = Literal["ok", "warning", "failed", "hung"]


class Concern(Exception):  # noqa: N818 (it is no error)
    """Worth saying, no reason not to start."""


class Check(Struct, frozen=True, kw_only=True):
    """One question to a node. `remedy` is what a person may do if the answer is bad."""

    name: str
    entry: str
    args: dict[str, Any] = {}
    limit_s: float = 5.0
    remedy: str = ""


class Result(Struct, frozen=True, kw_only=True):
    """The answer."""

    name: str
    status: Status
    text: str
    seconds: float = 0.0
    remedy: str = ""

    @property
    def bad(self) -> bool:
        """Whether work should not be given to this node."""
        return self.status in ("failed", "hung")

    def line(self) -> str:
        """In one line, with the remedy if there is a need for one."""
        remedy = f"; {self.remedy}" if self.remedy and self.status != "ok" else ""
        return f"{self.name}: {self.status}: {self.text}{remedy}"


def examine(checks: Sequence[Check]) -> list[Result]:
    """All answers, in the order of the questions; takes at most the sum of their limits."""
    results: list[Result] = []
    while len(results) < len(checks):
        results += _examine(checks[len(results) :])
    return results


def _examine(checks: Sequence[Check]) -> list[Result]:
    """The answers of one child: all of them, or up to the first that does not come."""
    child = subprocess.Popen(
        python("recovery.preflight"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    )
    answers = _Lines(cast(IO[bytes], child.stdout))
    results: list[Result] = []
    try:
        with contextlib.suppress(BrokenPipeError), cast(IO[bytes], child.stdin) as to_child:
            to_child.write(msgspec.json.encode(checks))
        answers.next(STARTUP_S)  # the child is there; from now on the time is the checks' own
        for check in checks:
            began = time.monotonic()
            line = answers.next(check.limit_s)
            results.append(_result(check, line, time.monotonic() - began))
            if not line:
                break
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(REAP_S)
        answers.close()
    return results


STARTUP_S = 20.0  # an interpreter on an overloaded node or a cold network file system
REAP_S = 1.0


def _result(check: Check, line: bytes | None, seconds: float) -> Result:
    if line is None:
        text = f"no answer within {check.limit_s:g} s"
        return Result(name=check.name, status="hung", text=text, seconds=seconds, remedy=check.remedy)
    if not line:
        return Result(name=check.name, status="failed", text="the check's process died", seconds=seconds, remedy=check.remedy)
    return msgspec.json.decode(line, type=Result)


class _Lines:
    """Lines of a pipe, each with a time limit."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._read = pipe, b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)

    def next(self, limit_s: float) -> bytes | None:
        """The next line; empty at the end, None if there is none in time."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._read:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            data = os.read(self._pipe.fileno(), 65536)
            if not data:
                return b""
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        self._selector.close()
        self._pipe.close()


def answer(check: Check) -> Result:
    """Ask in this process: no time limit."""
    began = time.monotonic()
    status: Status = "ok"
    try:
        module, _, name = check.entry.partition(":")
        function: Callable[..., str] = getattr(import_module(module), name)
        text = function(**check.args)
    except Concern as concern:
        status, text = "warning", str(concern)
    except Exception as error:  # whatever a check stumbles over is its answer
        status, text = "failed", f"{error}" or type(error).__name__
    return Result(name=check.name, status=status, text=text, seconds=time.monotonic() - began, remedy=check.remedy)


def main() -> int:
    """The child: questions on standard input, a line for each answer. What checks print must not end up among the answers."""
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    out.write(b"\n")
    for check in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Check]):
        out.write(msgspec.json.encode(answer(check)) + b"\n")
    return 0


if __name__ == "__main__":
    from recovery.preflight import main as child  # the module that checks import, whose Concern is the one they raise

    sys.exit(child())
