"""A training run in miniature: counts steps, reports them, keeps its step in shared memory, and breaks on demand.

Pure Python (no torch), so that the process half of the supervisor is tested at full speed. Roles, by command line:

    python -P -m toy coordinator FOLDER      python -P -m toy parent FOLDER      python -P -m toy keeper SOCKET_FD
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from recovery import events
from recovery.coordinator import Coordinator
from recovery.delegate import AttemptEndInfo, AttemptPlan, Delegate, Links, WorkerSpec
from recovery.launch import Budget, supervise
from recovery.ledger import Ledger, read_all
from recovery.messages import KeeperMemfds, Payload, ToKeeperFromWorker, ToKeeperProcess
from recovery.policy import Limits
from recovery.spec import CoordinatorSpec
from recovery.state import fold
from recovery.wire import channel
from recovery.worker import WorkerContext

STEP = struct.Struct("<q")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What breaks: `how` in rank `rank` at step `step` of attempt `attempt` (-1: of every attempt)."""

    how: str
    step: int = 3
    rank: int = 0
    attempt: int = 0


class Toy(msgspec.Struct, frozen=True, kw_only=True):
    """One toy run; written to FOLDER/toy.json."""

    ranks: int = 2
    steps: int = 10
    step_s: float = 0.01
    faults: tuple[Fault, ...] = ()
    spec: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    memfd_bytes: int = 4096
    begin_s: float = 0.0  # a coordinator that takes over waits so long for storage
    less_bytes: int = 0  # with which it will do if those do not fit
    entry: str = "toy:work"
    preload: str = "toy"
    rendezvous: bool = False
    keeper: bool = False


# worker


def work(context: WorkerContext) -> None:
    """Count from the step in our memory area to the last one."""
    faults = [Fault(**it) for it in context.args["faults"]]
    memory = mmap.mmap(context.fds[f"arena-{context.rank}"], 4096)
    (step,) = STEP.unpack_from(memory)
    context.send(f"ready {step}".encode())
    while step < context.args["steps"]:
        if context.control.stop or context.terminated:
            break
        step += 1
        context.heartbeat.beat("forward", step=step)
        for fault in faults:
            if fault.step == step and fault.rank == context.rank and fault.attempt in (-1, context.attempt):
                fail(fault.how)
        time.sleep(context.args["step_s"])
        STEP.pack_into(memory, 0, step)
        context.send(f"step {step} {time.time()}".encode())
        message = context.receive()
        if message is not None:
            context.send(b"echo " + message)
            context.send_keeper(b"from rank %d: " % context.rank + message)
    context.send(f"done {step}".encode())


def fail(how: str) -> None:
    """Break in the given way."""
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            faulthandler._sigsegv()
        case "abort":
            os.abort()
        case "exit":
            sys.exit(7)
        case "raise":
            raise RuntimeError("the toy is broken")
        case "hang":
            while True:
                signal.pause()
        case "fork":
            if os.fork() == 0:
                while True:
                    signal.pause()
        case "leave child":
            reader, writer = os.pipe()
            if os.fork() == 0:
                os.setsid()  # out of the reach of a signal to the worker's process group
                os.write(writer, b"!")
                while True:
                    signal.pause()
            os.read(reader, 1)
            os.kill(os.getpid(), signal.SIGKILL)


def describe(context: WorkerContext) -> None:
    """Say what this worker sees of its surroundings, then leave."""
    context.heartbeat.beat("describe", step=1)
    fds = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _open(int(name))}
    seen = {
        "fds": {str(fd): target for fd, target in fds.items()},
        "ppid": os.getppid(),
        "args": context.args,
        "env": os.environ.get("TOY", ""),
        "threads": len(os.listdir("/proc/self/task")),
        "listener": context.listener_fd,
        "names": sorted(context.fds),
        "modules": sorted(name for name in ("torch", "numpy") if name in sys.modules),
    }
    context.send(b"seen " + msgspec.json.encode(seen))
    context.send(b"done 0")


def _open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# keeper


def keep(fd: int) -> int:
    """Say what arrives."""
    link = channel(socket.socket(fileno=fd), ToKeeperProcess)
    while (frame := link.receive()) is not None:
        for received in frame.fds:
            os.close(received)
        match frame.message:
            case KeeperMemfds(memfds=memfds):
                link.send(Payload(payload=b"memfds " + msgspec.json.encode(memfds)))
            case ToKeeperFromWorker(rank=rank, payload=payload):
                link.send(Payload(payload=b"heard %d " % rank + payload))
            case Payload(payload=payload):
                link.send(Payload(payload=b"told " + payload))
    return 0


# coordinator


class ToyDelegate(Delegate):
    """Knows toys. Keeps a plain-text diary of everything it is told in FOLDER/diary."""

    def __init__(self, folder: Path, toy: Toy) -> None:
        self.folder = folder
        self.toy = toy
        self._epoch = 0
        self._done: set[int] = set()
        self._attempt = -1

    def note(self, *words: object) -> None:
        with (self.folder / "diary").open("a") as diary:
            diary.write(" ".join(map(str, words)) + "\n")

    @property
    def epoch(self) -> int:
        return self._epoch

    def begin(self, links: Links, *, resumed: bool) -> list[events.Event]:
        self.links = links
        path = self.folder / "epoch"
        self._epoch = 1 + (int(path.read_text()) if path.exists() else 0)
        path.write_text(str(self._epoch))
        if resumed:
            time.sleep(self.toy.begin_s)  # storage is away
        while (self.folder / "away").exists():
            time.sleep(0.01)
        self.note("begin", f"resumed={resumed}", f"epoch={self._epoch}")
        now = time.time()
        return [
            events.RunStarted(t=now, run_id="toy", epoch=self._epoch, readopted=resumed),
            events.EpochTaken(t=now, epoch=self._epoch),
        ]

    def plan_attempt(self, attempt: int, previous: AttemptEndInfo | None) -> AttemptPlan:
        survived = previous is not None and previous.agent_survived
        self.note(
            "plan", attempt, f"survived={survived}", [(it.rank, it.status) for it in previous.workers] if previous else ""
        )
        if previous is not None and previous.action == "roll_back":
            self.note("back from", previous.attempt)
        self._done.clear()
        self._attempt = attempt
        toy = self.toy
        args = {"steps": toy.steps, "step_s": toy.step_s, "faults": [msgspec.structs.asdict(fault) for fault in toy.faults]}
        workers = tuple(
            WorkerSpec(rank=rank, entry=toy.entry, args=args, env={"TOY": f"rank {rank}"}, memfds=(f"arena-{rank}",))
            for rank in range(toy.ranks)
        )
        return AttemptPlan(
            layout=f"{toy.ranks} toys",
            workers=workers,
            source="memory" if survived else "init",
            memfds={f"arena-{rank}": toy.memfd_bytes for rank in range(toy.ranks)},
            rendezvous=toy.rendezvous,
            memo=b"memo of %d" % attempt,
        )

    def ready(self, previous: AttemptEndInfo | None) -> bool:
        return previous is None or not (self.folder / "hold").exists()

    def can_do_with_less(self) -> bool:
        less = self.toy.less_bytes
        self.toy = msgspec.structs.replace(self.toy, memfd_bytes=less or self.toy.memfd_bytes, less_bytes=0)
        return bool(less)

    def on_worker(self, rank: int, attempt: int, payload: bytes) -> list[events.Event]:
        word, _, rest = payload.decode().partition(" ")
        if word == "done" and int(rest) >= self.toy.steps:
            self._done.add(rank)
        if word in ("echo", "seen"):
            self.note(word, rank, rest)
        if word == "ready":
            self.note("ready", attempt, rank, rest)
        if rank == 0 and word == "ready":
            return [events.Ready(t=time.time(), attempt=attempt, step=int(rest))]
        if rank == 0 and word == "step":
            step, t = rest.split()
            return [events.StepFinished(t=float(t), attempt=attempt, step=int(step), t_begin=float(t) - 0.001, t_end=float(t))]
        if rank == 0 and word == "done":
            self.note("done", attempt, rest)
        return []

    def on_keeper(self, payload: bytes) -> list[events.Event]:
        self.note("keeper", payload.decode())
        return []

    def on_agent_lost(self) -> list[events.Event]:
        self.note("agent lost")
        return []

    def on_adopted(self, attempt: int, memo: bytes) -> list[events.Event]:
        self.note("adopted", attempt, memo.decode())
        self._attempt = attempt
        return []

    def on_keeper_started(self, *, restarted: bool) -> list[events.Event]:
        self.note("keeper started", f"restarted={restarted}")
        self.links.to_keeper(b"hello keeper")
        return []

    def tick(self, now: float) -> list[events.Event]:
        path = self.folder / "to_worker"
        if path.exists():
            path.unlink()
            self.links.to_worker(0, b"ping")
        return []

    def finished(self) -> bool:
        return len(self._done) == self.toy.ranks

    def drained(self) -> bool:
        return not (self.folder / "owed").exists()

    def status(self) -> dict[str, Any]:
        return {"toy": True}


def run_coordinator(folder: Path) -> int:
    """One life of the toy run's coordinator."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    toy = msgspec.json.decode((folder / "toy.json").read_bytes(), type=Toy)
    keeper = (sys.executable, "-P", "-m", "toy", "keeper") if toy.keeper else ()
    spec = CoordinatorSpec(local_dir=folder, zygote_preload=toy.preload, keeper_argv=keeper, **toy.spec)

    def open_ledger(epoch: int) -> tuple[Ledger, Any]:
        past = read_all(folder / "ledger")
        return Ledger(folder / "ledger", None, epoch), fold(past)

    ending = Coordinator(ToyDelegate(folder, toy), spec, open_ledger, Limits(**toy.limits)).run()
    logging.info("%s", ending)
    return ending.code


def main(role: str, argument: str) -> int:
    """One of the toy's processes."""
    if role == "keeper":
        return keep(int(argument))
    if role == "parent":
        folder = Path(argument)
        argv = [sys.executable, "-P", "-m", "toy", "coordinator", argument]
        return supervise(argv, log=folder / "logs" / "coordinator.log", budget=Budget(deaths=10**6))
    return run_coordinator(Path(argument))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
