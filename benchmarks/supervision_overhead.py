"""What supervision costs: heartbeats, a snapshot into memory every 10 steps, metrics and ledger, against nothing of the kind.

Two runs of the same model, data and seed live side by side and never work at the same time: one is stopped (SIGSTOP, all of its
processes) while the other does a block of steps, in turns. A block is thirty steps: three snapshots, and long enough that what
happens in every second, and what waking up costs, has the share that it has in a run that nobody stops. Each pair of blocks
gives one ratio of CPU seconds per step and one of wall seconds, and a pair is over in seconds, so that a machine that changes
its speed changes both sides alike.

    ours    `ftrain run`: its parent, coordinator, agent, zygote, keeper and workers, all of them counted
    none    two processes with the same engine, which do steps and nothing else (benchmarks.overhead_rank)

CPU seconds are those of the kernel's clock of each process, in ns. `ratio` is the upper end of the one-sided 95 % confidence
interval of the median of the ratios, by order statistics: no assumption about how they are distributed.

Whatever is no part of supervision is the same on both sides: engine, data, threads, environment; the ranks of a side share one
session, by which schedulers share out the processors; finished steps are read from a page of memory (ours is the page on which
each rank tells its progress); and memory that a step gives back stays in the process (`GLIBC_TUNABLES`): whether the C library
returns it to the kernel, to fault it in again with the next step, is chance in each process, and half a per cent of the time.
Nobody who runs ftrain has set that: `--malloc default` leaves the C library as it is, on both sides.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks import common
from recovery.heartbeat import HeartbeatReader

STEPS = 30  # of a block: three snapshots, and eight seconds, so that being stopped and woken is no part of what is measured
RANKS = 2
POLL_S = 0.001
START_S = 300.0
BLOCK_S = 300.0
WARM_STEPS = 12
CONFIG = """
run = {{ url = "{url}", steps = 100000000, seed = {seed} }}
model = {{ layers = 4, hidden = 128, heads = 4, ffn = 344, vocab = 257 }}
data = {{ sources = [{{ path = "stdlib" }}], seq_len = {seq_len} }}
batch = {{ global_batch = 16, micro_batch = 8 }}
parallel = {{ ranks = {ranks} }}
optimizer = {{ lr = 1e-4 }}
schedule = {{ kind = "constant" }}
checkpoint = {{ snapshot_steps = 10, every_steps = 0 }}
machine = {{ device = "cpu" }}
recovery = {{ hang_s = 100000, hang_floor_s = 100000, start_s = 100000, lease_s = 100000, collective_s = 50000 }}
"""


class Side(ABC):
    """A run that is stopped and goes on as a whole."""

    @abstractmethod
    def processes(self) -> list[int]:
        """All of its processes that live."""

    @abstractmethod
    def steps(self) -> int:
        """Finished steps."""

    def signal(self, number: int) -> None:
        """To all of them."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_for(self, step: int, limit_s: float) -> None:
        """Until a step is finished."""
        deadline = time.monotonic() + limit_s
        while self.steps() < step:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{type(self).__name__}: step {step} is not finished within {limit_s:g} s")
            time.sleep(POLL_S)

    def block(self, steps: int) -> tuple[float, float]:
        """Let it do so many steps: CPU and wall seconds of one. Measured from the end of a step to the end of a step.

        Whose seconds are counted is found out before: looking for a run's processes takes as long as a good part of a step.
        """
        self.signal(signal.SIGCONT)
        try:
            pids = self.processes()
            begun = self.steps() + 1
            self.wait_for(begun, BLOCK_S)
            cpu, wall = cpu_s(pids), time.perf_counter()
            begun = self.steps()
            self.wait_for(begun + steps, BLOCK_S)
            used, took, done = cpu_s(pids) - cpu, time.perf_counter() - wall, self.steps() - begun
            if set(self.processes()) != set(pids):
                raise RuntimeError(f"{type(self).__name__}: processes came or went while they were measured")
            return used / done, took / done
        finally:
            self.signal(signal.SIGSTOP)


class Ours(Side):
    """`ftrain run`, with all that comes along."""

    def __init__(self, folder: Path, config: Path, log: Path, env: Mapping[str, str]) -> None:
        self._page: HeartbeatReader | None = None
        with log.open("wb") as out:
            argv = [sys.executable, "-P", "-m", "ftrain.cli.entry", "run", str(config)]
            self._parent = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env)

    def processes(self) -> list[int]:
        if self._parent.poll() is not None:
            raise RuntimeError("ftrain run has ended")
        parent = psutil.Process(self._parent.pid)
        return [parent.pid, *(child.pid for child in parent.children(recursive=True))]

    def steps(self) -> int:
        """What rank 0 has written on the progress page, a memory file that the agent holds open."""
        if self._page is None:
            self._page = next(map(HeartbeatReader, self._pages()), None)
        beat = self._page.read(0) if self._page is not None else None
        return max(0, beat.step - 1) if beat is not None else 0

    def _pages(self) -> Iterator[int]:
        for pid in self.processes():
            with contextlib.suppress(FileNotFoundError):  # it has ended, or has closed that one
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    if os.readlink(link).startswith("/memfd:heartbeat"):
                        yield os.open(link, os.O_RDONLY)


class Bare(Side):
    """The ranks alone."""

    def __init__(self, folder: Path, config: Path, log: Path, env: Mapping[str, str]) -> None:
        page = folder / "page"
        page.write_bytes(bytes(8))
        with page.open("r+b") as file:
            self._done = mmap.mmap(file.fileno(), 8)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = (
            shlex.join(common.python("benchmarks.overhead_rank", str(config), str(rank), str(port), str(page)))
            for rank in range(RANKS)
        )
        with log.open("wb") as out:
            argv = ["sh", "-c", " & ".join([*ranks, "wait"])]
            self._shell = subprocess.Popen(
                argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )

    def processes(self) -> list[int]:
        ranks = [child.pid for child in psutil.Process(self._shell.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
        if self._shell.poll() is not None or len(ranks) < RANKS:
            raise RuntimeError("a bare rank has ended")
        return [self._shell.pid, *ranks]

    def steps(self) -> int:
        return int(struct.unpack("<q", self._done[:8])[0])


def environment(malloc: str) -> dict[str, str]:
    """Of both sides."""
    keep = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=4294967296"}
    return {**os.environ, **common.environment(), **(keep if malloc == "kept" else {})}


def cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds that processes have used so far, by the kernel's clock of each (clock_getcpuclockid)."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime(~pid << 3 | 2)
    return total


@contextmanager
def both(folder: Path, seed: int, seq_len: int, malloc: str) -> Iterator[tuple[Side, Side]]:
    """The two runs, warm and stopped; nothing of them is left at the end."""
    config = folder / "config.toml"
    config.write_text(CONFIG.format(url=folder / "run", seed=seed, ranks=RANKS, seq_len=seq_len))
    sides: list[Side] = []
    try:
        for kind in (Ours, Bare):
            sides.append(kind(folder, config, folder / f"{kind.__name__}.log", environment(malloc)))
            sides[-1].wait_for(WARM_STEPS, START_S)
            sides[-1].signal(signal.SIGSTOP)
        yield sides[0], sides[1]
    except RuntimeError as error:
        logs = "".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log"))
        raise RuntimeError(f"{error}\n{logs}") from error
    finally:
        for side in sides:
            with contextlib.suppress(RuntimeError):
                side.signal(signal.SIGKILL)


def upper_bound(values: Sequence[float], confidence: float = 0.95) -> float:
    """Upper end of the one-sided confidence interval of the median: the smallest order statistic that lies above it with
    `confidence`, whatever the distribution (the number of values below the median is binomial).
    """
    ordered, below = sorted(values), 0.0
    for rank, value in enumerate(ordered):
        below += math.comb(len(ordered), rank) / 2 ** len(ordered)
        if below >= confidence:
            return value
    return ordered[-1]


def run(folder: Path, *, rounds: int, seed: int, seq_len: int, steps: int, malloc: str) -> dict[str, Any]:
    """The whole benchmark; the result as it is printed."""
    machine = common.Machine()
    measured: dict[str, list[tuple[float, float]]] = {"ours": [], "none": []}
    with both(folder, seed, seq_len, malloc) as (ours, bare):
        for number in range(rounds):
            turns = [("ours", ours), ("none", bare)]
            for name, side in turns if number % 2 == 0 else reversed(turns):
                measured[name].append(side.block(steps))
    pairs = list(zip(measured["ours"], measured["none"], strict=True))
    cpu = [with_[0] / without[0] for with_, without in pairs]
    wall = [with_[1] / without[1] for with_, without in pairs]
    return {
        "ratio": round(upper_bound(cpu), 4),
        "ratio_median": round(common.median(cpu) or 0.0, 4),
        "wall_ratio": round(upper_bound(wall), 4),
        "wall_ratio_median": round(common.median(wall) or 0.0, 4),
        "step_s": round(common.median([without[1] for _, without in pairs]) or 0.0, 4),
        "cpu_s_per_step": {
            name: round(common.median([cpu for cpu, _ in blocks]) or 0.0, 5) for name, blocks in measured.items()
        },
        "blocks": rounds,
        "steps_per_block": steps,
        "malloc": malloc,
        "cpu_ratios": [round(value, 4) for value in cpu],
        "wall_ratios": [round(value, 4) for value in wall],
        "machine": machine.record(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    options = common.options(__doc__.splitlines()[0], rounds=40)
    options.add_argument("--malloc", choices=("kept", "default"), default="kept", help="memory that is freed (default kept)")
    args = options.parse_args(argv)
    with common.scratch(args.dir) as folder:
        result = run(
            folder,
            rounds=2 if args.tiny else args.rounds,
            seed=args.seed,
            seq_len=32 if args.tiny else 128,
            steps=2 if args.tiny else STEPS,
            malloc=args.malloc,
        )
    names = ("step_s", "ratio_median", "ratio", "wall_ratio_median", "wall_ratio")
    common.emit(result, quiet=args.json, rows=[(name, result[name]) for name in names])
    return 0


if __name__ == "__main__":
    sys.exit(main())
