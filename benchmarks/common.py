"""What every benchmark shares: the options, rounds that take turns, medians, and one JSON object on stdout.

A machine changes its speed from minute to minute, so a ratio is only worth something if both sides were measured in turns
within one run; and a missed bound is a figure to look at, not a failure of the benchmark: the exit code is 0 whenever the
measurement is right. The load average stands beside the figures, because on a busy machine they say little.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).parent.parent


def options(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="JSON on stdout only: no table on stderr")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes: the machinery, not the figures")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds (default {rounds})")
    parser.add_argument("--seed", type=int, default=1, help="of everything random")
    parser.add_argument("--dir", help="folder on the disk to be measured (default: the system's folder for temporary files)")
    return parser


def turns(names: Sequence[str], number: int) -> list[str]:
    """The order of a round, such that what a case leaves behind (a busy disk, cold caches) is not always left to the same one.

    Williams' design: over as many rounds as there are cases, twice as many if they are odd, each comes at each place, and
    after each of the others, equally often. Rounds that merely turn leave everybody behind the same one.
    """
    count = len(names)
    steps = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    order = [names[(number + step) % count] for step in steps]
    return order[::-1] if count % 2 and number // count % 2 else order


def interleaved(cases: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in turns(list(cases), number):
            seconds[name].append(cases[name](number))
    return seconds


class Elapsed(NamedTuple):
    """Seconds on the clock, and of processor time of the calling thread: the latter says more on a busy machine."""

    wall: float
    cpu: float


def stopwatch() -> Callable[[], Elapsed]:
    """Started now; each call tells what has elapsed."""
    wall, cpu = time.perf_counter(), time.thread_time()
    return lambda: Elapsed(time.perf_counter() - wall, time.thread_time() - cpu)


def median(values: Iterable[float]) -> float | None:
    """The median; None of nothing."""
    held = list(values)
    return statistics.median(held) if held else None


def median_within(values: Sequence[float], *, confidence: float = 0.9) -> tuple[float, float, float]:
    """The median, and bounds between which the true one lies at least so surely, whatever the distribution: two of the samples,
    by how often a fair coin would put the median outside of them (the sign test). With too few samples: smallest and largest.
    """
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < (n - 1) // 2:
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - confidence:
            break
        rank += 1
    lowest = max(0, rank - 1)
    return statistics.median(ordered), ordered[lowest], ordered[n - 1 - lowest]


def ratio(over: float | None, under: float | None) -> float | None:
    """A quotient to three digits; None if a side is missing."""
    return None if over is None or not under else round(over / under, 3)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median and every sample, in seconds."""
    middle = median(values)
    return {"median_s": None if middle is None else round(middle, 4), "samples_s": [round(value, 4) for value in values]}


@contextmanager
def scratch(folder: str | None) -> Iterator[Path]:
    """A folder of its own on the disk to be measured, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ftrain-bench-", dir=folder, ignore_cleanup_errors=True) as path:
        yield Path(path)


class Machine:
    """How busy the machine was: processors, and the load average before and after."""

    def __init__(self) -> None:
        self._before = os.getloadavg()

    def record(self) -> dict[str, Any]:
        """For the result."""
        return {
            "cpus": os.cpu_count(),
            "load_before": [round(value, 2) for value in self._before],
            "load_after": [round(value, 2) for value in os.getloadavg()],
        }


def python(module: str, *args: str) -> list[str]:
    """A module of the benchmarks as a process: they are not installed, so they are found from the repository's root."""
    return [sys.executable, "-m", module, *args]


def environment() -> dict[str, str]:
    """For such a process: one thread a rank, and the repository's root on its path."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def emit(result: Mapping[str, Any], *, quiet: bool, rows: Iterable[tuple[str, object]] = ()) -> None:
    """The result on stdout, and unless `quiet` a short table on stderr."""
    if not quiet:
        for label, value in rows:
            print(f"{label:<34} {value}", file=sys.stderr)
    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
