"""A drill: the same run twice, once left alone and once under fire, and the proof that nobody can tell from the result.

The unbroken run goes first, for half of the time. Then the other one runs under the real supervisor, started by the very
command a person would type, while its processes are struck at random; a run that ends too early is started again, as a person
would. It is stopped once all strikes are over and a checkpoint is committed of a step finished after the last of them and the
last recovery: an earlier one would say nothing about them. The digests of both runs there, recomputed from what lies in
storage, must be equal. If the unbroken run did not get as far, it is made anew, from its beginning: resumed it would not be
unbroken.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ftrain.compose.course import LEAST_PATIENCE_S, Course
from ftrain.compose.errors import RefusedError
from ftrain.compose.fire import Fire, under_fire
from ftrain.compose.ledgers import read_ledger
from ftrain.compose.paths import local_dir_of
from ftrain.compose.proof import first_seam, same_training, seam_proofs, stored_digests
from ftrain.compose.strikes import TABLE_5, Struck, confusion, inside, last_checkpoints, match, plan
from ftrain.config import Config, Fault
from recovery.codes import ExitCode
from recovery.events import Event
from recovery.owner import claim
from recovery.report import InterruptionRow, report

PATIENCE = 6.0  # times the expected time, until a drill is called failed

Say = Callable[[str], None]


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
    broken = Course(variant(config, folder / COURSES[1], inside(strikes)), folder)
    planned = f"{len(strikes)} {'strike' if len(strikes) == 1 else 'strikes'} planned"
    say(f"the run under fire, to a checkpoint after the last strike: {planned}; the unbroken run got to step {step}")
    fire = Fire(broken, strikes, say)
    limit_s = max(LEAST_PATIENCE_S, PATIENCE * half_s)
    compared = under_fire(broken, fire, limit_s)
    if compared not in unbroken.committed:
        say(f"the unbroken run, anew, to the checkpoint of step {compared}")
        shutil.rmtree(unbroken.url)
        unbroken = Course(unbroken.config, folder)
        unbroken.run_alone(limit_s, compared)
    return _compare(unbroken, broken, compared, fire.struck)


def variant(config: Config, url: Path, faults: tuple[Fault, ...] = ()) -> Config:
    """The config for a drill: as many steps as there is time for, all checkpoints kept, hangs found soon.

    Nothing outside the drill's folder is touched, and nobody called: no mirror and no local tier of the real run, whose history
    it would take for its own, no folder and no port that a live run of this config meets its nodes at.
    """
    recovery = replace(
        config.recovery,
        hang_s=min(config.recovery.hang_s, 10.0),
        hang_floor_s=5.0,
        backoff_s=0.1,
        notice="",
        webhook="",
        metrics_port=0,
        corruption="report",
        quarantine_s=15.0,
        quarantine_max_s=15.0,
        layout_hold_s=5.0,
    )
    return replace(
        config,
        run=replace(config.run, url=str(url), local_dir="", steps=max(config.run.steps, 1_000_000)),
        checkpoint=replace(config.checkpoint, retention=(), mirror_url="", local_url="", local_every_steps=0),
        machine=replace(config.machine, shared_dir="", port=0),
        slurm=replace(config.slurm, requeue=False),
        recovery=recovery,
        faults=faults,
    )


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
