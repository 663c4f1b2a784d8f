"""The supervised side of somebody else's run: a command, once or once per rank, of which nothing is known but what it says.

It says how it ended (its exit status), what it wrote (its logs), and if it likes what step it has finished: through
`ftrain.progress`, or in lines that a pattern finds. Its state is its own business: it is started again as it was, and goes on
from whatever it saved itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ftrain.compose.command_launch import CommandLaunch, environment
from ftrain.compose.command_leave import Leave
from ftrain.compose.command_nodes import CommandNodes
from ftrain.compose.endwatch import EndWatch
from ftrain.compose.nodes import node_dir
from ftrain.compose.patterns import LogTail, Seen, compiled, seen_in
from ftrain.supervised import Leaving, StateLoaded, StateStored, StepTold, Told, decode_told
from recovery import events, paths
from recovery.command import COMMAND, CommandArgs
from recovery.delegate import AttemptEndInfo, AttemptPlan, Delegate, Links
from recovery.events import Event
from recovery.files import replace_file
from recovery.heartbeat import Beat
from recovery.messages import WorkerSpec
from recovery.owner import this_process
from recovery.places import Place
from recovery.state import RunState

OUTPUT = "output"
AS_STARTED = (
    "a script runs with the processes it was started with, for how it cuts its work is its own affair: `ftrain stop` it, and "
    "start it again by `ftrain supervise` with another --nproc or --nnodes"
)


class CommandDelegate(Delegate):
    """Plans attempts of a command and turns what it says into events. Used by the coordinator's one thread."""

    def __init__(self, launch: CommandLaunch, folder: Path, endwatch: EndWatch) -> None:
        self._launch, self._folder, self._endwatch = launch, folder, endwatch
        self._nodes = CommandNodes(launch)
        self._leave = Leave(lambda rank, payload: self.links.to_worker(rank, payload))
        self._running = False
        self._patterns = compiled(launch.patterns)
        self._links: Links | None = None
        self._epoch = 0
        self._attempt = -1
        self._committed = 0  # the newest step that is known to be stored
        self._teller: int | None = None  # the rank whose steps are the run's
        self._ready = False
        self._step, self._step_t = 0, 0.0
        self._looked = 0.0  # when the logs were read last
        self._speaks = False  # whether the script uses ftrain.progress, and so sees a request to stop
        self._stop_asked = 0.0
        self._terminated = False
        self._tails: dict[int, LogTail] = {}
        self._last: dict[int, Beat] = {}

    @property
    def epoch(self) -> int:
        """Counts the coordinators of this run."""
        return self._epoch

    @property
    def links(self) -> Links:
        """What may be done to the run."""
        assert self._links is not None, "begin comes first"
        return self._links

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
            config={"command": list(self._launch.argv), "nproc": self._launch.nproc, "nnodes": self._launch.nnodes},
            layout=self._nodes.layout(),
            owner=msgspec.to_builtins(this_process()),
            epoch=self._epoch,
            readopted=resumed,
        )
        return [started, events.EpochTaken(t=now, epoch=self._epoch)]

    def recall(self, state: RunState) -> None:
        """Which nodes an earlier attempt had: their ranks stay where they were, if they can. And what is stored."""
        self._committed = state.committed_step or 0
        self._nodes.adopt(state.nodes, running=False)

    def plan_attempt(self, attempt: int, previous: AttemptEndInfo | None) -> AttemptPlan:
        """The command once more, to meet on a port that no earlier attempt has used."""
        launch, decided = self._launch, self._nodes.settle(self.links.places())
        self._begin_attempt(attempt)
        arguments = msgspec.to_builtins(
            CommandArgs(
                argv=launch.argv,
                cwd=launch.cwd,
                environment={"OPENBLAS_NUM_THREADS": launch.openblas_threads},
                several_nodes=launch.nnodes > 0,
            )
        )
        workers = tuple(
            WorkerSpec(rank=rank, entry=COMMAND, args=arguments, env=environment(launch, rank, self._nodes.count, attempt))
            for rank in range(self._nodes.ranks)
        )
        return AttemptPlan(
            layout=self._nodes.layout(),
            workers=workers,
            source="storage" if attempt else "init",
            memfds={},
            rendezvous=launch.nproc > 0,
            ports=launch.ports,
            decided=tuple(decided),
        )

    def _begin_attempt(self, attempt: int) -> None:
        self._attempt, self._teller, self._ready, self._running = attempt, None, False, True
        self._step, self._step_t = 0, time.time()
        self._looked = self._step_t
        self._leave.begin(range(self._nodes.ranks))
        watched = self._patterns or self._launch.output_is_progress
        self._tails = {rank: LogTail(self._log(rank)) for rank in range(self._nodes.ranks)} if watched else {}
        self._last = {}

    def _log(self, rank: int) -> Path:
        place = self._nodes.place_of(rank)
        folder = self._folder if place is None else node_dir(self._folder, place.node)
        return paths.rank_log(folder, self._attempt, rank)

    # -- nodes -----------------------------------------------------------------------------------------------------------

    def num_nodes(self) -> int:
        """All that were asked for, or what the run has come down to."""
        return self._nodes.count

    def place_of(self, rank: int) -> Place | None:
        """The node of a rank; None on one machine."""
        return self._nodes.place_of(rank)

    def choose_layout(self, places: Sequence[Place], why: str) -> Sequence[Event]:
        """Other nodes, or fewer, or more again. A script that runs is moved only if it can be asked to save and leave."""
        if not self._launch.nnodes:
            raise ValueError(AS_STARTED)
        moves = self._running and self._nodes.moves(places)
        if moves and not self._speaks:
            raise ValueError(
                "a script that does not call ftrain.progress cannot be asked to leave: it moves when it next restarts"
            )
        chosen = self._nodes.choose(places, why)
        if moves:
            self._leave.ask()
        return chosen

    def resize(self, args: Mapping[str, Any], places: Sequence[Place]) -> Sequence[Event]:
        """How a script is cut is known to it alone."""
        raise ValueError(AS_STARTED)

    def on_adopted(self, attempt: int, memo: bytes) -> Sequence[Event]:
        """An earlier coordinator's processes run on: their logs are read again from the start; steps told twice are known."""
        self._nodes.adopt(self._nodes.chosen, running=True)
        self._begin_attempt(attempt)
        self._ready = True
        return ()

    # -- what the script says --------------------------------------------------------------------------------------------

    def on_worker(self, rank: int, attempt: int, payload: bytes) -> Sequence[Event]:
        """One message of ftrain.progress or ftrain.Checkpointer."""
        told: Told = decode_told(payload)
        if attempt != self._attempt:
            return ()
        if isinstance(told, StateStored):
            return self._on_stored(told)
        if isinstance(told, Leaving):
            self._leave.on_leaving(rank, told)
            return ()
        if isinstance(told, StepTold):
            self._speaks = True
            self._leave.on_step(told)
        if rank != self._tells(rank):
            return ()
        if isinstance(told, StateLoaded):
            return [*self._found(told), *self._is_ready(told.step, told.t)]
        return self._on_step(told)

    def _found(self, told: StateLoaded) -> list[Event]:
        """Checkpoints that were committed when their rank was dead, so that nobody could say so."""
        if self._attempt == 0:
            self._committed = max(self._committed, told.step)  # what was there before this run is not its own
        fresh = [(step, writer, nbytes) for step, writer, nbytes in told.stored if step > self._committed]
        return [
            events.CheckpointCommitted(t=told.t, attempt=writer, step=step, nbytes=nbytes) for step, writer, nbytes in fresh
        ]

    def _tells(self, rank: int) -> int:
        """One rank's steps are the run's: the first that speaks, and rank 0 as soon as it does."""
        if self._teller is None or rank == 0:
            self._teller = rank
        return self._teller

    def _on_step(self, told: StepTold) -> list[Event]:
        if told.step < 1 or (self._ready and told.step <= self._step):
            return []
        found = self._is_ready(told.step - 1, told.t_end, assumed=True)
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

    def _is_ready(self, step: int, t: float, *, assumed: bool = False) -> list[Event]:
        if self._ready:
            return []
        self._ready, self._step, self._step_t = True, step, t
        return [events.Ready(t=t, attempt=self._attempt, step=step, assumed=assumed)]

    def _on_stored(self, told: StateStored) -> list[Event]:
        if told.error:
            return [events.CheckpointFailed(t=told.t, attempt=self._attempt, step=told.step, reason=told.error)]
        return [
            events.CheckpointCommitted(
                t=told.t, attempt=self._attempt, step=told.step, nbytes=told.nbytes, seconds=told.seconds
            )
        ]

    def tick(self, now: float) -> Sequence[Event]:
        """Read the logs, and end a script that was asked to stop and cannot know it; look whether the machine is taken away."""
        self._leave.tick(now)
        if self._stop_asked:
            self._terminate(now)
        return [*self._endwatch.tick(now, self.links.request_stop), *self._read_logs(now)]

    def on_event(self, event: Event) -> None:
        """Of the ledger, right after it was written."""
        self._endwatch.on_event(event)
        if isinstance(event, events.StopRequested):
            self._stop_asked = self._stop_asked or time.time()
            self._leave.ask()
        elif isinstance(event, events.AttemptEnded):
            self._running = False
        elif isinstance(event, events.CheckpointCommitted):
            self._committed = event.step
        elif isinstance(event, events.ProcessDied) and self._tails:
            self.links.wake()  # what it wrote last is read at once, before anybody judges how far it came

    def _read_logs(self, now: float) -> list[Event]:
        found: list[Event] = []
        for rank, tail in self._tails.items():
            seen = [one for line in tail.lines() if (one := seen_in(line, self._patterns)) is not None]
            for one, t in zip(seen, self._times(seen, now), strict=True):
                found += self._saw(rank, one, t)
        self._looked = now
        return found

    def _times(self, seen: Sequence[Seen], now: float) -> list[float]:
        """When the steps of one look were finished: evenly spread since the step before or, if these are the first, since the
        look before, and the process's start was one. Steps that all end at once would have taken no time.
        """
        if not seen:
            return []
        before, since = (self._step, self._step_t) if self._ready else (seen[0].step - 1, self._looked)
        last = seen[-1].step
        shares = ((last - one.step) / (last - before) if before < one.step < last else 0.0 for one in seen)
        return [now - share * max(0.0, now - since) for share in shares]

    def _saw(self, rank: int, seen: Seen, t: float) -> list[Event]:
        before = self._last.get(rank)
        if before is None or seen.step > before.step:
            self._last[rank] = Beat(rank=rank, attempt=self._attempt, step=seen.step, phase="step", count=1, t=time.monotonic())
        if rank != self._tells(rank):
            return []
        told = StepTold(step=seen.step, t_begin=self._step_t, t_end=t, loss=seen.loss, tokens=seen.tokens)
        return self._on_step(told)

    def beats(self, beats: Sequence[Beat]) -> Sequence[Beat]:
        """With what the logs say of ranks that do not report themselves. A rank that says nothing at all moves with the others:
        it takes part in their collectives, and if they stand still, so does it."""
        known = {beat.rank: beat for beat in [*self._logged(), *beats]}
        newest = max(known.values(), key=lambda beat: beat.step, default=None)
        if newest is not None:
            ranks = range(self._nodes.ranks)
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

    def _terminate(self, now: float) -> None:
        """A script that uses ftrain.progress sees a stop itself and gets half of the time for that."""
        grace_s = self._launch.stop_s / 2
        if not self._terminated and (not self._speaks or now - self._stop_asked > grace_s):
            self._terminated = True
            self.links.stop_workers("a stop was asked for", grace_s)

    def on_keeper(self, payload: bytes) -> Sequence[Event]:
        """There is no keeper: a script's checkpoints are its own."""
        return ()

    def on_agent_lost(self) -> Sequence[Event]:
        """Nothing of the run was in its memory."""
        return ()

    def at_end(self) -> bool:
        """Whether ranks that left with 0 were done: unless they made way for another choice of nodes."""
        return not self._leave.left(self._step)

    def ends_when_stopped(self) -> bool:
        """A script without ftrain.progress knows nothing of a stop; any other is ended too when it does not heed it."""
        return self._terminated or not self._speaks

    def finished(self) -> bool:
        """All ranks have left with 0, so it has: unless it was asked to stop."""
        return not self._stop_asked

    def cannot_save(self) -> str:
        """What it saves, and when, is the script's own affair."""
        return "a script saves when it decides to; `ftrain stop` asks one that uses ftrain.progress to save and leave"

    def status(self) -> dict[str, Any]:
        """The command."""
        logs = self._log(0).parent.parent
        return {"command": list(self._launch.argv), "nproc": self._launch.nproc, "logs": str(logs)}

    def close(self) -> None:
        """Look out for nothing any more."""
        self._endwatch.close()
