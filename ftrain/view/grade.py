"""A run's predictions, graded: what the planner said of its config beside what the run measured, stage by stage.

The error is kept with the run (`grade.json` in its local folder), so that a plan is as trustworthy as its last grades. Its sign
says which assumption was wrong: a step predicted too short the kernel share, a memory too small what was left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ftrain.parallel.shape import SHARD_AXES
from ftrain.plan import cost
from ftrain.plan.ring import Volume
from ftrain.view.measured import Measured, measured
from ftrain.view.numbers import show
from ftrain.view.parts import parts
from ftrain.view.predict import Predicted, predict
from ftrain.view.record import Recorded
from ftrain.view.went import went
from recovery.report_text import table

FILE = "grade.json"
HEAD = ("", "predicted", "measured", "error")
COMPARABLE_BYTES = 1 << 30
"""Planned for a CPU's rank: from here on the tens of MiB that are no tensors are under the tenth by which plans are judged."""
WHOLE = "not comparable: the whole process, with libraries and arenas"
SMALL = (
    "not comparable at this size: planned are tensors alone; measured is what the process took for itself since its engine was "
    "built, with tens of MiB of Python's, of libraries' and of freed pages"
)
UNCOUNTED = "not measured: a CPU counts no tensors"
UNRATED = "not predicted: the hardware profile names no peak"


class GradeRow(Struct, frozen=True, kw_only=True):
    """One prediction. `stage` is a pipeline rank, or None for the whole run; `error` is measured over predicted, minus 1.

    `apart` says why there is no error: both are there and not of the same thing, or there is a known reason why one is not.
    """

    key: str
    label: str
    unit: str
    stage: int | None
    predicted: float | None
    measured: float | None
    how: str
    error: float | None = None
    apart: str = ""


class Grade(Struct, frozen=True, kw_only=True):
    """All rows of one layout; `note` says why there are none."""

    heading: str = ""
    """Layout, ranks, attempts and steps."""
    hardware: str = ""
    assumed: bool = False
    """Whether that profile was taken because the config names none."""
    rows: tuple[GradeRow, ...] = ()
    mfu: float | None = None
    mfu_of: str = ""
    """The peak and the formula of the utilisation, without which it means nothing."""
    note: str = ""


def grades(run: Recorded) -> list[Grade]:
    """A grade of each layout that the run had, the newest last."""
    return [grade(part.run, heading=part.heading) for part in parts(run)]


def grade(run: Recorded, *, heading: str = "") -> Grade:
    """Lay predictions beside measurements of a run of one layout. A config that cannot be planned is said so, not raised."""
    if run.config is None:
        return Grade(heading=heading, note="the ledger holds no config of it that this version of ftrain reads")
    found = measured(run)
    try:
        said = predict(run.config, sequences=found.sequences)
    except ValueError as error:
        return Grade(heading=heading, note=f"not predicted: {error}")
    profile, speed = said.setup.profile, went(run)
    mfu, mfu_of = None, ""
    if speed is not None and speed.speed.mfu is not None:  # of a profile that the config names, never of one assumed here
        mfu, mfu_of = speed.speed.mfu, f"of {speed.speed.peak} a GPU; model FLOPs with causal attention halved"
    assumed, rows = not run.config.machine.hardware, tuple(_rows(said, found))
    return Grade(heading=heading, hardware=profile.name, assumed=assumed, rows=rows, mfu=mfu, mfu_of=mfu_of)


def _rows(said: Predicted, found: Measured) -> list[GradeRow]:
    return [*_step(said, found), *(row for pp in range(said.setup.mesh.pp) for row in _stage(said, found, pp))]


def _step(said: Predicted, found: Measured) -> list[GradeRow]:
    """The whole step, and its parts as the planner and the clock name them."""
    step = said.step
    parts = {"compute": "compute", "tp": "tp", "cp": "cp", "pp": "pp", "dp": "dp"} if step else {}
    rows = [
        _row("step_s", "step", "s", None, (step.total if step else None, found.step.value if found.step else None),
             "ftrain plan time (none without a peak) | median of the steps", "" if step else UNRATED),
        _row("bubble", "waiting for others, of waiting and computing", "%", None, (said.bubble, found.idle),
             "ftrain plan schedule, idle of the total, with the work of the stages | (bubble + imbalance) / (these + compute)"),
        _row("exposed", "communication that nothing hides, of a step", "%", None,
             (None if step is None else (step.tp + step.cp + step.pp + step.dp + step.ep) / step.total, found.exposed),
             "ftrain plan time, tp + cp + pp + dp + ep | tp + cp + pp + dp buckets / step, mean over the ranks",
             "" if step else UNRATED),
    ]  # fmt: skip
    for name, bucket in parts.items():
        also = {"compute": "recompute", "dp": "ep"}.get(name)  # experts are shared out among replicas: one bucket
        said_s = getattr(step, name) + (getattr(step, also) if also else 0)
        rows.append(
            _row(
                f"{name}_s",
                name,
                "s",
                None,
                (said_s, found.mean.get(bucket)),
                "ftrain plan time | its bucket, mean over the ranks",
            )
        )
    rows += [
        _row(f"sent_{name.lower().replace(' ', '')}", f"bytes that a rank sends in an update, {name}", "B", None,
             (nbytes, _sent(said, found, name)), "ftrain plan traffic | counted; rings, the busiest rank")
        for name, nbytes in _volumes(said.volumes).items()
    ]  # fmt: skip
    return rows


def _volumes(volumes: Iterable[Volume]) -> dict[str, float]:
    """Predicted bytes by what is counted together: replicas exchange gradients, weights, and tokens for experts."""
    found: dict[str, float] = {}
    for volume in volumes:
        name = "DP x CP" if volume.axes == SHARD_AXES else volume.name
        found[name] = found.get(name, 0.0) + float(volume.nbytes)
    return found


def _sent(said: Predicted, found: Measured, name: str) -> float | None:
    """What was counted for a predicted group. Where CP is all there is to DP x CP, both share a count: neither is compared."""
    parallel = said.setup.config.parallel
    if not found.sent or parallel.sharding != "zero1" or (said.setup.mesh.dp == 1 and said.setup.mesh.cp > 1):
        return None
    return found.sent.get({"DP x CP": "dp"}.get(name, name.lower()), 0.0)


def _stage(said: Predicted, found: Measured, pp: int) -> Iterator[GradeRow]:
    """One pipeline rank."""
    yield from _stage_memory(said, found, pp)
    if pp < len(found.stages):
        yield from _stage_time(said, found, pp)


def _stage_memory(said: Predicted, found: Measured, pp: int) -> Iterator[GradeRow]:
    """The fullest rank of a stage, and what stays in it from step to step.

    A CPU counts no tensors. What comes nearest is the private memory that a rank took since its engine was built; its parts are
    Python's and the allocator's as well, so they are not compared, the whole process is not either, and that of a small model
    is mostly theirs.
    """
    mine = sorted((rank for rank in found.memory if rank.stage == pp), key=lambda rank: rank.peak)
    fullest, memory, cpu = (mine[-1] if mine else None), said.memory[pp], found.device == "cpu"
    parts = None if cpu else fullest
    how = "ftrain plan memory: state + activations + buffers | peak; on a CPU of private memory since the engine was built"
    apart = "" if fullest is None else WHOLE if fullest.whole else SMALL if cpu and memory.total < COMPARABLE_BYTES else ""
    label = "memory (tensors | process's own)" if cpu else "memory"
    yield _row("memory", label, "B", pp, (float(memory.total), float(fullest.peak) if fullest else None), how, apart)
    apart = UNCOUNTED if cpu and fullest else ""
    how = "weights + gradients + master + moments | used between two steps"
    yield _row("state", "state", "B", pp, (float(memory.state), float(parts.used) if parts else None), how, apart)
    how, active = "activations + buffers | peak - used between two steps", float(memory.activations + memory.buffers)
    both = active, float(parts.peak - parts.used) if parts else None
    yield _row("activations", "activations and buffers", "B", pp, both, how, apart)


def _stage_time(said: Predicted, found: Measured, pp: int) -> Iterator[GradeRow]:
    """How the ranks of a stage spend a step; at the slowest one, by how much it is the slowest."""
    times, computing = found.stages[pp], [stage.get("compute", 0.0) for stage in found.stages]
    how = "its operations / (peak x kernel share) | compute bucket, mean of its ranks"
    yield _row("busy_s", "computing", "s", pp, (_share_of(said, pp) if said.step else None, computing[pp]), how)
    for bucket in ("bubble", "imbalance"):
        yield _row(f"{bucket}_s", f"waiting, {bucket}", "s", pp, (None, times.get(bucket)), "- | its bucket, mean of its ranks")
    mean = sum(computing) / len(computing)
    if mean and computing[pp] == max(computing):
        both = (float(cost.imbalance(said.setup)), computing[pp] / mean)
        yield _row("slowest_over_mean", "the slowest computes, over the mean", "", pp, both, "operations | compute")


def _share_of(said: Predicted, pp: int) -> float:
    """Seconds that a pipeline rank computes in a step, predicted."""
    setup, profile = said.setup, said.setup.profile
    flops = cost.stage_flops(setup)
    mine = float(sum(flops[stage] for stage in setup.stages_of(pp))) * setup.microbatches
    return mine / (profile.peak_flops * profile.assumed.kernel_share)


def _row(
    key: str, label: str, unit: str, stage: int | None, both: tuple[float | None, float | None], how: str, apart: str = ""
) -> GradeRow:
    predicted, found = both
    error = found / predicted - 1 if predicted and found is not None and not apart else None
    return GradeRow(
        key=key, label=label, unit=unit, stage=stage, predicted=predicted, measured=found, how=how, error=error, apart=apart
    )


def keep(found: Grade, folder: Path) -> None:
    """Store the grade beside the run, if its folder is on this machine and may be written."""
    if not found.rows or not folder.is_dir():
        return
    try:
        (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    except OSError:  # a report of somebody else's run is still a report
        return


def lines(found: Grade, said: Sequence[str] = ()) -> list[str]:
    """The grade as text; rows with neither side are left out, and why a row has no error stands below. `said`: notes that stand
    below earlier tables, by whose numbers they are named here.
    """
    of = f", {found.heading}" if found.heading else ""
    if found.note:
        return [f"predicted beside measured{of}: {found.note}"]
    told = [f"predicted beside measured{of} (hardware profile {profile_text(found)})"]
    rows = [(label if stage is None else f"stage {stage}: {label}", *rest) for stage, label, *rest in cells(found, said)]
    told += table(HEAD, rows)
    told += [f"  {note}" for note in notes(found, said)]
    if found.mfu is not None:
        told.append(f"  MFU {100 * found.mfu:.1f} % {found.mfu_of}")
    return told


def profile_text(found: Grade) -> str:
    """By which profile was predicted, and whether anybody named it."""
    return f"{found.hardware}, assumed" if found.assumed else found.hardware


def cells(found: Grade, said: Sequence[str] = ()) -> list[tuple[int | None, str, str, str, str]]:
    """Of each row that says something: stage, label, predicted, measured, and the error or the number of a note."""
    reasons = [*said, *reasons_after(said, found)]
    return [
        (row.stage, row.label, show(row.predicted, row.unit), show(row.measured, row.unit), _error_text(row, reasons))
        for row in shown(found)
    ]


def notes(found: Grade, said: Sequence[str] = ()) -> list[str]:
    """Why rows have no error, by their numbers; those that were `said` keep theirs, and are not said again."""
    return [f"({number}) {reason}" for number, reason in enumerate(reasons_after(said, found), start=len(said) + 1)]


def reasons_after(said: Sequence[str], found: Grade) -> list[str]:
    """Why rows of this grade have no error, without what was said already."""
    return [reason for reason in dict.fromkeys(row.apart for row in shown(found)) if reason and reason not in said]


def _error_text(row: GradeRow, reasons: list[str]) -> str:
    if row.apart:
        return f"({reasons.index(row.apart) + 1})"
    return "" if row.error is None else f"{100 * row.error:+.1f} %"


def shown(found: Grade) -> list[GradeRow]:
    """Rows that say something."""
    return [row for row in found.rows if row.measured is not None or row.predicted is not None]


def as_dict(found: Grade) -> dict[str, Any]:
    """For `--json`."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return plain
