"""How long the stages of a pipeline really wait, against the formula and the simulated schedule.

    sleeps    four ranks whose stages sleep for a fixed time (forward = backward of inputs = backward of weights): more ranks
              than cores do not disturb each other, so what is measured is the executor, its order and its links. A busy
              machine wakes sleepers late; each sleep is therefore shorter by as much as the one before was too long
    matmuls   two ranks of the real engine, with as many layers each and a vocabulary that weighs nothing

Bubble: idle share of the ranks' time between the first begin and the last end; the median over the rounds. Beside it

    formula     the closed one: even stages, F = B = W
    calibrated  the same schedule with even stages and the round's own F, B and W: what a zero-bubble schedule leaves idle
                depends on them, and the two halves of a real backward are not equal (`ftrain.parallel.schedule` has the closed
                formulas; they are those of the simulation)
    simulated   with the round's own mean of each action on each stage: uneven stages included
    exact       with each action's own time: beyond this are the engine's links and what the host does between actions, whereas
                what makes it differ from the others is the machine, which was not as fast for one micro-batch as for another

A stage takes as long as stages of large models do (a forward of 150 ms asleep, of 250 awake; with two chunks on a rank half of
that): what is measured is the order, and a hop of a millisecond between processes that share cores is not a schedule's bubble.
The real stages are wide rather than long: the V puts both ends of the model on one rank, and the loss, a hundredth of a narrow
stage's work, would be a thirtieth of its bubble.

`worst_sleeps`: largest |measured / formula - 1|, median over the rounds; `worst_matmuls`, `worst_matmuls_own_stages` and
`worst_engine`: the same against calibrated, simulated and exact. All need a machine that is not busy. Who takes processors away
takes more from two ranks at work than from one, and the bubble looks smaller than it is; or wakes a rank late, and it looks
larger. With real stages twice as many rounds are therefore carried out, and the half counts in which least was stolen: time of
actions in which their thread did not run. `stolen` is the median of that share; where it is above a hundredth or two, the rest
says little. The choice looks at no bubble, but it is a choice: also the engine's own threads, which carry its messages, take
processors from its actions. What all rounds say stands beside it (`worst_all_rounds`, and `all_rounds` of each schedule).
`python -m benchmarks.bubble --json`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.ranks import world
from benchmarks.text import Text
from ftrain.config import Batch, Config, Data, Machine, Model, Optimizer, Parallel, PipelineSchedule, Run, Source
from ftrain.parallel.expert import Routing
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.pipeline import Job, Pipeline, Stage, Timed, measured
from ftrain.parallel.program import lower
from ftrain.parallel.schedule import Action, Kind
from ftrain.parallel.shape import MeshShape, mesh_shape
from ftrain.parallel.stages import stage_plan, training_schedule
from ftrain.parallel.timeline import Duration, Time, Timeline, averages, simulate
from ftrain.plan.schedule import bubble_of_compute, of_total
from ftrain.train.step import Engine

SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
WIDTH = 8


class Bed:
    """Where a rank sleeps: over many sleeps as long as was asked for, although each ends late."""

    def __init__(self) -> None:
        self._owed = 0.0

    def sleep(self, seconds: float) -> None:
        """About so long; what it is too long, the next one is shorter."""
        begin = time.perf_counter()
        time.sleep(max(0.0, seconds - self._owed))
        self._owed += time.perf_counter() - begin - seconds


class Sleeper(Stage):
    """A stage that computes nothing and takes its time: `seconds` for each third of the work."""

    def __init__(self, seconds: float, bed: Bed) -> None:
        super().__init__(Stream(), [["all"]], [frozenset()])
        self.seconds, self.bed = seconds, bed

    def forward(self, microbatch: int, x: torch.Tensor, job: Job, *, ends: bool) -> torch.Tensor:
        """One third."""
        self.bed.sleep(self.seconds)
        return torch.zeros(1, WIDTH)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Two thirds."""
        self.bed.sleep(2 * self.seconds)
        return torch.zeros(1, WIDTH)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """One third."""
        self.bed.sleep(self.seconds)
        return torch.zeros(1, WIDTH)

    def backward_weight(self, microbatch: int, index: int | None = None) -> None:
        """One third."""
        self.bed.sleep(self.seconds)


class Stream:
    """The shape of what travels between sleepers."""

    def __call__(
        self, x: torch.Tensor, part: Sequence[str], documents: torch.Tensor | None, routing: Routing | None
    ) -> torch.Tensor:
        """Nothing is computed."""
        return x

    def stream_shape(self, sequences: int, length: int) -> tuple[int, ...]:
        """A few bytes."""
        return sequences, WIDTH


def config_of(schedule: PipelineSchedule, *, ranks: int, microbatches: int, hidden: int, length: int = 128) -> Config:
    """A run of that schedule over sequences of `length` tokens; two layers a virtual stage at least."""
    return Config(
        run=Run(url="unused", steps=100),
        model=Model(layers=4 * ranks, hidden=hidden, heads=4, ffn=3 * hidden, vocab=64),
        data=Data(sources=(Source(path="unused"),), seq_len=length),
        batch=Batch(global_batch=microbatches),
        optimizer=Optimizer(lr=1e-4),
        parallel=Parallel(ranks=ranks, pp=ranks, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1),
        machine=Machine(compute_dtype="float32"),
    )


class Round(NamedTuple):
    """One rank's step."""

    timed: list[Timed]
    stolen: float = 0.0  # share of its actions' time in which others had the processor


class BothClocks:
    """A pipeline's timer that also marks what its thread has used of a processor."""

    origin = common.Elapsed(0.0, 0.0)

    def now(self) -> common.Elapsed:
        """A mark."""
        return common.Elapsed(time.perf_counter(), time.thread_time())

    def seconds(self, begin: common.Elapsed, end: common.Elapsed) -> float:
        """By the clock on the wall."""
        return end.wall - begin.wall


def asleep(rank: int, config: Config, rounds: int, seconds: float) -> list[Round]:
    """The timed actions of each round on one rank whose stages sleep."""
    plan, m = stage_plan(config), config.batch.global_batch
    each, bed = seconds * plan.num_ranks / plan.num_stages, Bed()
    pipeline = Pipeline(
        {stage: Sleeper(each, bed) for stage in plan.stages_of(rank)},
        num_stages=plan.num_stages,
        mesh=Mesh(MeshShape(pp=plan.num_ranks), rank),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda phase, microbatch: None,
    )
    job = Job(tokens=lambda number: torch.zeros(1, 1), shape=lambda number: (1, 1), finish=lambda number, y: None)
    program = lower(training_schedule(config, m), [{}] * plan.num_ranks, [0] * plan.num_ranks, overlap=False)
    found = []
    for _ in range(rounds + 1):
        dist.barrier()
        pipeline.run(program.ranks[rank], job)
        found.append(Round(pipeline.timed))
    return found[1:]


def awake(rank: int, config: Config, rounds: int, _: float) -> list[Round]:
    """The same with the real engine, twice as often."""
    engine = Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=Text(config, 1))
    engine.mesh.clock.timer = BothClocks()
    engine.init_state()
    found = []
    for step in range(2 * rounds + 1):
        dist.barrier()
        engine.train_step(step=step + 1, first_sequence=step * config.batch.global_batch)
        pipeline = engine.passes.pipeline
        marks = [(begin, end) for instruction, begin, end in pipeline.marked if isinstance(instruction, Action)]
        used, took = (sum(end[clock] - begin[clock] for begin, end in marks) for clock in (1, 0))
        found.append(Round(pipeline.timed, 1 - used / took))
    return found[1:]


def compare(work: Any, config: Config, rounds: int, seconds: float) -> dict[str, Any]:
    """Bubbles of one schedule: the median measured one, the formula's, and that of the simulation with measured times."""
    p, m, name = config.parallel.pp, config.batch.global_batch, config.parallel.schedule.replace("_", "-")
    timed = world(work, p, config, rounds, seconds)
    program = lower(training_schedule(config, m), [{}] * p, [0] * p, overlap=False)
    together = sorted(zip(*timed, strict=True), key=lambda ranks: max(rank.stolen for rank in ranks))
    lines = [measured(program, [rank.timed for rank in ranks]) for ranks in together]
    formula = float(of_total(bubble_of_compute(name, p=p, m=m, v=config.parallel.virtual_stages)))
    of: dict[str, Callable[[Timeline], float]] = {
        "measured": _idle,
        "formula": lambda line: formula,
        "calibrated": lambda line: _idle(simulate(line.schedule, _means(line))),
        "simulated": lambda line: _idle(simulate(line.schedule, averages(line))),
        "exact": lambda line: _idle(simulate(line.schedule, _each(line))),
    }
    bubbles = {key: [bubble(line) for line in lines] for key, bubble in of.items()}
    found = bubbles["measured"]
    over = {
        f"measured_over_{key}": [round(one / other, 3) for one, other in zip(found, values, strict=True)]
        for key, values in bubbles.items()
        if key != "measured"
    }
    return {
        **{key: common.median(values[:rounds]) for key, values in bubbles.items()},
        **{key: common.median(values[:rounds]) for key, values in over.items()},
        "all_rounds": {key: common.median(values) for key, values in over.items()},
        "stolen": common.median(round(max(rank.stolen for rank in ranks), 4) for ranks in together[:rounds]),
    }


def _idle(line: Timeline) -> float:
    return float(line.bubble_of_total())


def _each(line: Timeline) -> Duration:
    """Of each action its own time."""
    times = {span.action: span.end - span.begin for span in line.spans}
    return times.__getitem__


def _means(line: Timeline) -> Duration:
    """The mean of each kind of action, the same on all stages."""
    times: dict[Kind, list[Time]] = {}
    for span in line.spans:
        times.setdefault(span.action.kind, []).append(span.end - span.begin)
    means = {kind: sum(values, start=0.0) / len(values) for kind, values in times.items()}
    return lambda action: means[action.kind]


def _worst(cases: Iterable[Mapping[str, Any]], against: str) -> float:
    largest: float = max(abs(case[f"measured_over_{against}"] - 1) for case in cases)
    return round(largest, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and say it."""
    chosen = common.options(__doc__.splitlines()[0], rounds=5).parse_args(arguments)
    rounds, seconds = (1, 0.002) if chosen.tiny else (chosen.rounds, 0.15)
    m, few, hidden, length = 8, 4, *((32, 32) if chosen.tiny else (768, 256))
    machine = common.Machine()
    sleeps = {name: compare(asleep, config_of(name, ranks=4, microbatches=m, hidden=32), rounds, seconds) for name in SCHEDULES}
    matmuls = {
        name: compare(awake, config_of(name, ranks=2, microbatches=few, hidden=hidden, length=length), rounds, seconds)
        for name in SCHEDULES
    }
    rows = [
        (f"{kind}: {name}", case) for kind, cases in (("sleeps", sleeps), ("matmuls", matmuls)) for name, case in cases.items()
    ]
    worst = {
        "worst_sleeps": _worst(sleeps.values(), "formula"),
        "worst_matmuls": _worst(matmuls.values(), "calibrated"),
        "worst_matmuls_own_stages": _worst(matmuls.values(), "simulated"),
        "worst_engine": _worst(matmuls.values(), "exact"),
        "worst_all_rounds": {
            against: _worst((case["all_rounds"] for case in matmuls.values()), against)
            for against in ("calibrated", "simulated", "exact")
        },
    }
    result = {
        **worst,
        "sleeps_p4": sleeps,
        "matmuls_p2": matmuls,
        "microbatches": {"sleeps": m, "matmuls": few},
        "machine": machine.record(),
    }
    common.emit(result, quiet=chosen.json, rows=[*worst.items(), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
