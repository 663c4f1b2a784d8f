"""What a training script may tell `ftrain supervise`, in a line: `import ftrain; ftrain.progress(step)`.

It costs a memory copy and one small message, imports no torch, and does nothing at all in a script that is not supervised, so
the line may stay where it is. A supervisor that is busy or gone never makes the training loop wait: what cannot be sent is kept
for the next call, up to a limit, and then dropped.
"""

from __future__ import annotations

import os
import socket
import time

import msgspec

from recovery.command import Link, claim_stacks, inherited
from recovery.heartbeat import ControlReader, HeartbeatWriter
from recovery.messages import Payload, ToWorkerProcess
from recovery.wire import Channel, channel

STEP = "step"
MAX_QUEUED_BYTES = 1 << 20


class StepTold(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """A step is finished. `saving_s` lies inside [t_begin, t_end)."""

    step: int
    t_begin: float
    t_end: float
    loss: float | None = None
    tokens: int = 0
    saving_s: float = 0.0


class StateLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The state of a checkpoint was loaded; step 0: there was none."""

    step: int
    t: float


class StateStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A checkpoint is committed (or not: `error`)."""

    step: int
    t: float
    nbytes: int = 0
    seconds: float = 0.0
    error: str = ""


Told = StepTold | StateLoaded | StateStored

decode_told = msgspec.json.Decoder(Told).decode


class Reporter:
    """One supervised process's way to its supervisor. One thread."""

    def __init__(self, link: Link) -> None:
        """Take over the inherited descriptors."""
        self._heartbeat = HeartbeatWriter(link.heartbeat, link.index, rank=link.rank, attempt=link.attempt)
        self._control = ControlReader(link.control)
        self._channel: Channel[ToWorkerProcess] = channel(socket.socket(fileno=link.channel), ToWorkerProcess)
        for fd in (link.heartbeat, link.control):
            os.close(fd)
        os.set_inheritable(link.channel, False)
        self._pid = os.getpid()
        self._since = time.time()
        self._saving_s = 0.0
        claim_stacks()

    @property
    def ours(self) -> bool:
        """Whether this is the process that took the descriptors, and not a fork of it (a data loader)."""
        return os.getpid() == self._pid

    def progress(self, step: int, loss: float | None, tokens: int) -> bool:
        """A step is finished; whether the run is to stop."""
        self._heartbeat.beat(STEP, step=step)
        begin, self._since = self._since, time.time()
        saving_s, self._saving_s = self._saving_s, 0.0
        told = StepTold(step=step, t_begin=begin, t_end=self._since, loss=loss, tokens=tokens, saving_s=saving_s)
        self.send(told)
        return self._control.stop

    def enter(self, phase: str) -> bool:
        """Something other than a step has begun; whether the run is to stop."""
        self._heartbeat.beat(phase)
        return self._control.stop

    def loaded(self, step: int) -> None:
        """The state of `step` is there: what follows is steps."""
        self._heartbeat.beat(STEP, step=step)
        self._since = time.time()
        self.send(StateLoaded(step=step, t=self._since))

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


def reporter() -> Reporter | None:
    """The way to the supervisor; None if nobody supervises this process."""
    if not _reporters:
        link = inherited(os.environ)
        _reporters.append(Reporter(link) if link is not None else None)
    found = _reporters[0]
    return found if found is not None and found.ours else None


def progress(step: int | None = None, *, loss: float | None = None, tokens: int = 0, phase: str = STEP) -> bool:
    """Tell the supervisor that `step` steps are finished (1 after the first); returns whether the run is to stop.

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
