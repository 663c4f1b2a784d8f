"""What a run measured, boiled down to one number a question: the step, the tokens, where its seconds went, the memory.

Of steps the median counts, and the first step of each attempt not at all: it builds programs, faults pages in and, on a GPU,
compiles kernels. Of ranks the mean says what a share of the machine is worth, and the worst which rank the others wait for, or
which runs out of memory first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ftrain.config import Config
from ftrain.view.numbers import Median, median
from ftrain.view.record import Done, Recorded

COMMUNICATION = ("tp", "cp", "pp", "dp")
"""Buckets of a step (`ftrain.train.times`) in which a rank communicates and does not compute."""
PARTS, LEAST = 4, 5
"""A run's steps are cut into so many parts, each of at least so many steps, to see how its speed drifts."""
WAITING = ("bubble", "imbalance")
"""Buckets in which it has nothing to do: by the schedule, or because another rank is slower."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most that a rank used, bytes: between two steps, and in one. `stage` is its pipeline rank."""

    rank: int
    stage: int
    used: int
    peak: int
    whole: bool = False
    """Of the whole process, libraries and arenas included: nothing that a plan could be compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a run; what was not recorded is None or empty."""

    step: Median | None
    tokens_per_update: int | None
    """None if no tokens are told."""
    ranks: int
    drift: float = 0.0
    """Of the parts of the run, one after the other: the slowest median step over the fastest, minus 1; 0 of a short run."""
    sequences: int = 0
    """Of one update; 0 if it was not recorded."""
    mean: Mapping[str, float] = field(default_factory=dict)
    """Bucket -> seconds of a step, mean over the ranks."""
    worst: Mapping[str, float] = field(default_factory=dict)
    """The same of the rank with the most of it."""
    memory: tuple[RankMemory, ...] = ()
    stages: tuple[Mapping[str, float], ...] = ()
    """Of each pipeline rank: bucket -> seconds of a step; empty without a pipeline."""
    sent: Mapping[str, float] = field(default_factory=dict)
    """Axis -> bytes that the busiest rank sent in a step."""
    device: str = ""
    """As it calls itself."""
    actions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Kind of action -> mean seconds on each virtual stage."""

    @property
    def tokens_per_s(self) -> float | None:
        """Over all ranks."""
        if self.step is None or not self.tokens_per_update or not self.step.value:
            return None
        return self.tokens_per_update / self.step.value

    @property
    def wait(self) -> float | None:
        """Share of a step in which a rank has nothing to do, mean over the ranks."""
        return self.share(WAITING)

    @property
    def idle(self) -> float | None:
        """Waiting over waiting and computing: what the idle share of a schedule is compared with."""
        waiting, computing = (sum(self.mean.get(name, 0.0) for name in names) for names in (WAITING, ("compute",)))
        return waiting / (waiting + computing) if waiting + computing else None

    @property
    def exposed(self) -> float | None:
        """Share of a step in which a rank communicates and does not compute, mean over the ranks."""
        return self.share(COMMUNICATION)

    @property
    def peak_memory(self) -> int | None:
        """Bytes of the fullest rank."""
        return max((rank.peak for rank in self.memory), default=None)

    def share(self, buckets: Iterable[str]) -> float | None:
        """Share of the measured step that goes to these buckets."""
        total = sum(self.mean.values())
        return sum(self.mean.get(bucket, 0.0) for bucket in buckets) / total if total else None


def measured(run: Recorded) -> Measured:
    """The measurements of a run's newest layout, settings of a step and batch: earlier ones (of a ramp) had other steps."""
    newest, (here, steps) = run.newest, _newest(run)
    tokens = median([done.record.tokens for done in here])
    times = _times(run, steps)
    return Measured(
        step=median([done.seconds for done in steps]),
        tokens_per_update=(round(tokens.value) or None) if tokens else None,
        drift=_drift([done.seconds for done in steps]),
        sequences=here[-1].record.sequences if here else 0,
        ranks=newest.ranks if newest else 1,
        mean=_medians([line["mean"] for line in times]),
        worst=_medians([{bucket: most[1] for bucket, most in line["worst"].items()} for line in times]),
        memory=tuple(_memory(times)),
        sent=_medians([line["sent"] for line in times if line.get("sent")]),
        device=str(times[-1].get("device", "")) if times else "",
        stages=_by_place([line["stages"] for line in times if line.get("stages")]),
        actions=_actions([line["actions"] for line in times if line.get("actions")]),
    )


def _drift(seconds: Sequence[float]) -> float:
    parts = min(PARTS, len(seconds) // LEAST)
    cuts = [len(seconds) * part // parts for part in range(parts + 1)] if parts > 1 else []
    found = [median(seconds[low:high]) for low, high in pairwise(cuts)]
    values = [part.value for part in found if part]
    return max(values) / min(values) - 1 if values and min(values) > 0 else 0.0


def memory_of(run: Recorded) -> tuple[RankMemory, ...]:
    """The memory alone: whatever is told of a rank's peak is told from here, so that a report has one number for it."""
    return tuple(_memory(_times(run, _newest(run)[1])))


def _newest(run: Recorded) -> tuple[list[Done], list[Done]]:
    """Steps as the newest one, in layout, settings and batch: all of them, and without those that were the first of an attempt.
    An attempt that did no step (a start that failed) is not the newest, whatever it was to be."""
    newest, config = run.newest, run.trained
    alike = {
        row.attempt for row in run.report.attempts
        if newest and row.layout == newest.layout and _times_alike(run.configs.get(row.attempt), config)
    }  # fmt: skip
    here = [done for done in run.steps if done.attempt in alike]
    batch = [done for done in here if done.record.sequences == here[-1].record.sequences]
    return batch, [done for done in warm(here) if done.record.sequences == here[-1].record.sequences]


def _times_alike(one: Config | None, other: Config | None) -> bool:
    """Whether a step takes as long under both, as far as a config can tell; one that is not on record is taken to."""
    if one is None or other is None:
        return True
    sizes = (one.model, one.batch, one.parallel, one.machine, one.data.seq_len)
    return sizes == (other.model, other.batch, other.parallel, other.machine, other.data.seq_len)


def _times(run: Recorded, steps: Iterable[Done]) -> list[dict[str, Any]]:
    """What the ranks measured in these steps."""
    kept = {(done.attempt, done.record.step) for done in steps}
    return [line for line in run.metrics if "mean" in line and (line.get("attempt"), line.get("step")) in kept]


def warm(steps: list[Done]) -> Iterator[Done]:
    """The steps without the first of each attempt."""
    seen: set[int] = set()
    for done in steps:
        if done.attempt in seen:
            yield done
        seen.add(done.attempt)


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    found = {}
    for bucket in dict.fromkeys(bucket for row in rows for bucket in row):
        middle = median([row.get(bucket, 0.0) for row in rows])
        found[bucket] = middle.value if middle else 0.0
    return found


def _by_place(rows: list[list[dict[str, float]]]) -> tuple[dict[str, float], ...]:
    """Medians over the steps, stage by stage."""
    return tuple(_medians(list(of_stage)) for of_stage in zip(*rows, strict=True))


def _actions(rows: list[dict[str, list[float]]]) -> dict[str, tuple[float, ...]]:
    """Medians over the steps, of each kind on each stage."""
    found = {}
    for kind in dict.fromkeys(kind for row in rows for kind in row):
        columns = zip(*(row[kind] for row in rows if kind in row), strict=True)
        found[kind] = tuple(middle.value for column in columns if (middle := median(column)))
    return found


def _memory(times: list[dict[str, Any]]) -> Iterator[RankMemory]:
    """The highest peak of each rank over the steps; lines hold (rank, stage, used, reserved, peak).

    What torch reserved of a GPU is taken. Of a CPU that is the whole process, which earlier versions recorded as `used`.
    """
    peaks: dict[int, RankMemory] = {}
    for line in times:
        for rank, stage, used, reserved, peak in line.get("memory", ()):
            cpu = line.get("device") == "cpu"
            most = max(int(used), int(peak), 0 if cpu else int(reserved))
            if rank not in peaks or peaks[rank].peak < most:
                peaks[rank] = RankMemory(int(rank), int(stage), int(used), most, whole=cpu and not reserved)
    yield from (peaks[rank] for rank in sorted(peaks))
