"""The supervised side of somebody else's run: a command, once or once per rank, of which nothing is known but what it says.

It says how it ended (its exit status), what it wrote (its logs), and if it likes what step it has finished: through
`ftrain.progress`, or in lines that a pattern finds. Its state is its own business: it is started again as it was, and goes on
from whatever it saved itself.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.patterns import LogTail, Seen, compiled, seen_in
from ftrain.supervised import StateLoaded, StateStored, StepTold, Told, decode_told
from recovery import events, paths
from recovery.command import COMMAND, CommandArgs
from recovery.delegate import AttemptEndInfo, AttemptPlan, Delegate, Links
from recovery.events import Event
from recovery.files import replace_file
from recovery.heartbeat import Beat
from recovery.messages import WorkerSpec
from recovery.owner import this_process

OUTPUT = "output"
PORTS = range(20_000, 32_000)  # below the kernel's own choices: nobody gets one of them by accident


class CommandLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What `ftrain supervise` wants, as the coordinator reads it at each of its starts. `nproc` 0: one process, which gets no
    variables of a rank. Times in seconds."""

    url: str
    argv: tuple[str, ...]
    cwd: str
    nproc: int = 0
    patterns: tuple[str, ...] = ()
    hang_s: float = 600.0
    start_s: float | None = None
    output_is_progress: bool = False
    stop_s: float = 60.0
    max_restarts: int = 3
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    openblas_threads: str | None = None
    take_over: bool = False
    webhook: str = ""
    command: str = ""

    @property
    def ranks(self) -> int:
        """Processes of an attempt."""
        return max(1, self.nproc)


class CommandDelegate(Delegate):
    """Plans attempts of a command and turns what it says into events. Used by the coordinator's one thread."""

    def __init__(self, launch: CommandLaunch, folder: Path) -> None:
        self._launch, self._folder = launch, folder
        self._patterns = compiled(launch.patterns)
        self._links: Links | None = None
        self._epoch = 0
        self._attempt = -1
        self._teller: int | None = None  # the rank whose steps are the run's
        self._ready = False
        self._step, self._step_t = 0, 0.0
        self._speaks = False  # whether the script uses ftrain.progress, and so sees a request to stop
        self._stop_asked = 0.0
        self._terminated = False
        self._tails: dict[int, LogTail] = {}
        self._last: dict[int, Beat] = {}

    @property
    def epoch(self) -> int:
        """Counts the coordinators of this run."""
        return self._epoch

    def begin(self, links: Links, *, resumed: bool) -> Sequence[Event]:
        """Take the next epoch."""
        self._links = links
        path = self._folder / "epoch"
        self._epoch = 1 + (int(path.read_text()) if path.exists() else 0)
        replace_file(path, str(self._epoch).encode())
        now = time.time()
        started = events.RunStarted(
            t=now,
            run_id=self._launch.url,
            config={"command": list(self._launch.argv), "nproc": self._launch.nproc},
            layout=self._layout(),
            owner=msgspec.to_builtins(this_process()),
            epoch=self._epoch,
            readopted=resumed,
        )
        return [started, events.EpochTaken(t=now, epoch=self._epoch)]

    def _layout(self) -> str:
        launch = self._launch
        program = " ".join(launch.argv[:3])
        return program if launch.nproc == 0 else f"{launch.nproc} x {program}"

    def plan_attempt(self, attempt: int, previous: AttemptEndInfo | None) -> AttemptPlan:
        """The command once more, on a port that no earlier attempt has used."""
        self._begin_attempt(attempt)
        launch = self._launch
        port = launch.master_port or free_port(launch.master_addr, start=os.getpid() + attempt)
        arguments = msgspec.to_builtins(
            CommandArgs(argv=launch.argv, cwd=launch.cwd, environment={"OPENBLAS_NUM_THREADS": launch.openblas_threads})
        )
        workers = tuple(
            WorkerSpec(rank=rank, entry=COMMAND, args=arguments, env=environment(launch, rank, attempt, port))
            for rank in range(launch.ranks)
        )
        return AttemptPlan(
            layout=self._layout(), workers=workers, source="storage" if attempt else "init", memfds={}, rendezvous=False
        )

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt, self._teller, self._ready = attempt, None, False
        self._step, self._step_t = 0, time.time()
        logs = {rank: paths.rank_log(self._folder, attempt, rank) for rank in range(self._launch.ranks)}
        watched = self._patterns or self._launch.output_is_progress
        self._tails = {rank: LogTail(path) for rank, path in logs.items()} if watched else {}
        self._last = {}

    def on_adopted(self, attempt: int, memo: bytes) -> Sequence[Event]:
        """An earlier coordinator's processes run on: their logs are read again from the start; steps told twice are known."""
        self._begin_attempt(attempt)
        self._ready = True
        return ()

    # -- what the script says --------------------------------------------------------------------------------------------

    def on_worker(self, rank: int, attempt: int, payload: bytes) -> Sequence[Event]:
        """One message of ftrain.progress or ftrain.Checkpointer."""
        told: Told = decode_told(payload)
        if attempt != self._attempt:
            return ()
        self._speaks = True
        if isinstance(told, StateStored):
            return self._on_stored(told)
        if rank != self._tells(rank):
            return ()
        if isinstance(told, StateLoaded):
            return self._is_ready(told.step, told.t)
        return self._on_step(told)

    def _tells(self, rank: int) -> int:
        """One rank's steps are the run's: the first that speaks, and rank 0 as soon as it does."""
        if self._teller is None or rank == 0:
            self._teller = rank
        return self._teller

    def _on_step(self, told: StepTold) -> list[Event]:
        if told.step < 1 or (self._ready and told.step <= self._step):
            return []
        found = self._is_ready(told.step - 1, told.t_end)
        begin = told.t_end if found else told.t_begin
        self._step, self._step_t = told.step, told.t_end
        finished = events.StepFinished(
            t=told.t_end,
            attempt=self._attempt,
            step=told.step,
            t_begin=begin,
            t_end=told.t_end,
            blocked_s=min(told.saving_s, max(0.0, told.t_end - begin)),
            loss=told.loss,
            tokens=told.tokens,
        )
        return [*found, finished]

    def _is_ready(self, step: int, t: float) -> list[Event]:
        if self._ready:
            return []
        self._ready, self._step, self._step_t = True, step, t
        return [events.Ready(t=t, attempt=self._attempt, step=step)]

    def _on_stored(self, told: StateStored) -> list[Event]:
        if told.error:
            return [events.CheckpointFailed(t=told.t, attempt=self._attempt, step=told.step, reason=told.error)]
        return [
            events.CheckpointCommitted(
                t=told.t, attempt=self._attempt, step=told.step, nbytes=told.nbytes, seconds=told.seconds
            )
        ]

    def tick(self, now: float) -> Sequence[Event]:
        """Read the logs, and end a script that was asked to stop and cannot know it."""
        if self._stop_asked:
            self._terminate(now)
        return self._read_logs(now)

    def look_again(self) -> None:
        """A process has died: what it wrote last is read at once, before anybody judges how far it came."""
        if self._tails and self._links is not None:
            self._links.wake()

    def _read_logs(self, now: float) -> list[Event]:
        found: list[Event] = []
        for rank, tail in self._tails.items():
            for line in tail.lines():
                seen = seen_in(line, self._patterns)
                if seen is not None:
                    found += self._saw(rank, seen, now)
        return found

    def _saw(self, rank: int, seen: Seen, now: float) -> list[Event]:
        before = self._last.get(rank)
        if before is None or seen.step > before.step:
            self._last[rank] = Beat(rank=rank, attempt=self._attempt, step=seen.step, phase="step", count=1, t=time.monotonic())
        if rank != self._tells(rank):
            return []
        told = StepTold(step=seen.step, t_begin=self._step_t, t_end=now, loss=seen.loss, tokens=seen.tokens)
        return self._on_step(told)

    def beats(self, beats: Sequence[Beat]) -> Sequence[Beat]:
        """With what the logs say of ranks that do not report themselves. A rank that says nothing at all moves with the others:
        it takes part in their collectives, and if they stand still, so does it."""
        known = {beat.rank: beat for beat in [*self._logged(), *beats]}
        newest = max(known.values(), key=lambda beat: beat.step, default=None)
        if newest is not None:
            ranks = range(self._launch.ranks)
            known |= {rank: msgspec.structs.replace(newest, rank=rank) for rank in ranks if rank not in known}
        return tuple(known.values())

    def _logged(self) -> Iterable[Beat]:
        now = time.monotonic()
        if self._launch.output_is_progress:
            for rank, tail in self._tails.items():
                if tail.position:
                    yield Beat(rank=rank, attempt=self._attempt, step=0, phase=OUTPUT, t=tail.grown, age_s=now - tail.grown)
        for beat in self._last.values():
            yield msgspec.structs.replace(beat, age_s=now - beat.t)

    # -- the end ---------------------------------------------------------------------------------------------------------

    def stop_requested(self) -> None:
        """Somebody asked for a stop. A script that uses ftrain.progress sees it itself and gets half of the time for that."""
        self._stop_asked = self._stop_asked or time.time()

    def _terminate(self, now: float) -> None:
        grace_s = self._launch.stop_s / 2
        if not self._terminated and self._links is not None and (not self._speaks or now - self._stop_asked > grace_s):
            self._terminated = True
            self._links.stop_workers("a stop was asked for", grace_s)

    def on_keeper(self, payload: bytes) -> Sequence[Event]:
        """There is no keeper: a script's checkpoints are its own."""
        return ()

    def on_agent_lost(self) -> Sequence[Event]:
        """Nothing of the run was in its memory."""
        return ()

    def finished(self) -> bool:
        """All ranks have left with 0, so it has: unless it was asked to stop."""
        return not self._stop_asked

    def status(self) -> dict[str, Any]:
        """The command."""
        return {"command": list(self._launch.argv), "nproc": self._launch.nproc, "logs": str(self._folder / "logs")}


def environment(launch: CommandLaunch, rank: int, attempt: int, port: int) -> dict[str, str]:
    """What torchrun tells its workers, under the same names; for a single process only what every script may want."""
    always = {"PYTHONUNBUFFERED": "1", "FTRAIN_RUN": launch.url}
    if launch.nproc == 0:
        return always
    world = str(launch.nproc)
    threads = {"OMP_NUM_THREADS": "1"} if launch.nproc > 1 and "OMP_NUM_THREADS" not in os.environ else {}
    return {
        **always,
        **threads,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts),
        "TORCHELASTIC_RUN_ID": launch.url,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def free_port(host: str, *, start: int, bind: Callable[[str, int], bool] | None = None) -> int:
    """A port on which rank 0 can listen when it comes to that. `bind` says whether one is free."""
    free = bind or can_bind
    for number in range(len(PORTS)):
        port = PORTS[(start * 37 + number) % len(PORTS)]
        if free(host, port):
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free on {host}")


def can_bind(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
