"""What it costs to know where the time of a step went: the same engine with and without its measurements, in turns.

A turn is a block of steps, so that measurements are put together beside the next step as in a run; the last one of a block is
waited for, which a run does only once. A figure is the median over the rounds of measured seconds / plain seconds; beside it
stands the ratio of processor time over all ranks and threads, which on a busy machine says more. For each layout the measured
shares of the step are printed too, with `other`, which is what no bucket explains. `python -m benchmarks.times --json`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks import common
from benchmarks.engine import CASES, Case, config_of
from benchmarks.engine_rank import Text
from benchmarks.ranks import world
from ftrain.checkpoint.messages import StepTimes
from ftrain.config import Config
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.train.step import Engine
from ftrain.train.times import Times

BLOCK = 6
LAYOUTS = {**CASES, "tp2_pp2": Case({"ranks": 4, "tp": 2, "pp": 2}, {})}


class Block(NamedTuple):
    """A turn on one rank: seconds until all have finished, and of the processors, this process' part."""

    seconds: float
    cpu_seconds: float


def contest(rank: int, config: Config, rounds: int, seed: int, block: int) -> tuple[list[Block], list[Block], list[StepTimes]]:
    """Blocks without and with measurements, and on rank 0 what was measured."""
    engine = Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=Text(config, seed))
    engine.init_state()
    told: list[StepTimes] = []
    times = Times(engine.passes, engine.device, report=told.append)
    plain: list[Block] = []
    measured: list[Block] = []
    _block(engine, None, 1)
    for number in range(rounds):
        turns = [(plain, None), (measured, times)]
        for blocks, watch in turns if number % 2 else reversed(turns):
            blocks.append(_block(engine, watch, block))
    return plain, measured, told


def _block(engine: Engine, times: Times | None, steps: int) -> Block:
    _meet()
    begin, cpu = time.perf_counter(), time.process_time()
    engine.after_vote = times.voted if times else _nothing
    size = engine.config.batch.global_batch
    for step in range(engine.step + 1, engine.step + 1 + steps):
        if times:
            times.begin()
        engine.train_step(step=step, first_sequence=(step - 1) * size)
        if times:
            times.end(step)
    if times:
        times.finish()
    _meet()
    return Block(time.perf_counter() - begin, time.process_time() - cpu)


def _nothing() -> None:
    """Nobody measures."""


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure(case: Case, *, tiny: bool, rounds: int, seed: int) -> dict[str, Any]:
    """One layout."""
    block = 2 if tiny else BLOCK
    config = config_of(case, tiny=tiny)
    ranks = world(contest, config.parallel.ranks, config, rounds, seed, block)
    plain, measured, told = ranks[0]
    cpu = [[sum(rank[side][i].cpu_seconds for rank in ranks) for i in range(rounds)] for side in (0, 1)]
    total = sum(sum(times.mean.values()) for times in told)
    shares = {bucket: round(sum(times.mean[bucket] for times in told) / total, 4) for bucket in told[0].mean}
    return {
        "measured_over_plain": _paired([b.seconds for b in measured], [b.seconds for b in plain]),
        "of_processor_time": _paired(cpu[1], cpu[0]),
        "step_s": round((common.median([b.seconds for b in plain]) or 0.0) / block, 4),
        "shares": shares,
    }


def _paired(over: Sequence[float], under: Sequence[float]) -> float | None:
    return common.ratio(common.median(a / b for a, b in zip(over, under, strict=True)), 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and say it."""
    parser = common.options((__doc__ or "").splitlines()[0], rounds=9)
    parser.add_argument("--only", choices=sorted(LAYOUTS), help="one layout")
    chosen = parser.parse_args(arguments)
    machine = common.Machine()
    rounds = 2 if chosen.tiny else chosen.rounds
    names = [chosen.only] if chosen.only else list(LAYOUTS)
    cases = {name: measure(LAYOUTS[name], tiny=chosen.tiny, rounds=rounds, seed=chosen.seed) for name in names}
    rows = [
        (name, f"{case['measured_over_plain']} ({case['of_processor_time']} of processor time)") for name, case in cases.items()
    ]
    result = {
        "measured_over_plain": max(case["measured_over_plain"] for case in cases.values()),
        "largest_other": max(case["shares"]["other"] for case in cases.values()),
        "cases": cases,
        "machine": machine.record(),
    }
    common.emit(result, quiet=chosen.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
