"""A worker that is somebody's command: the fork becomes it by exec, and everything else stays as it is for a worker of ours.

Why exec and not a child of the worker: the pid the supervisor watches, signals and asks the kernel about is then the program's
own, its exit status is the true one, and its death with the agent (a request that exec keeps) needs nobody's help. What the
program may use, if it wants to be seen (`recovery.heartbeat`, `recovery.wire`), is inherited as descriptors, and one variable
of the environment says which they are. A program that knows nothing of this has a few descriptors more and never looks at them.

SIGUSR1 asks a worker for its stacks. A program that has no handler for it must not die of that, so it starts with the signal
ignored; `claim_stacks` has Python write them instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from recovery.messages import Fork, ToWorkerProcess, WorkerFailing, WorkerHello
from recovery.wire import Channel

COMMAND = "command"
"""The entry of such a worker; it names no function."""

LINK = "FTRAIN_LINK"
NOT_FOUND, NOT_EXECUTABLE = 127, 126


class CommandArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of such a worker. `environment`: variables that are set, or with None unset, whatever the agent had."""

    argv: tuple[str, ...]
    cwd: str
    environment: dict[str, str | None] = {}
    several_nodes: bool = False
    host: str = ""
    """Where rank 0 is to listen, if the ranks meet; the agent of its node says so."""
    port: int = 0

    def variables(self) -> dict[str, str | None]:
        """All of the environment that is set or unset."""
        meeting = {"MASTER_ADDR": self.host, "MASTER_PORT": str(self.port)} if self.port else {}
        return {**self.environment, **meeting}


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervised program inherits: descriptors, each with the inode by which it is known again, and who it is."""

    heartbeat: int
    control: int
    channel: int
    inodes: tuple[int, int, int]
    index: int
    rank: int
    attempt: int
    folder: str
    """Where the attempt's logs are: the ranks of this node share it."""
    several_nodes: bool = False
    """Whether there are, or were, or may be ranks on other nodes."""


@dataclass(frozen=True, slots=True)
class _Descriptors:
    heartbeat: int
    control: int
    channel: int

    def inodes(self) -> tuple[int, int, int]:
        return (os.fstat(self.heartbeat).st_ino, os.fstat(self.control).st_ino, os.fstat(self.channel).st_ino)


def become(fork: Fork, channel: Channel[ToWorkerProcess], fds: Mapping[str, int]) -> NoReturn:
    """Say hello, then turn into the command. If that is impossible the agent is told why."""
    args = msgspec.convert(fork.args, CommandArgs)
    channel.send(WorkerHello(pid=os.getpid()))
    held = _Descriptors(fds["heartbeat"], fds["control"], channel.fileno())
    for fd in (held.heartbeat, held.control, held.channel):
        os.set_inheritable(fd, True)
    link = Link(
        heartbeat=held.heartbeat,
        control=held.control,
        channel=held.channel,
        inodes=held.inodes(),
        index=fork.index,
        rank=fork.rank,
        attempt=fork.attempt,
        folder=os.path.dirname(fork.error_file),
        several_nodes=args.several_nodes,
    )
    environment = {**os.environ, LINK: msgspec.json.encode(link).decode()}
    for name, value in args.variables().items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    status = NOT_FOUND
    try:
        os.chdir(args.cwd)
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.execvpe(args.argv[0], list(args.argv), environment)
    except OSError as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        text = f"{type(error).__name__}: {args.argv[0]} cannot be started: {error.strerror} ({error.filename})"
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        channel.send(WorkerFailing(error=text))
        channel.drain(1.0)
    os._exit(status)


def inherited(environment: Mapping[str, str]) -> Link | None:
    """The link of this process, if it has one: the variable may be there without the descriptors, as in a child of the program
    that got all of the environment and none of the files. A mere fork of the program (a data loader) has both, and no link."""
    with contextlib.suppress(msgspec.DecodeError, OSError, KeyError):
        link = msgspec.json.decode(environment[LINK], type=Link)
        if _Descriptors(link.heartbeat, link.control, link.channel).inodes() == link.inodes and not _is_a_fork():
            return link
    return None


def _is_a_fork() -> bool:
    """Whether this process still runs what its parent runs: a command line of its own comes with exec."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/cmdline").read_bytes() == Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    return False


def claim_stacks() -> None:
    """Have Python answer SIGUSR1 with its stacks, unless the program has a use of its own for the signal."""
    held: Any = signal.getsignal(signal.SIGUSR1)
    if held in (signal.SIG_IGN, signal.SIG_DFL):
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2, all_threads=True, chain=False)
