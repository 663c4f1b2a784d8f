"""Where the time of a step went, how fast it was, and what memory it took: means over the steps of a run's newest layout.

What a rank did is measured by itself (`ftrain.train.times`); here it is only added up. The first step of each attempt is left
out: it builds programs and faults pages in. Of ranks there are two numbers: the mean says what a share of the machine is worth,
the worst which rank to look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ftrain.plan import rates
from ftrain.units import format_bytes, format_count, format_seconds, format_share, plural
from ftrain.view.measured import memory_of, warm
from ftrain.view.record import Recorded

SHOWN_RANKS = 16


class BucketRow(Struct, frozen=True, kw_only=True):
    """One part of a step, in seconds. `worst_rank`: the rank that most often had the most of it."""

    bucket: str
    mean_s: float
    share: float
    worst_rank: int
    worst_s: float


class MemoryRow(Struct, frozen=True, kw_only=True):
    """A rank's memory in bytes: at the end of the newest step, and the most there was in the steps that count."""

    rank: int
    stage: int
    used: int
    reserved: int
    peak: int


class Speed(Struct, frozen=True, kw_only=True):
    """All of the steps' work over all of their time. TFLOP/s of a rank; utilisations are None where the peak is unknown."""

    tokens_per_s: float
    tflops: float
    tflops_full: float
    mfu: float | None
    mfu_full: float | None
    peak: str
    formula: str
    device: str
    dtype: str


class Went(Struct, frozen=True, kw_only=True):
    """The whole answer. `layout`: whose steps these are."""

    layout: str
    steps: int
    step_s: float
    buckets: tuple[BucketRow, ...]
    speed: Speed
    memory: tuple[MemoryRow, ...]


def went(run: Recorded) -> Went | None:
    """Of a run; None if its metrics.jsonl is not on this machine, or tells nothing of ranks."""
    lines = _lines(run)
    if not lines:
        return None
    newest = lines[-1]
    total = sum(sum(line["mean"].values()) for line in lines) / len(lines)
    return Went(
        layout=str(newest["layout"]),
        steps=len(lines),
        step_s=total,
        buckets=tuple(row for name in newest["mean"] if (row := _bucket(name, lines, total)).mean_s > 0),
        speed=_speed(lines),
        memory=_ranks(run, newest["memory"]),
    )


def _lines(run: Recorded) -> list[dict[str, Any]]:
    """Of the newest layout that has any, without the first step of each attempt unless there are no others."""
    told = [line for line in run.metrics if "mean" in line and line.get("tflops") is not None]
    told = [line for line in told if line["layout"] == told[-1]["layout"]]
    kept = {(done.attempt, done.record.step) for done in warm(list(run.steps))}
    return [line for line in told if (line["attempt"], line["step"]) in kept] or told


def _ranks(run: Recorded, newest: Sequence[Sequence[int]]) -> tuple[MemoryRow, ...]:
    """Peaks as the grade has them (`ftrain.view.measured`); of a run of one step those of its line."""
    peaks = {it.rank: it.peak for it in memory_of(run)}
    return tuple(MemoryRow(rank=r, stage=s, used=u, reserved=v, peak=peaks.get(r, p)) for r, s, u, v, p in newest)


def _bucket(name: str, lines: Sequence[Mapping[str, Any]], total: float) -> BucketRow:
    mean = sum(line["mean"][name] for line in lines) / len(lines)
    rank, _ = Counter(line["worst"][name][0] for line in lines).most_common(1)[0]
    worst = [line["worst"][name][1] for line in lines]
    return BucketRow(
        bucket=name, mean_s=mean, share=mean / total if total else 0.0, worst_rank=rank, worst_s=sum(worst) / len(worst)
    )


def _speed(lines: Sequence[Mapping[str, Any]]) -> Speed:
    newest, seconds = lines[-1], sum(line["seconds"] for line in lines)

    def over_all(key: str) -> float:
        return float(sum(line[key] * line["seconds"] for line in lines) / seconds)

    known = all(line["mfu"] is not None for line in lines)
    return Speed(
        tokens_per_s=sum(line["tokens"] for line in lines) / seconds,
        tflops=over_all("tflops"),
        tflops_full=over_all("tflops_full"),
        mfu=over_all("mfu") if known else None,
        mfu_full=over_all("mfu_full") if known else None,
        peak=str(newest["peak"]),
        formula=rates.FORMULA,
        device=str(newest["device"]),
        dtype=str(newest["dtype"]),
    )


def lines(found: Went | None) -> list[str]:
    """As text."""
    if found is None:
        return ["where a step's time went: not known here (metrics.jsonl is on the run's machine)"]
    speed, steps = found.speed, plural(found.steps, "step")
    return [
        f"where a step's time went ({found.layout}, mean of {steps}: {format_seconds(found.step_s)})",
        *(
            f"  {row.bucket:<11} {format_seconds(row.mean_s):>9} {format_share(row.mean_s, found.step_s):>8}"
            f"   most on rank {row.worst_rank}: {format_seconds(row.worst_s)}"
            for row in found.buckets
        ),
        f"speed: {format_count(speed.tokens_per_s)} tokens/s; {speed.tflops:.3g} TFLOP/s a rank on {speed.device}, "
        f"{speed.dtype}, attention halved ({speed.tflops_full:.3g} with attention in full)",
        f"  {mfu_text(speed)}",
        *_memory(found.memory, cpu=speed.device == "cpu"),
    ]


def mfu_text(speed: Speed) -> str:
    """The utilisation with everything it depends on, or why there is none."""
    return rates.mfu_text(msgspec.to_builtins(speed))


def _memory(rows: Sequence[MemoryRow], *, cpu: bool) -> list[str]:
    """The fullest rank of each stage, and every rank of a small run."""
    stages = {
        stage: max((row for row in rows if row.stage == stage), key=lambda row: row.peak) for stage in {r.stage for r in rows}
    }
    whole = {row.rank: f" (of {format_bytes(row.reserved)} with libraries and arenas)" for row in rows if cpu and row.reserved}
    told = ["memory at its peak, each process's own since its engine was built" if whole else "memory, at its peak"]
    told += [
        f"  stage {stage}: {format_bytes(row.peak)} on rank {row.rank}{whole.get(row.rank, '')}"
        for stage, row in sorted(stages.items())
    ]
    if len(stages) < len(rows) <= SHOWN_RANKS:
        told.append("  " + ", ".join(f"rank {row.rank}: {format_bytes(row.peak)}" for row in rows))
    return told
