"""The agent: one per node, the parent of everything that runs there, and the keeper of its memory.

    python -P -m recovery.agent SPEC.json

It decides nothing about the run. It owns what must outlive workers, keeper, zygote and coordinator: the memory areas, the exact
exit statuses, the logs, what was not yet acknowledged. So it is small, imports little, and never waits for anybody: whoever is
slow has a queue, whoever is dead is reaped.

Its own death ends all of its children (they asked the kernel for that); its coordinator's death ends nothing, for `lease_s`:
after that nobody can know that this node is not being replaced, so the workers are killed and the agent leaves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from recovery import paths
from recovery.agent_record import lock_soon, write_record
from recovery.clues import Clues
from recovery.codes import ExitCode
from recovery.crew import Crew, Surroundings
from recovery.events import ProcessKind
from recovery.heartbeat import CONTROL_SIZE, ControlWriter
from recovery.helper import Callbacks, Helper
from recovery.launch import Spawn, become_subreaper, boot_id, children, descendants, python, start_time
from recovery.logs import LogLimit
from recovery.loop import Loop
from recovery.memory import Areas, MemoryLimitError, memfd
from recovery.messages import (
    AgentHello,
    CollectEvidence,
    Fork,
    Forked,
    ForkFailed,
    FromKeeper,
    FromKeeperProcess,
    FromZygote,
    Heartbeats,
    KeeperForget,
    KeeperMemfds,
    Lasting,
    Meeting,
    Payload,
    Prepare,
    Prepared,
    PrepareFailed,
    Refused,
    Release,
    SetControl,
    Shutdown,
    StartAttempt,
    StopWorkers,
    ToAgent,
    ToKeeper,
    ToKeeperFromWorker,
    ToWorker,
    ZygoteReady,
)
from recovery.ports import free_port
from recovery.spec import LEAVE, AgentSpec
from recovery.uplink import Uplink
from recovery.wire import MAX_DESCRIPTORS, Frame

log = logging.getLogger("recovery.agent")

HEARTBEAT_S = 1.0
LOGS_S = 5.0
LEAVE_LIMIT_S = 5.0


class Agent:
    """State of the agent; every method runs in its one thread."""

    def __init__(self, spec: AgentSpec, loop: Loop) -> None:
        """Own the memory and the way to start helpers; nothing runs yet."""
        self.spec = spec
        self.folder = Path(spec.local_dir)
        self.loop = loop
        self.areas = Areas()
        self.uplink = Uplink(loop, spec.coordinator, spec.control, self)
        self.crew: Crew | None = None
        self.leaving = False
        self._control_fd = memfd("control", CONTROL_SIZE)
        self._control = ControlWriter(self._control_fd)
        self._set = SetControl(stop=False, save=0)
        self._status = ExitCode.DONE
        self._early: dict[int, int] = {}  # statuses of children whose pid nobody has told us yet
        self._clues = Clues(loop, self.folder)
        self._logs = LogLimit(os.environ)
        self._zygote = self._helper("zygote", FromZygote, self._from_zygote, self._zygote_died, self._zygote_started)
        self._keeper = self._helper("keeper", FromKeeperProcess, self._from_keeper, lambda: None, self._equip_keeper)

    def _helper(self, kind: ProcessKind, messages: Any, on_frame: Any, on_death: Any, on_start: Any) -> Helper:
        tell = Callbacks(on_start=on_start, on_frame=on_frame, on_death=on_death, report=self.report)
        return Helper(self.loop, kind, lambda fd: self._command(kind, fd), messages, tell)

    def _command(self, kind: ProcessKind, fd: int) -> Spawn:
        if kind == "zygote":
            argv = python("recovery.zygote", "--preload", self.spec.zygote_preload, "--socket-fd", str(fd))
        else:
            argv = [*self.spec.keeper_argv, str(fd)]
        env = {"OPENBLAS_NUM_THREADS": "1", **self.spec.env}
        return Spawn(argv=argv, log=paths.process_log(self.folder, kind), env=env, fds=(fd,), dies_with_us=True)

    # life

    def run(self) -> int:
        """Serve until shut down, or until the lease is over."""
        self.loop.on_signal([signal.SIGCHLD], lambda _: self.reap())
        self.loop.on_signal([LEAVE], lambda number: self.leave("asked to, by who started this agent"))
        # A scheduler that ends a job signals every process of it: the run must be left to save, and then says who leaves.
        # Zygote and keeper inherit this; workers do not.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._zygote.start()
        if self.spec.keeper_argv:
            self._keeper.start()
        self.uplink.connect()
        self.loop.every(HEARTBEAT_S, self._beat)
        self.loop.every(min(5.0, self.spec.lease_s / 8), self._check_lease)
        self.loop.every(LOGS_S, self._look_at_logs)
        self.loop.wait_for(lambda: self.leaving)
        self._end_everything()
        return self._status

    def leave(self, reason: str) -> None:
        """End the workers, then everything else."""
        log.info("leaving: %s", reason)
        self.leaving = True

    def _end_everything(self) -> None:
        if self.crew is not None:
            self.crew.stop(signal.SIGKILL, "the agent leaves")
            self.loop.wait_for(lambda: self.crew is None or self.crew.all_ended, LEAVE_LIMIT_S)
        self._zygote.stop()
        self._keeper.stop()
        self._zygote.kill()
        self.loop.wait_for(lambda: not (self._keeper.alive or self._zygote.alive), LEAVE_LIMIT_S)
        self._keeper.kill()
        self._kill_strays()
        self.loop.wait_for(lambda: not (self._keeper.alive or children()), LEAVE_LIMIT_S)
        self.uplink.close()

    def _check_lease(self) -> None:
        silent_s, lease_s = self.uplink.silent_s, self.spec.lease_s
        if silent_s > (lease_s if self.uplink.met else max(lease_s, self.spec.patience_s)) and not self.leaving:
            self._status = ExitCode.RETRY_SAME
            self.leave(f"no coordinator for {silent_s:.1f} s, the lease is {lease_s:g} s")

    # children

    def _look_at_logs(self) -> None:
        crew = self.crew
        ranks = crew.workers if crew is not None and not crew.all_ended else ()
        told = self._logs.look([paths.rank_log(self.folder, crew.attempt, rank) for rank in ranks]) if crew is not None else ""
        if told:
            log.warning("%s", told)

    def reap(self) -> None:
        """Collect every exit status. A worker's whole process group goes with it, while its pid is still taken."""
        with contextlib.suppress(ChildProcessError):
            while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(info.si_pid, signal.SIGKILL)
                pid, status = os.waitpid(info.si_pid, 0)
                self._reaped(pid, os.waitstatus_to_exitcode(status))

    def _reaped(self, pid: int, status: int) -> None:
        if pid == self._zygote.pid:
            self._zygote.exited(status)
        elif pid == self._keeper.pid:
            self._keeper.exited(status)
        elif self.crew is not None and (worker := self.crew.by_pid(pid)) is not None:
            self.crew.exited(worker, status)
        else:
            self._early[pid] = status

    def _kill_strays(self) -> None:
        """No worker is left: whatever else we adopted, with all that hangs on it, is a left-over of one, and may hold memory,
        ports or files."""
        adopted = [pid for pid in children() if pid not in (self._zygote.pid, self._keeper.pid)]
        for pid in [*adopted, *(other for parent in adopted for other in descendants(parent))]:
            log.warning("killing left-over process %d", pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _zygote_started(self) -> None:
        if self.crew is not None:
            self.crew.zygote_started()

    def _zygote_died(self) -> None:
        if self.crew is not None:
            self.crew.zygote_died(f"the zygote died; its log: {paths.process_log(self.folder, 'zygote')}")

    def _from_zygote(self, frame: Frame[FromZygote]) -> None:
        match frame.message:
            case ZygoteReady(seconds=seconds):
                log.info("zygote ready after %.2f s", seconds)
            case Forked(attempt=attempt) as answer if self.crew is not None and attempt == self.crew.attempt:
                self.crew.forked(answer)
                worker = self.crew.by_pid(answer.pid)
                if worker is not None and answer.pid in self._early:  # it died before we were told that it lives
                    self.crew.exited(worker, self._early.pop(answer.pid))
            case ForkFailed(attempt=attempt) as answer if self.crew is not None and attempt == self.crew.attempt:
                self.crew.fork_failed(answer)

    def _to_zygote(self, request: Fork, fds: tuple[int, ...]) -> bool:
        return self._zygote.send(request, fds)

    def _from_keeper(self, frame: Frame[Payload]) -> None:
        self.report(FromKeeper(payload=frame.message.payload))

    def _to_keeper(self, rank: int, attempt: int, payload: bytes) -> None:
        self._keeper.send(ToKeeperFromWorker(rank=rank, attempt=attempt, payload=payload))

    def _equip_keeper(self) -> None:
        self._give_keeper(list(self.areas.sizes()))

    def _give_keeper(self, names: Sequence[str]) -> None:
        sizes = self.areas.sizes()
        for first in range(0, max(1, len(names)), MAX_DESCRIPTORS):
            part = names[first : first + MAX_DESCRIPTORS]
            fds = tuple(self.areas.fd(name) for name in part)
            self._keeper.send(KeeperMemfds(memfds={name: sizes[name] for name in part}), fds)

    # the coordinator

    def hello(self) -> AgentHello:
        """Who we are and all we hold."""
        crew = self.crew
        return AgentHello(
            node=self.spec.node,
            pid=os.getpid(),
            boot_id=boot_id(),
            started=start_time(os.getpid()) or 0,
            attempt=crew.attempt if crew else -1,
            epoch=crew.start.epoch if crew else 0,
            workers=crew.info() if crew else (),
            memfds=self.areas.sizes(),
            memo=crew.start.memo if crew else b"",
            stop=self._set.stop,
            save=self._set.save,
            leave=self._set.leave,
        )

    def report(self, message: Lasting) -> None:
        """Tell the coordinator, now or as soon as there is one; it is kept until acknowledged."""
        self.uplink.report(message)

    def push_back(self, full: bool) -> None:
        """Stop reading from workers and keeper while too much is unacknowledged."""
        self._keeper.pause(full)
        if self.crew is not None:
            self.crew.pause(full)

    def answer(self, message: object) -> None:
        """Tell the coordinator if it is there; it will ask again otherwise."""
        self.uplink.answer(message)

    def _beat(self) -> None:
        if self.crew is not None and not self.crew.all_ended:
            self.crew.look()
            self.answer(Heartbeats(beats=self.crew.beats()))

    def obey(self, command: ToAgent) -> None:
        """A command of the coordinator."""
        match command:
            case Prepare(memfds=memfds):
                self._prepare(memfds)
            case Release(names=names):
                self.areas.release(names)
                self._keeper.send(KeeperForget(names=names))
            case StartAttempt():
                self._start(command)
            case StopWorkers(reason=reason, grace_s=grace_s):
                self._stop_workers(reason, grace_s)
            case SetControl(stop=stop, save=save, leave=leave):
                self._set = command
                self._control.set(stop=stop, save=save, leave=leave)
            case ToKeeper(payload=payload):
                self._keeper.send(Payload(payload=payload))
            case ToWorker(rank=rank, payload=payload) if self.crew is not None:
                self.crew.send(rank, payload)
            case CollectEvidence():
                self._clues.collect(command, self.crew, self.answer)
            case Shutdown(reason=reason, over=over):
                self._status = ExitCode.DONE if over else ExitCode.RETRY_SAME
                self.leave(reason)

    def _prepare(self, memfds: dict[str, int]) -> None:
        try:
            kept, new = self.areas.prepare(memfds)
        except MemoryLimitError as error:
            self.answer(PrepareFailed(reason=str(error)))
            return
        if new:
            self._give_keeper(new)
        self.answer(Prepared(names=tuple(memfds), kept=tuple(kept)))

    def _start(self, start: StartAttempt) -> None:
        if self.crew is not None and not self.crew.all_ended:
            self.report(Refused(reason=f"attempt {self.crew.attempt} still has workers"))
            return
        if self.crew is not None:
            self.crew.close()
        self._kill_strays()
        self._early.clear()
        around = Surroundings(
            loop=self.loop,
            local_dir=self.folder,
            area_fd=self.areas.fd,
            control_fd=self._control_fd,
            report=self.report,
            to_zygote=self._to_zygote,
            to_keeper=self._to_keeper,
            kill_zygote=self._zygote.renew,
            looked=self._control.looked,
            node_env=self.spec.node_env,
        )
        self.crew = Crew(around, start)
        if not start.rendezvous:
            self.crew.launch({}, None)
        elif start.meet is not None:
            self.crew.launch({"host": start.meet[0], "port": start.meet[1]}, None)
        else:
            self._open_meeting(self.crew)

    def _open_meeting(self, crew: Crew) -> None:
        """Bound here and handed to rank 0 as a descriptor: nobody can take the port in between. A program that cannot take it
        is told of a port that is free now."""
        if crew.start.ports is not None:
            try:
                port = free_port(self.spec.host, crew.start.ports, start=os.getpid() + crew.attempt)
            except OSError as error:
                crew.not_launched(str(error))
                return
            crew.launch({"host": self.spec.host, "port": port}, None)
        else:
            with socket.create_server((self.spec.host, 0), backlog=4096) as listener:
                port = listener.getsockname()[1]
                crew.launch({"host": self.spec.host, "port": port}, listener.fileno())
        if self.spec.control:
            self.report(Meeting(attempt=crew.attempt, host=self.spec.host, port=port))

    def _stop_workers(self, reason: str, grace_s: float) -> None:
        crew = self.crew
        if crew is None or crew.all_ended:
            return
        if grace_s <= 0:
            crew.stop(signal.SIGKILL, reason)
            return
        crew.stop(signal.SIGTERM, reason)
        self.loop.after(grace_s, lambda: crew.stop(signal.SIGKILL, reason))


def main(argv: Sequence[str]) -> int:
    """Run the agent of this node."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    spec = msgspec.json.decode(Path(argv[0]).read_bytes(), type=AgentSpec)
    held = lock_soon(Path(spec.local_dir))
    if held is None:
        log.error("another agent already serves %s", spec.local_dir)
        return ExitCode.HELD
    become_subreaper()
    write_record(spec)
    status = Agent(spec, Loop()).run()
    paths.agent_record(Path(spec.local_dir)).unlink(missing_ok=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
