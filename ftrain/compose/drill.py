"""A drill: the same run twice, once left alone and once under fire, and the proof that nobody can tell from the result.

The unbroken run goes first, for half of the time. Then the other one runs under the real supervisor, started by the very
command a person would type, while its processes are struck at random; a run that ends too early is started again, as a person
would. It is stopped once all strikes are over and a checkpoint is committed of a step finished after the last of them and the
last recovery: an earlier one would say nothing about them. The digests of both runs there, recomputed from what lies in
storage, must be equal. If the unbroken run did not get as far, it is made anew, from its beginning: resumed it would not be
unbroken.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ftrain.compose.errors import RefusedError
from ftrain.compose.ledgers import LedgerTail, read_ledger
from ftrain.compose.outage import begin_outage, end_outage
from ftrain.compose.paths import local_dir_of
from ftrain.compose.proof import first_seam, same_training, seam_proofs, stored_digests
from ftrain.compose.strikes import (
    BY_NAME,
    TABLE_5,
    Strike,
    Struck,
    confusion,
    inside,
    last_checkpoints,
    match,
    named,
    plan,
    provable,
)
from ftrain.compose.victims import damage, victim
from ftrain.config import Config, Fault
from ftrain.load import to_toml
from recovery.client import NotRunningError, ask
from recovery.codes import ExitCode
from recovery.events import CheckpointCommitted, Event, steps_of
from recovery.launch import python
from recovery.owner import claim
from recovery.report import InterruptionRow, report

POLL_S = 0.05
PATIENCE = 6.0  # times the expected time, until a drill is called failed
LEAST_PATIENCE_S = 180.0
RESTARTS = 40
OUTAGE_S = 3.0

Say = Callable[[str], None]


class DrillError(RuntimeError):
    """The drill could not be carried out; what it leaves is in its folder."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of a drill."""

    step: int
    equal: bool
    covered: int
    """Strikes that the compared checkpoint comes after; with none of them, equal proves nothing."""
    different: tuple[str, ...]
    seams: int
    """Changes of layout. If there were any, equal means: digests at each, bit for bit up to the first, the same tokens."""
    struck: list[Struck]
    unexplained: list[InterruptionRow]
    confusion: dict[str, dict[str, int]]
    restarts: int
    effective_time: float

    @property
    def good(self) -> bool:
        """The state after the strikes is the unbroken run's, and every strike was taken for what it was."""
        return self.equal and self.covered > 0 and not self.unexplained and all(strike.right for strike in self.struck)


COURSES = ("unbroken", "broken")
OWN = {f"{name}{ending}" for name in COURSES for ending in ("", ".toml", ".log")}
"""What a drill leaves in its folder."""


class Orders(Struct, frozen=True, kw_only=True):
    """How to drill."""

    minutes: float
    mean_gap_s: float
    kinds: tuple[str, ...]
    seed: int = 0
    table_5: bool = False


def _clear(folder: Path) -> None:
    """Remove what an earlier drill left, and nothing else: a folder may be anybody's. HeldError if one is going on there."""
    if not folder.exists():
        return
    strange = sorted({path.name for path in folder.iterdir()} - OWN) if folder.is_dir() else [folder.name]
    if strange:
        what = f"{folder} holds what no drill has left there: {', '.join(strange[:3])}"
        raise RefusedError([f"{what}; a drill begins in an empty folder: give --folder another, or remove it"])
    for name in COURSES:
        local = local_dir_of(str(folder / name))
        if local.exists():
            claim(local).release()
    shutil.rmtree(folder)


def drill(config: Config, folder: Path, orders: Orders, say: Say) -> Outcome:
    """Carry out a drill in `folder`, in place of an earlier one. Raises DrillError; RefusedError for anybody else's folder."""
    _clear(folder)
    folder.mkdir(parents=True)
    half_s = orders.minutes * 30.0
    unbroken = Course(variant(config, folder / COURSES[0]), folder)
    say(f"the unbroken run, for {half_s:.0f} s")
    step = unbroken.run_alone(half_s)
    strikes = plan(
        orders.kinds,
        seed=orders.seed,
        seconds=half_s,
        mean_gap_s=orders.mean_gap_s,
        ranks=config.parallel.ranks,
        weights=TABLE_5 if orders.table_5 else None,
    )
    faults = inside(strikes, steps=step, seconds=half_s)
    broken = Course(variant(config, folder / COURSES[1], faults), folder)
    planned = f"{len(strikes)} {'strike' if len(strikes) == 1 else 'strikes'} planned"
    say(f"the run under fire, to a checkpoint after the last strike: {planned}; the unbroken run got to step {step}")
    fire = Fire(broken, [strike for strike in strikes if BY_NAME[strike.kind].target != "inside"], say)
    limit_s = max(LEAST_PATIENCE_S, PATIENCE * half_s)
    compared = broken.run_until(min(step, _after_all(faults)), limit_s, fire)
    if compared not in unbroken.committed:
        say(f"the unbroken run, anew, to the checkpoint of step {compared}")
        shutil.rmtree(unbroken.url)
        unbroken = Course(unbroken.config, folder)
        unbroken.run_alone(limit_s, compared)
    return _compare(unbroken, broken, compared, [*fire.struck, *fired(broken)])


def _after_all(faults: Sequence[Fault]) -> int:
    """A step that is only finished once workers have made these on themselves."""
    return 1 + max((fault.step for fault in faults), default=0)


def variant(config: Config, url: Path, faults: tuple[Fault, ...] = ()) -> Config:
    """The config for a drill: as many steps as there is time for, all checkpoints kept, hangs found soon."""
    recovery = replace(
        config.recovery,
        hang_s=min(config.recovery.hang_s, 10.0),
        hang_floor_s=5.0,
        backoff_s=0.1,
        notice="",
        corruption="report",
        quarantine_s=15.0,
        quarantine_max_s=15.0,
        layout_hold_s=5.0,
    )
    return replace(
        config,
        run=replace(config.run, url=str(url), local_dir="", steps=max(config.run.steps, 1_000_000)),
        checkpoint=replace(config.checkpoint, retention=()),
        recovery=recovery,
        faults=faults,
    )


class Course:
    """One of the two runs, as a person would start and stop it."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.url = config, Path(config.run.url)
        self.local = self.url / "local"
        self._toml = folder / f"{self.url.name}.toml"
        self._toml.write_text(to_toml(config))
        self._log = folder / f"{self.url.name}.log"
        self._tail = LedgerTail(self.local / "ledger", from_start=True)
        self._every = config.checkpoint.every_steps
        self.parent = 0
        """Pid of `ftrain run`."""
        self.told: list[Event] = []
        self.committed: list[int] = []
        self.step = 0
        self.restarts = 0
        self._since, self._newer = 0.0, 0

    @contextlib.contextmanager
    def _running(self) -> Iterator[subprocess.Popen[bytes]]:
        """The run, which does not outlive its drill."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                python("ftrain.cli.entry", "run", str(self._toml)), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.parent = process.pid
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.config.recovery.stop_s + 30.0)

    def look(self) -> None:
        """What the ledger says that is new."""
        for event in self._tail.new():
            self.told.append(event)
            if isinstance(event, CheckpointCommitted) and event.step % self._every == 0:
                self.committed.append(event.step)
            for record in steps_of(event):
                self._newer += record.step > self.step and record.t_end > self._since
                self.step = max(self.step, record.step)

    def watch(self, since: float) -> None:
        """From now on `goes_on` is about what comes after `since` (wall clock), and after what it was about before."""
        self._since, self._newer = max(self._since, since), 0

    @property
    def goes_on(self) -> bool:
        """Whether new steps have ended since then, and not only one, which may have been all but finished. When they are told
        of says nothing: reports of earlier ones may still be on their way.
        """
        return self._newer > 1

    def run_alone(self, seconds: float, until: int | None = None) -> int:
        """Undisturbed, for a while and at least until there is a checkpoint, or just until that of step `until`; its step."""
        with self._running() as process:
            deadline = time.monotonic() + LEAST_PATIENCE_S + seconds
            began: float | None = None  # the time counts from the first step
            while until not in self.committed and (
                until is not None or not self.committed or began is None or time.monotonic() - began <= seconds
            ):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise DrillError(f"the unbroken run ends or does not get to a checkpoint; see {self._log}")
                time.sleep(POLL_S)
                self.look()
                began = time.monotonic() if began is None and self.step else began
        self.look()
        return self.committed[-1]

    def run_until(self, step: int, limit_s: float, fire: Fire) -> int:
        """Until `fire` is over and a checkpoint from `step` on comes after it all; started again whenever it ends before.

        The step of that checkpoint.
        """
        deadline = time.monotonic() + limit_s
        while True:
            with self._running() as process:
                while process.poll() is None:
                    self.look()
                    found = self.provable([*fire.struck, *fired(self)], step) if fire.tick() else None
                    if found is not None:
                        return found
                    if time.monotonic() > deadline:
                        reached = f"no checkpoint from step {step} on was committed after the last strike"
                        raise DrillError(f"{reached} within {limit_s:.0f} s; see {self._log}")
                    time.sleep(POLL_S)
            self.restarts += 1
            if self.restarts > RESTARTS:
                raise DrillError(f"the run under fire ended {self.restarts} times; see {self._log}")

    def provable(self, struck: Sequence[Struck], least: int) -> int | None:
        """The first checkpoint, from step `least` on, that comes after all of these and the last recovery; None: not yet."""
        return provable(last_checkpoints(self.told, self._every), struck, least)

    def status(self) -> dict[str, Any] | None:
        """What the live coordinator says; None if there is none."""
        with contextlib.suppress(NotRunningError, ValueError, OSError):
            return ask(self.local, "status")
        return None


class Fire:
    """Strikes in their order, each only after the run has made new progress since the last."""

    def __init__(self, course: Course, strikes: Sequence[Strike], say: Say) -> None:
        self.struck: list[Struck] = []
        self._course, self._left, self._say = course, list(strikes), say
        self._began: float | None = None
        self._outage_ends = 0.0  # on the monotonic clock; 0: there is none
        self._fired = 0

    def tick(self) -> bool:
        """Strike if it is time; whether nothing is left to do and the run has recovered from the last."""
        course = self._course
        if self._is_out():
            return False
        if self._began is None and course.step:
            self._began = time.monotonic()
        self._watch_fired()
        recovered = course.goes_on
        if not self._left:
            return recovered
        due = self._began is not None and time.monotonic() - self._began >= self._left[0].after_s
        if course.committed and recovered and (due or self._is_late()):
            self._strike(self._left[0])
        return False

    def _watch_fired(self) -> None:
        """What a worker has done to itself is a strike like any other: a hang that nobody has found yet would be ended, and so
        hidden, by the next one.
        """
        made = fired(self._course)
        if len(made) > self._fired:
            self._fired = len(made)
            self._course.watch(max(strike.t for strike in made))

    def _is_out(self) -> bool:
        """Whether storage cannot be written to; the outage is ended when it is time."""
        if self._outage_ends and time.monotonic() >= self._outage_ends:
            end_outage(self._course.url / "checkpoints")
            self._outage_ends = 0.0
        return self._outage_ends > 0

    def _is_late(self) -> bool:
        """The end is near: what is left is dealt out now, one after the other."""
        return self._began is not None and time.monotonic() - self._began >= self._left[-1].after_s

    def _strike(self, strike: Strike) -> None:
        kind = BY_NAME[strike.kind]
        status = self._course.status()
        pid = victim(self._course.local, kind.target, strike.rank, status) if status else None
        pid = self._course.parent if kind.target in ("parent", "store") else pid
        spared = kind.what == "damage" and len(set(self._course.committed)) < 2  # there must be one to go back to
        if status is None or status["phase"] != "running" or not pid or spared:
            return  # not now: tried again at the next tick
        self._left.pop(0)
        if kind.what == "damage":
            newest = max(self._course.committed)
            damage(self._course.url, newest)
            self._course.committed = [step for step in self._course.committed if step < newest]  # it will be committed anew
        now = time.time()
        if kind.target == "store":
            begin_outage(self._course.url / "checkpoints")
            self._outage_ends = time.monotonic() + OUTAGE_S
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kind.what == "damage" else signal.Signals[kind.what])
        rank = strike.rank if kind.target == "worker" else None
        self._course.watch(now)
        self.struck.append(Struck(kind=strike.kind, t=now, pid=pid, rank=rank, step=self._course.step))
        self._say(f"  step {self._course.step}: {strike.kind}" + ("" if rank is None else f", rank {rank}"))


def fired(course: Course) -> list[Struck]:
    """What workers did to themselves, by the markers that they left (`ftrain.faults`)."""
    found: list[Struck] = []
    for number, fault in enumerate(course.config.faults):
        marker = course.local / "faults" / f"fault-{number}"
        if marker.exists():
            t = marker.stat().st_mtime
            found.append(Struck(kind=named(fault), t=t, pid=0, rank=fault.rank, step=fault.step))
    return found


def _compare(unbroken: Course, broken: Course, step: int, strikes: Sequence[Struck]) -> Outcome:
    expected, found = stored_digests(str(unbroken.url), step)[1], stored_digests(str(broken.url), step)[1]
    told: list[Event] = [*read_ledger(str(broken.url))]
    at = last_checkpoints(told, broken.config.checkpoint.every_steps).get(step, 0.0)
    made = report(told)
    struck, unexplained = match(strikes, made.interruptions)
    names = sorted(expected.keys() | found.keys())
    different = tuple(name for name in names if expected.get(name) != found.get(name))
    seams = seam_proofs(told)
    proved = all(seams) and same_training([*read_ledger(str(unbroken.url))], told, step, first_seam(told))
    same = proved if seams else not different
    return Outcome(
        step=step,
        equal=same,
        covered=sum(strike.t < at for strike in strikes),
        different=different if not same else (),
        seams=len(seams),
        struck=struck,
        unexplained=unexplained,
        confusion=confusion(struck),
        restarts=broken.restarts,
        effective_time=made.effective_time,
    )


EXIT = {True: ExitCode.DONE, False: ExitCode.DAMAGED}
