"""How long the stages of a pipeline really wait, against the formula and the simulated schedule.

    sleeps    four ranks whose stages sleep for a fixed time (forward = backward of inputs = backward of weights): more ranks
              than cores do not disturb each other, so what is measured is the executor, its order and its links
    matmuls   two ranks of the real engine; the prediction is the schedule simulated with the measured mean of each action

Bubble: idle share of the ranks' time between the first begin and the last end. `python -m benchmarks.bubble --json`
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import common
from ftrain.config import Batch, Config, Data, Machine, Model, Optimizer, Parallel, PipelineSchedule, Run, Source
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.pipeline import Job, Pipeline, Stage, Timed, measured
from ftrain.parallel.program import lower
from ftrain.parallel.shape import MeshShape, mesh_shape
from ftrain.parallel.stages import stage_plan, training_schedule
from ftrain.parallel.timeline import averages, simulate
from ftrain.plan.schedule import bubble_of_compute, of_total
from ftrain.train.step import Engine

SCHEDULES: tuple[PipelineSchedule, ...] = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
WIDTH = 8


class Sleeper(Stage):
    """A stage that computes nothing and takes its time: `seconds` for each third of the work."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Stream(), [["all"]], [frozenset()])
        self.seconds = seconds

    def forward(self, microbatch: int, x: torch.Tensor, job: Job, *, ends: bool) -> torch.Tensor:
        """One third."""
        time.sleep(self.seconds)
        return torch.zeros(1, WIDTH)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Two thirds."""
        time.sleep(2 * self.seconds)
        return torch.zeros(1, WIDTH)

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """One third."""
        time.sleep(self.seconds)
        return torch.zeros(1, WIDTH)

    def backward_weight(self, microbatch: int, index: int | None = None) -> None:
        """One third."""
        time.sleep(self.seconds)


class Stream:
    """The shape of what travels between sleepers."""

    def __call__(self, x: torch.Tensor, part: Sequence[str], documents: torch.Tensor | None) -> torch.Tensor:
        """Nothing is computed."""
        return x

    def stream_shape(self, sequences: int, length: int) -> tuple[int, ...]:
        """A few bytes."""
        return sequences, WIDTH


class Text:
    """Random tokens."""

    def __init__(self, config: Config) -> None:
        self.vocab, self.length = config.model.vocab, config.data.seq_len

    def sequences(self, first: int, count: int) -> Any:
        """Training sequences."""
        numbers = np.random.default_rng(first).integers(0, self.vocab, (count, self.length + 1))
        tokens, targets = numbers[:, :-1].copy(), numbers[:, 1:].copy()
        return type("Arrays", (), {"tokens": tokens, "targets": targets, "valid": np.ones_like(tokens, dtype=bool)})()

    heldout = sequences


def config_of(schedule: PipelineSchedule, *, ranks: int, microbatches: int, hidden: int) -> Config:
    """A run of that schedule; two layers a virtual stage at least."""
    return Config(
        run=Run(url="unused", steps=100),
        model=Model(layers=4 * ranks, hidden=hidden, heads=4, ffn=3 * hidden, vocab=512),
        data=Data(sources=(Source(path="unused"),), seq_len=128),
        batch=Batch(global_batch=microbatches),
        optimizer=Optimizer(lr=1e-4),
        parallel=Parallel(ranks=ranks, pp=ranks, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1),
        machine=Machine(compute_dtype="float32"),
    )


def asleep(rank: int, config: Config, rounds: int, seconds: float) -> list[list[Timed]]:
    """The timed actions of each round on one rank whose stages sleep."""
    plan, m = stage_plan(config), config.batch.global_batch
    each = seconds * plan.num_ranks / plan.num_stages
    pipeline = Pipeline(
        {stage: Sleeper(each) for stage in plan.stages_of(rank)},
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
        found.append(pipeline.timed)
    return found[1:]


def awake(rank: int, config: Config, rounds: int, _: float) -> list[list[Timed]]:
    """The same with the real engine."""
    engine = Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=Text(config))
    engine.init_state()
    found = []
    for step in range(rounds + 1):
        dist.barrier()
        engine.train_step(step=step + 1, first_sequence=step * config.batch.global_batch)
        found.append(engine.passes.pipeline.timed)
    return found[1:]


def _rank(rank: int, world: int, store: str, work: Any, arguments: tuple[Any, ...], answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120))
    answers.put((rank, work(rank, *arguments)))
    dist.barrier()
    dist.destroy_process_group()


def world(work: Any, size: int, *arguments: Any) -> list[Any]:
    """What `work` returned on each rank."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        store = str(Path(folder) / "store")
        ranks = [context.Process(target=_rank, args=(r, size, store, work, arguments, answers)) for r in range(size)]
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=300) for _ in ranks)
        for process in ranks:
            process.join()
    return [found[rank] for rank in range(size)]


def compare(work: Any, config: Config, rounds: int, seconds: float) -> dict[str, Any]:
    """Bubbles of one schedule: the median measured one, the formula's, and that of the simulation with measured times."""
    p, m, name = config.parallel.pp, config.batch.global_batch, config.parallel.schedule.replace("_", "-")
    timed = world(work, p, config, rounds, seconds)
    program = lower(training_schedule(config, m), [{}] * p, [0] * p, overlap=False)
    lines = [measured(program, [rank[number] for rank in timed]) for number in range(rounds)]
    found = common.median(float(line.bubble_of_total()) for line in lines)
    simulated = common.median(float(simulate(line.schedule, averages(line)).bubble_of_total()) for line in lines)
    formula = float(of_total(bubble_of_compute(name, p=p, m=m, v=config.parallel.virtual_stages)))
    return {
        "measured": found,
        "formula": formula,
        "simulated": simulated,
        "measured_over_formula": common.ratio(found, formula),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and say it."""
    chosen = common.options(__doc__.splitlines()[0], rounds=3).parse_args(arguments)
    rounds, seconds = (1, 0.002) if chosen.tiny else (chosen.rounds, 0.03)
    m, hidden = (8, 32) if chosen.tiny else (16, 128)
    machine = common.Machine()
    sleeps = {name: compare(asleep, config_of(name, ranks=4, microbatches=m, hidden=32), rounds, seconds) for name in SCHEDULES}
    matmuls = {
        name: compare(awake, config_of(name, ranks=2, microbatches=m, hidden=hidden), rounds, seconds) for name in SCHEDULES
    }
    rows = [
        (f"{kind}: {name}", case) for kind, cases in (("sleeps", sleeps), ("matmuls", matmuls)) for name, case in cases.items()
    ]
    result = {"sleeps_p4": sleeps, "matmuls_p2": matmuls, "microbatches": m, "machine": machine.record()}
    common.emit(result, quiet=chosen.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
