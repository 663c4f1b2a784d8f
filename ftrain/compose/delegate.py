"""The supervised side of a run: plans attempts, gathers packs into commits, and knows when the run is done.

Lives in the coordinator's process, so it imports no torch: layouts are computed by the pure half of
`ftrain.parallel`, and everything that touches storage after the start is a job of the committer's thread.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ftrain.checkpoint.messages import (
    Doubt,
    Ready,
    Resend,
    SaveSkipped,
    SnapshotTaken,
    StepDone,
    StepTimes,
    Traced,
    decode_worker,
    encode,
)
from ftrain.compose.args import Launch, Memo
from ftrain.compose.committer import Committer
from ftrain.compose.debts import Group
from ftrain.compose.doubts import Back, go_back
from ftrain.compose.endwatch import EndWatch
from ftrain.compose.errand import Errand, outage_waits, patiently
from ftrain.compose.metrics import MetricsFile
from ftrain.compose.phasing import phase_status
from ftrain.compose.skips import before_skip
from ftrain.compose.speed import Speed
from ftrain.compose.steps import config_changes, passed_over, step_events, step_status
from ftrain.compose.storing import StoringDelegate
from ftrain.config import Config
from recovery import events
from recovery.delegate import AttemptEndInfo, AttemptPlan, Links
from recovery.events import Event
from recovery.owner import this_process
from recovery.state import RunState
from storage.epoch import read_epochs
from storage.retention import RetentionPolicy
from storage.run import RunStore


class RunDelegate(StoringDelegate):
    """Composes storage, recovery and the engine into one run. Used by the coordinator's one thread."""

    def __init__(
        self,
        launch: Launch,
        config: Config,
        run: RunStore,
        *,
        folder: Path,
        policies: Sequence[RetentionPolicy],
        endwatch: EndWatch,
    ) -> None:
        super().__init__(launch, config, run, folder, policies)
        self._policies, self._endwatch = policies, endwatch
        self._metrics = MetricsFile(self._local)
        self._speed = Speed()
        self._links: Links | None = None
        self._going_back: Errand[Back] | None = None
        self._given_up: tuple[str, ...] = ()  # areas that the next attempt must do without
        self._distrusted: int | None = None  # the older checkpoint that the newest attempt was to begin with instead
        self._planned: int | None = None  # newest commit when the newest attempt was planned
        self._taken: dict[Group, set[int]] = defaultdict(set)
        self._ready: dict[int, dict[int, Ready]] = defaultdict(dict)
        self._last_step: StepDone | None = None
        self._told: list[Event] = []  # for the next tick

    @property
    def epoch(self) -> int:
        """The epoch taken by `begin`."""
        return self._epoch

    @property
    def links(self) -> Links:
        """What may be done to the run."""
        assert self._links is not None, "begin comes first"
        return self._links

    def begin(self, links: Links, *, resumed: bool) -> Sequence[Event]:
        """Take the epoch that starts from the newest commit; a coordinator that takes over goes on from there, and waits for
        storage that is away as long as its workers can.
        """
        self._links, self._takes_over = links, resumed
        return patiently(partial(self._begin, links, resumed), outage_waits(self._config) if resumed else (0.0, 0.0, 0))

    def _begin(self, links: Links, resumed: bool) -> Sequence[Event]:
        launch, infos = self._launch, self._run.checkpoints()
        newest = self._run.open() if any(info.state in ("valid", "damaged") for info in infos) else None
        self._committed = self._planned = newest.step if newest else None
        self._settled = {(info.attempt, info.step) for info in infos if info.state == "valid"}
        owner, before = this_process(), read_epochs(self._run.store)
        self._epoch = self._run.take_epoch(owner=msgspec.to_builtins(owner), starts_from=self._committed)
        if newest is not None:
            self._stored = newest.step, newest.progress
            self._phasing.recall(self._layouts.whole, newest.progress)
            self._layouts.resume(self._phasing.of(newest.step))
        grace_s, digests = self._config.checkpoint.grace_s, (self._epoch, newest.manifest.digests) if newest else None
        self._committer = Committer(
            self._run,
            self._policies,
            grace_s=grace_s,
            wake=links.wake,
            digests=digests,
            writers=self._writers,
        )
        self._told += self._places.begin(self._epoch, before, self._committed, links.wake)
        started = events.RunStarted(
            t=time.time(),
            run_id=self._url,
            config_fingerprint=launch.fingerprint,
            config=launch.config,
            layout=self._layouts.text,
            owner=msgspec.to_builtins(owner),
            resumed_from_step=self._committed,
            epoch=self._epoch,
            readopted=resumed,
            origin=f"{launch.origin_url}@{launch.origin_step}" if launch.origin_url and self._committed is None else "",
        )
        taken = events.EpochTaken(t=started.t, epoch=self._epoch, starts_from=self._committed)
        passed = newest.passed_over if newest else []
        return [started, taken, *config_changes(self._local, self._launch), *passed_over(passed)]

    def tell(self, event: Event) -> None:
        """Into the ledger, at the next tick."""
        self._told.append(event)

    def recall(self, state: RunState) -> None:
        """What an earlier coordinator had noted."""
        self._doubts.recall(state.onsets)
        self._distrust()
        self._copies.recall(state.copied)
        if self._takes_over:
            self._done, self._held = state.step, (state.attempt, min(state.snapshot_step, state.step))
        self._phasing.recorded = state.training_phase
        self._phasing.stepped(self._layouts.whole, state.step, sequences=0)
        self._skips = state.skips
        self._told += self._places.pass_over(self._skipped, self._epoch, self._committed)

    def ready(self, previous: AttemptEndInfo | None) -> bool:
        """A run that must go back has its work in storage to do first, however long that is away."""
        if self._going_back is None:
            found, late = [self._doubts.give_up()], self._missed()
            found += [(late, before_skip(late)) if late is not None else None]
            if known := [it for it in found if it is not None]:
                work = partial(go_back, self._run, *min(known))
                self._going_back = Errand(work, wake=self.links.wake, waits=outage_waits(self._config))
        return self._going_back is None or self._going_back.done

    def plan_attempt(self, attempt: int, previous: AttemptEndInfo | None) -> AttemptPlan:
        """The layout that fits the places there are; the workers decide whether the state in memory is new enough."""
        self._forget_unfinished(attempt)
        if previous is not None and not previous.agent_survived:
            self._memory_step = None
        if previous is not None and previous.skips != self._skips:
            self._doubts.forget_from(min(first for first, _ in previous.skips[len(self._skips) :]))
            self._skips = previous.skips
        release = (*self._given_up, *self._went_back())
        self._given_up = ()
        differently = previous.differently if previous is not None else ()
        decided = self._enter_phase(self._memory_step, differently)
        why = f"phase {self._layouts.phase} begins" if decided else "the places that there are"
        decided += self._layouts.choose(self.links.places(), why)
        self._speed.begin(self._layouts.text, self._layouts.phase)
        self._debts.started(attempt, self._epoch)
        self._attempt, own, older = attempt, *self._layouts.started(attempt)
        self._copies.started(self._layouts.copied_nodes)
        if older and not self._layouts.fits:
            release += self._give_up_older()
            older = {}
        self._planned = self._committed
        self._spare(self._planned)
        start = self._start(differently)
        self._distrusted = start.step if (start.step or 0) < (self._committed or 0) else None
        copied = self._copies.reachable({place.node for place in self.links.places()}) if self._memory_step is None else None
        source, restored = (
            self._places.newest(self._memory_step, self._origin[1], copied=copied) if start.nearer else ("storage", start.step)
        )
        return AttemptPlan(
            layout=self._layouts.text,
            workers=self._layouts.workers(self._worker_args(list(own), list(older), start)),
            source=source,
            restored_step=restored or 0,
            memfds={**own, **older},
            release=release,
            rendezvous=self._layouts.ranks > 1,
            decided=tuple(decided),
            memo=self._layouts.memo(self._epoch, attempt, self._skipped),
        )

    def can_do_with_less(self) -> bool:
        """Without the areas of older layouts, if some node has no room for both."""
        self._given_up = self._give_up_older()
        return bool(self._given_up)

    def _give_up_older(self) -> tuple[str, ...]:
        """There is no room for the old layout's areas beside the new one's: the state comes from storage."""
        self._memory_step = None
        self._copies.forget()
        self._debts.clear()
        self._parts.clear()
        return self._layouts.only_own()

    def _went_back(self) -> tuple[str, ...]:
        """If the run has gone back, the memory areas, which are void then."""
        done, self._going_back = self._going_back, None
        if done is None:
            return ()
        back = done.result
        self._memory_step, self._committed, self._epoch, self._stored = None, back.step, back.epoch, None
        self._done, self._held = back.step or 0, None
        self._told += [*self._entered(back.step), *back.told()]
        self._copies.forget()
        self._debts.clear()  # what the keeper had not begun to store goes with the areas, and nobody will say so
        return self._layouts.void()

    def _entered(self, step: int | None) -> list[Event]:
        self._moved.clear()
        self._told += self._places.rolled_back(self._epoch, step or 0)
        return [events.EpochTaken(t=time.time(), epoch=self._epoch, starts_from=step)]

    # -- what workers say ------------------------------------------------------------------------------------------------

    def on_worker(self, rank: int, attempt: int, payload: bytes) -> Sequence[Event]:
        """One report of a worker."""
        message = decode_worker(payload)
        if isinstance(message, StepDone):
            return self._on_step(message, attempt)
        if isinstance(message, SnapshotTaken):
            return self._on_snapshot(message, attempt)
        if isinstance(message, Ready):
            return self._on_ready(message, attempt)
        if isinstance(message, SaveSkipped):
            return self._on_skipped(message, attempt)
        if isinstance(message, Doubt):
            if message.corruption and message.rank is not None and self._config.recovery.corruption == "exclude":
                self.links.leave_out(message.rank, "silent_corruption", message.reason)
            told = self._doubts.on_doubt(message, attempt)
            self._distrust()
            return told
        if isinstance(message, StepTimes | Traced):
            return self._metrics.measured(message, self._layouts.now, attempt)
        self._last.final = message
        if message.outcome == "phase":
            self._layouts.enter(self._phasing.leave(message))
        return []

    def _on_step(self, done: StepDone, attempt: int) -> list[Event]:
        self._last_step, self._done = done, done.step
        self._phasing.stepped(self._layouts.whole, done.step, done.sequences)
        told = step_events(done, attempt)
        self._speed.add(told[0])
        self._moved |= {done.step} if done.applied and done.lr > 0 else set()
        self._metrics.append(done, attempt=attempt, layout=self._layouts.text)
        return [*self._doubts.on_step(done, attempt, self._layouts.text), *told]

    def _on_snapshot(self, taken: SnapshotTaken, attempt: int) -> list[Event]:
        group = (attempt, taken.step)
        self._taken[group].add(taken.rank)
        if taken.upload:
            self._begun.setdefault(group, time.time())
        if len(self._taken[group]) < self._layouts.ranks_of(attempt):
            return []
        del self._taken[group]
        self._memory_attempt, self._memory_step = self._held = attempt, taken.step
        self._copies.taken(attempt, taken.step)
        if attempt == self._attempt:
            self._layouts.snapshot(attempt)
        if taken.upload and group not in self._settled:  # else the keeper and the committer were faster than the last rank
            self._debts.add(group)
        return [events.SnapshotCompleted(t=time.time(), attempt=attempt, step=taken.step)]

    def _on_ready(self, ready: Ready, attempt: int) -> list[Event]:
        found: list[Event] = passed_over(ready.passed_over, attempt) if ready.rank == 0 else []
        self._ready[attempt][ready.rank] = ready
        self._phasing.told(ready.step, ready.begun)
        if len(self._ready[attempt]) == self._layouts.ranks_of(attempt):
            if (self._memory_step or 0) > ready.step:
                self._memory_step = None  # the workers have forgotten it
            self._copies.began_at(ready.step)
            self._done, self._held = ready.step, (attempt, ready.step)
            found += [*self._dropped(attempt, ready.step), *self._rolled_back(ready)]
            self._spare(None)
            found += self._places.resumed_from(self._epoch, ready.step)
            now, source, begun = time.time(), ready.source, tuple(ready.begun)
            found.append(events.Ready(t=now, attempt=attempt, step=ready.step, source=source, proof=ready.proof, begun=begun))
        return found

    def _rolled_back(self, ready: Ready) -> list[Event]:
        """A newer commit than the one the workers could load still counts, until an epoch goes on from the older one.

        One that came after they were started does count: they never tried it, and will come to the same step again.
        """
        if ready.source not in ("storage", "local") or self._planned is None or ready.step >= self._planned:
            return []
        kept = ready.step == self._distrusted  # what is newer does load, but nothing went on from it
        back = go_back(self._run, ready.step + 1, "attempts that began with it brought no new step" if kept else "")
        self._epoch, self._committed = back.epoch, back.step
        return self._entered(back.step)

    def _forget_unfinished(self, attempt: int) -> None:
        """Snapshots that some rank did not live to take will never be whole."""
        self._taken = defaultdict(set, {group: ranks for group, ranks in self._taken.items() if group[0] >= attempt})
        self._last.forget()

    def tick(self, now: float) -> Sequence[Event]:
        """Hand over what the committer has done; leave in time if the machine is taken away."""
        found = [*self._told, *self._endwatch.tick(now, self.links.request_stop), *self._places.tick(self.links.request_stop)]
        self._told.clear()
        if not self._debts.before(self._attempt) and (names := self._layouts.superfluous()):
            self.links.release(names)
        return [*found, *self._outcomes()]

    # -- the rest of the seam ------------------------------------------------------------------------------------------------

    def on_agent_found(self, memo: bytes) -> Sequence[Event]:
        """An earlier coordinator's agent lives: what it stored and nobody committed is asked for again."""
        known = msgspec.msgpack.decode(memo, type=Memo)
        self._layouts.adopt(known)
        self._speed.begin(self._layouts.text, self._layouts.phase)
        self._attempt = known.attempt
        self._debts.started(known.attempt, known.epoch)
        self._given.tell(known.skips)
        self._copies.adopted(self._layouts.copied_nodes)
        self._debts.ask(self._layouts.ring if self._layouts.spread else ("",))
        self.links.to_keeper(encode(Resend()))
        return []

    def on_agent_lost(self) -> Sequence[Event]:
        """The memory tier is not whole any more. What its packs lack in storage, keepers of other nodes may still bring."""
        self._memory_step = None
        self._layouts.agent_lost()
        self._places.agent_lost()
        self._taken.clear()
        self._debts.clear()
        return []

    def status(self) -> dict[str, Any]:
        """For `ftrain status`."""
        return {
            "epoch": self._epoch,
            "layout": self._layouts.text,
            "committed_step": self._committed,
            "memory_step": self._memory_step,
            "peer_step": self._copies.step,
            "steps": self._config.run.steps,
            **phase_status(self._layouts.whole, self._layouts.phase, self._phasing.cursor),
            **step_status(self._last_step),
            "eta_s": self._speed.eta_s(self._layouts.whole, self._phasing.cursor),
            **self._speed.status(),
            **self._metrics.status(self._speed),
            "collect_error": self._committer.collect_error if self._committer else "",
            **self._places.status(),
        }

    def close(self) -> None:
        """Finish what is queued for storage."""
        if self._going_back is not None:
            self._going_back.close()
        if self._committer is not None:
            self._committer.close()
        self._places.close()
        self._endwatch.close()
        self._metrics.close()
