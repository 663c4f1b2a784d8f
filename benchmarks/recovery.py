"""How long training stands still after `kill -9` of one of two ranks: ours against `torchrun`, in one run.

    t0   the kill
    t1   the first finished step whose number is above the highest finished before: what was lost has been done again

The same model size, batch and snapshot interval. Ours is `ftrain run` with snapshots in its memory tier; the peer is torchrun
with benchmarks/peers/torchrun_train.py, whose rank 0 does `torch.save` to tmpfs. Each sample is a run of its own; both sides
of a round kill the same rank, equally long after a snapshot (drawn from the seed). Steps that the dying attempt still
finishes count as finished before. A run that has not recovered after 60 s is counted as such; in the medians it stands as 60
s for us, and not at all for the peer.

NVIDIA's `ft_launcher` with the same script is a further row where it can be imported, or with --nvrx FOLDER, made by

    pip install --no-deps --target FOLDER nvidia-resiliency-ext defusedxml nvidia-ml-py pynvml
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks import common
from recovery.client import NotRunningError, ask

LIMIT_S = 60.0
START_S = 180.0
POLL_S = 0.01
SNAPSHOT_STEPS = 10
RANKS = 2
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 344, "vocab": 257}  # that of the demonstration: 0.82 M parameters
BATCH = {"global_batch": 8, "seq_len": 64}
CONFIG = """
run = {{ url = "{url}", steps = 1000000, seed = {seed} }}
model = {{ layers = {layers}, hidden = {hidden}, heads = {heads}, ffn = {ffn}, vocab = {vocab} }}
data = {{ sources = [{{ path = "stdlib" }}], seq_len = {seq_len} }}
batch = {{ global_batch = {global_batch}, micro_batch = {micro_batch} }}
parallel = {{ ranks = {ranks} }}
optimizer = {{ lr = 1e-3 }}
schedule = {{ kind = "constant" }}
checkpoint = {{ snapshot_steps = {snapshot_steps} }}
machine = {{ device = "cpu" }}
"""


@dataclass(frozen=True)
class Kill:
    """When and whom: after `after_step` was finished, and `later` of a step's time more."""

    rank: int
    after_step: int
    later: float

    @classmethod
    def draw(cls, randoms: random.Random) -> Kill:
        """Somewhere between the second and the third snapshot."""
        return cls(randoms.randrange(RANKS), 2 * SNAPSHOT_STEPS + randoms.randrange(SNAPSHOT_STEPS), randoms.random())


@dataclass(frozen=True)
class Step:
    """A finished step."""

    attempt: int
    number: int
    t: float


@dataclass(frozen=True)
class Sample:
    """One kill. `seconds` is None if training did not go on within the limit."""

    seconds: float | None
    first_step_s: float | None  # until any step of the new attempt is finished: without the work done again
    highest_step: int
    resumed_at: int | None
    step_s: float  # of the last steps before the kill


class Trial(ABC):
    """A run that can be watched and killed."""

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    @abstractmethod
    def steps(self) -> list[Step]:
        """All finished steps so far, as rank 0 reports them."""

    @abstractmethod
    def pid(self, rank: int) -> int | None:
        """The process of a rank."""


class Ours(Trial):
    """`ftrain run`."""

    def __init__(self, folder: Path, seed: int) -> None:
        values = {**MODEL, **BATCH, "ranks": RANKS, "micro_batch": BATCH["global_batch"] // RANKS, "seed": seed}
        self._local, self._config = folder / "run" / "local", folder / "config.toml"
        self._config.write_text(CONFIG.format(url=folder / "run", snapshot_steps=SNAPSHOT_STEPS, **values))

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "ftrain.cli.entry", "run", str(self._config)]

    def steps(self) -> list[Step]:
        records = (msgspec.json.decode(line) for line in lines(self._local / "metrics.jsonl"))
        return [Step(record["attempt"], record["step"], record["t_end"]) for record in records]

    def pid(self, rank: int) -> int | None:
        with contextlib.suppress(NotRunningError):
            return int(ask(self._local, "status")["workers"][str(rank)]["pid"])
        return None


class Torchrun(Trial):
    """`torchrun` with the peer's script."""

    def __init__(self, folder: Path, seed: int, tmpfs: Path) -> None:
        self._folder = folder
        args = {"folder": str(folder), "tmpfs": str(tmpfs), "model": MODEL, **BATCH, "ranks": RANKS, "seed": seed, "lr": 1e-3}
        self._args = json.dumps({**args, "snapshot_steps": SNAPSHOT_STEPS})

    def command(self) -> list[str]:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", "100"]
        return [sys.executable, "-m", *launcher, str(Path(__file__).parent / "peers" / "torchrun_train.py"), self._args]

    def steps(self) -> list[Step]:
        rows = (line.split() for line in lines(self._folder / "steps"))
        return [Step(int(attempt), int(number), float(t)) for attempt, number, t in rows]

    def pid(self, rank: int) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return int((self._folder / f"pid-{rank}").read_text().split()[1])
        return None


class FtLauncher(Torchrun):
    """NVIDIA Resiliency Extension's launcher with the peer's script."""

    def command(self) -> list[str]:
        words = ["--nnodes", "1", "--nproc-per-node", str(RANKS), "--max-restarts", "100", "--ignore-missing-fault-tol-cfg"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return [sys.executable, "-m", FT_MODULE, *words, *super().command()[-2:]]


FT_MODULE = "nvidia_resiliency_ext.fault_tolerance.launcher"


def lines(path: Path) -> list[bytes]:
    """The whole lines of a growing file."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().split(b"\n")[:-1]
    return []


@contextmanager
def running(trial: Trial, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The run, and at the end nothing of it."""
    with log.open("wb") as out:
        environment = {**os.environ, **common.environment()}
        process = subprocess.Popen(trial.command(), stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to stop; what is left of its tree after a while, or does not listen, is killed."""
    tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
    for left in [psutil.Process(process.pid), *tree] if process.poll() is None else tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def wait(process: subprocess.Popen[bytes], trial: Trial, condition: Callable[[list[Step]], bool], limit_s: float) -> bool:
    """Until the finished steps satisfy `condition`; False if the time is up or the run has ended."""
    deadline = time.monotonic() + limit_s
    while not condition(trial.steps()):
        if time.monotonic() > deadline or process.poll() is not None:
            return False
        time.sleep(POLL_S)
    return True


def sample(trial: Trial, kill: Kill, log: Path, *, limit_s: float = LIMIT_S) -> Sample:
    """Start the run, kill, and see when it goes on."""
    with running(trial, log) as process:
        if not wait(process, trial, lambda steps: bool(steps), START_S) or (pid := trial.pid(kill.rank)) is None:
            raise RuntimeError(f"the run does not start:\n{log.read_text(errors='replace')[-3000:]}")
        if not wait(process, trial, lambda steps: steps[-1].number >= kill.after_step, START_S):
            raise RuntimeError(f"the run did not reach step {kill.after_step}:\n{log.read_text(errors='replace')[-3000:]}")
        recent = trial.steps()[-8:]
        step_s = (recent[-1].t - recent[0].t) / (len(recent) - 1)
        time.sleep(kill.later * step_s)
        attempt, t0 = recent[-1].attempt, time.time()
        os.kill(pid, signal.SIGKILL)
        wait(process, trial, lambda steps: _recovered(steps, attempt) is not None, limit_s)
        return _sample(trial.steps(), attempt, t0, step_s)


def _recovered(steps: Sequence[Step], attempt: int) -> Step | None:
    """The first step of a later attempt that is above all of the killed one."""
    highest = max(step.number for step in steps if step.attempt == attempt)
    return next((step for step in steps if step.attempt > attempt and step.number > highest), None)


def _sample(steps: Sequence[Step], attempt: int, t0: float, step_s: float) -> Sample:
    first = next((step for step in steps if step.attempt > attempt), None)
    recovered = _recovered(steps, attempt)
    return Sample(
        seconds=recovered.t - t0 if recovered else None,
        first_step_s=first.t - t0 if first else None,
        highest_step=max(step.number for step in steps if step.attempt == attempt),
        resumed_at=first.number - 1 if first else None,
        step_s=step_s,
    )


def record(samples: Sequence[Sample], failed_s: float | None) -> dict[str, Any]:
    """One side of the result; a non-recovery stands in the median as `failed_s`, or not at all."""
    counted = [each.seconds if each.seconds is not None else failed_s for each in samples]
    seconds = [value for value in counted if value is not None]
    return {
        **common.summary(seconds),
        "median_first_step_s": common.median([each.first_step_s for each in samples if each.first_step_s is not None]),
        "median_step_s": common.median([each.step_s for each in samples]),
        "non_recoveries": sum(each.seconds is None for each in samples),
        "samples": [asdict(each) for each in samples],
    }


def run(folder: Path, tmpfs: Path, *, rounds: int, seed: int, nvrx: bool = False) -> dict[str, Any]:
    """The whole benchmark; the result as it is printed."""
    machine, randoms = common.Machine(), random.Random(seed)
    kills = [Kill.draw(randoms) for _ in range(rounds)]
    kinds = {"torchrun": Torchrun, **({"ft_launcher": FtLauncher} if nvrx else {})}
    samples: dict[str, list[Sample]] = {"ours": [], **{name: [] for name in kinds}}

    def case(name: str, number: int) -> float:
        place, memory = folder / f"{name}-{number}", tmpfs / f"{name}-{number}"
        place.mkdir()
        memory.mkdir()
        trial = Ours(place, seed) if name == "ours" else kinds[name](place, seed, memory)
        samples[name].append(sample(trial, kills[number], place / "log"))
        return samples[name][-1].seconds or LIMIT_S

    common.interleaved({name: partial(case, name) for name in samples}, rounds)
    ours, torchrun = record(samples["ours"], LIMIT_S), record(samples["torchrun"], None)
    return {
        "ours_over_torchrun": common.ratio(ours["median_s"], torchrun["median_s"]),
        "ours_median_s": ours["median_s"],
        "torchrun_median_s": torchrun["median_s"],
        "ours_non_recoveries": ours["non_recoveries"],
        "torchrun_non_recoveries": torchrun["non_recoveries"],
        "n": rounds,
        "ours": ours,
        "torchrun": torchrun,
        "ft_launcher": record(samples["ft_launcher"], None) if nvrx else None,
        "model": {**MODEL, **BATCH, "snapshot_steps": SNAPSHOT_STEPS},
        "machine": machine.record(),
    }


def tmpfs_root() -> str | None:
    """Where the peer's snapshots go; None (the system's temporary folder) where there is no /dev/shm."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = common.options(__doc__.splitlines()[0], rounds=5)
    parser.add_argument("--nvrx", metavar="FOLDER", help="folder with nvidia-resiliency-ext, for a further row")
    args = parser.parse_args(argv)
    if args.nvrx:
        os.environ["PYTHONPATH"] = os.pathsep.join([args.nvrx, os.environ.get("PYTHONPATH", "")])
    nvrx = bool(args.nvrx) or find_spec("nvidia_resiliency_ext") is not None
    with common.scratch(args.dir) as folder, tempfile.TemporaryDirectory(prefix="ftrain-bench-", dir=tmpfs_root()) as tmpfs:
        result = run(folder, Path(tmpfs), rounds=1 if args.tiny else args.rounds, seed=args.seed, nvrx=nvrx)
    names = ("ours_median_s", "torchrun_median_s", "ours_non_recoveries", "torchrun_non_recoveries", "ours_over_torchrun")
    common.emit(result, quiet=args.json, rows=[(name, result[name]) for name in names])
    return 0


if __name__ == "__main__":
    sys.exit(main())
