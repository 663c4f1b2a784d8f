"""What a training script may tell `ftrain supervise`, in a line: `import ftrain; ftrain.progress(step)`.

It costs a memory copy and one small message, imports no torch, and does nothing at all in a script that is not supervised, so
the line may stay where it is. A supervisor that is busy or gone never makes the training loop wait: what cannot be sent is kept
for the next call, up to a limit, and then dropped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from types import FrameType

import msgspec

from recovery.command import Link, claim_stacks, inherited
from recovery.heartbeat import RECORD_SIZE, ControlReader, HeartbeatWriter
from recovery.messages import Payload, ToWorkerProcess
from recovery.wire import Channel, channel

STEP = "step"
MAX_QUEUED_BYTES = 1 << 20
AHEAD = 2
SCHEDULED = "SLURM_JOB_ID"


class StepTold(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A step is finished. `saving_s` lies inside [t_begin, t_end)."""

    step: int
    t_begin: float
    t_end: float
    loss: float | None = None
    tokens: int = 0
    saving_s: float = 0.0


Commit = tuple[int, int, int]
"""A checkpoint that is in storage: its step, the attempt that has written it, and its bytes."""


class StateLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The state of a checkpoint was loaded; step 0: there was none. `stored`: it and the newest before it."""

    step: int
    t: float
    stored: tuple[Commit, ...] = ()


class StateStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A checkpoint is committed (or not: `error`)."""

    step: int
    t: float
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """`progress` has told the script that `step`, which it has finished, is its last."""

    step: int


class LeaveAfter(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """From the supervisor, to ranks on several nodes: the last step of all of them."""

    step: int


Told = StepTold | StateLoaded | StateStored | Leaving

decode_told = msgspec.json.Decoder(Told).decode
decode_asked = msgspec.json.Decoder(LeaveAfter).decode


class StopStep:
    """The step after which all ranks stop: a request is seen by one rank a step earlier than by another, and whoever left alone
    would leave the others in a collective.

    The first that sees it proposes a step that nobody can have finished yet: ranks that wait for each other are at most one
    step apart. Its proposal is a file, created whole and only once.
    """

    def __init__(self, link: Link) -> None:
        self._file, self._rank = os.path.join(link.folder, "stop-step"), link.rank
        self._alone = os.fstat(link.heartbeat).st_size <= RECORD_SIZE
        self._step: int | None = None

    def reached(self, step: int) -> bool:
        """Whether a rank that has finished `step` is to stop, now that a stop is asked for."""
        if self._alone:
            return True
        if self._step is None:
            self._step = self._agreed(step + AHEAD)
        return step >= self._step

    def _agreed(self, proposal: int) -> int:
        draft = f"{self._file}.{self._rank}"
        with open(draft, "w") as file:
            file.write(str(proposal))
        with contextlib.suppress(FileExistsError):
            os.link(draft, self._file)
        os.unlink(draft)
        with open(self._file) as file:
            return int(file.read())


class Reporter:
    """One supervised process's way to its supervisor. One thread."""

    def __init__(self, link: Link) -> None:
        """Take over the inherited descriptors."""
        self._heartbeat = HeartbeatWriter(link.heartbeat, link.index, rank=link.rank, attempt=link.attempt)
        self._control = ControlReader(link.control)
        self._stop, self._several_nodes = StopStep(link), link.several_nodes
        self._last_step: int | None = None  # of all nodes
        self._leaving = False
        self._channel: Channel[ToWorkerProcess] = channel(socket.socket(fileno=link.channel), ToWorkerProcess)
        for fd in (link.heartbeat, link.control):
            os.close(fd)
        os.set_inheritable(link.channel, False)
        self._pid = os.getpid()
        self.attempt = link.attempt
        """Which attempt of the run this process is part of."""
        self._since = time.time()
        self._saving_s = 0.0
        claim_stacks()
        self._claim_term()

    def _claim_term(self) -> None:
        """A scheduler that takes a node away sends SIGTERM to every process there. The first one is left to the supervisor,
        which hears of it too and says after which step all ranks leave; the second one ends this process as usual.
        """
        scheduled = SCHEDULED in os.environ and threading.current_thread() is threading.main_thread()
        if scheduled and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != self._pid:  # a data loader's process: whoever ends it means it
            os.kill(os.getpid(), signal.SIGTERM)

    def progress(self, step: int, loss: float | None, tokens: int) -> bool:
        """A step is finished; whether the run is to stop."""
        self._heartbeat.beat(STEP, step=step)
        begin, self._since = self._since, time.time()
        saving_s, self._saving_s = self._saving_s, 0.0
        told = StepTold(step=step, t_begin=begin, t_end=self._since, loss=loss, tokens=tokens, saving_s=saving_s)
        self.send(told)
        return self._leaves(step)

    def enter(self, phase: str) -> bool:
        """Something other than a step has begun; whether the run is to stop."""
        self._heartbeat.beat(phase)
        return self._leaves(self._heartbeat.step)

    def _leaves(self, step: int) -> bool:
        """Whether `step`, which is finished, was the last one."""
        if self._several_nodes:
            self._listen()
            leaves = self._last_step is not None and step >= self._last_step
        else:
            leaves = self._control.stop and self._stop.reached(step)
        if leaves and not self._leaving:
            self._leaving = True
            self.send(Leaving(step=step))
        return leaves

    def _listen(self) -> None:
        for frame in self._channel.read():
            asked = decode_asked(frame.message.payload)
            self._last_step = asked.step if self._last_step is None else self._last_step

    def loaded(self, step: int, stored: tuple[Commit, ...] = ()) -> None:
        """The state of `step` is there: what follows is steps. `stored`: it and checkpoints before it."""
        self._heartbeat.beat(STEP, step=step)
        self._since = time.time()
        self.send(StateLoaded(step=step, t=self._since, stored=stored))

    def saved(self, seconds: float) -> None:
        """The step under way has waited so long for a save."""
        self._saving_s += seconds

    def send(self, told: Told) -> None:
        """Never waits."""
        if self._channel.closed:
            return
        self._channel.flush()
        if self._channel.queued_bytes < MAX_QUEUED_BYTES:
            self._channel.send(Payload(payload=msgspec.json.encode(told)))


_reporters: list[Reporter | None] = []


def _forked() -> None:
    """A fork of a script (a data loader's process) is not the script, whichever of them speaks first."""
    _reporters[:] = [None]


os.register_at_fork(after_in_child=_forked)


def reporter() -> Reporter | None:
    """The way to the supervisor; None if nobody supervises this process."""
    if not _reporters:
        link = inherited(os.environ)
        _reporters.append(Reporter(link) if link is not None else None)
    return _reporters[0]


def progress(step: int | None = None, *, loss: float | None = None, tokens: int = 0, phase: str = STEP) -> bool:
    """Tell the supervisor that `step` steps are finished (1 after the first); returns whether the run is to stop, on all ranks
    after the same step.

    `loss` (a number) and `tokens` (of this step, over all ranks) appear in the report. With `phase` something else is said to
    have begun (`ftrain.progress(phase="evaluate")`): "evaluate" and "checkpoint" have deadlines of their own. Where nobody
    supervises, nothing happens and False is returned.
    """
    found = reporter()
    if found is None:
        return False
    if step is None or phase != STEP:
        return found.enter(phase)
    return found.progress(int(step), None if loss is None else float(loss), tokens)
