"""Tokens per second of the engine over those of PyTorch's own means, for the same parallelism on the same model.

    single   one process                     plain PyTorch: SDPA, fused AdamW, fp32
    tp2      TP 2 with sequence parallelism   DTensor (`parallelize_module`), sequence and loss parallel
    pp2      1F1B on two stages               `torch.distributed.pipelining`, 1F1B
    dp2      ZeRO-1 on two replicas           DDP, optimizer whole (fused AdamW) and cut (ZeroRedundancyOptimizer); FSDP2,
                                              resharding after forward (ZeRO-3) and not (ZeRO-2): the faster of the two counts

Both sides live in the same processes and step in turns: one thread a rank, fp32 activations, the same initial values,
micro-batches and clipping; ours besides keeps bf16 weights beside fp32 masters, which the peers do not. Under tp2 both keep the
gathered input of a block for backward: `parallel.sp_regather`, which gathers it again to save memory, has no counterpart in
DTensor. A figure is the median over the rounds of peer seconds / our seconds of the same round; beside it stands the ratio of
processor time over all ranks and threads, which on a busy machine says more. `python -m benchmarks.engine --json`
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import common
from benchmarks.engine_rank import Turn, contest
from benchmarks.ranks import world
from ftrain.config import Batch, Config, Data, Machine, Model, Optimizer, Parallel, Run, Source


class Case(NamedTuple):
    """A layout, and who is to be compared with it."""

    parallel: dict[str, Any]
    figures: dict[str, tuple[str, ...]]  # by name of the ratio: the peers of which the fastest counts


CASES: dict[str, Case] = {
    "single": Case({}, {"single_over_plain_pytorch": ("pytorch",)}),
    "tp2": Case({"ranks": 2, "tp": 2, "sp_regather": False}, {"tp2_over_dtensor": ("dtensor",)}),
    "pp2": Case({"ranks": 2, "pp": 2}, {"pp2_over_torch_pipelining": ("pipelining",)}),
    "dp2": Case({"ranks": 2}, {"zero1_dp2_over_ddp": ("ddp", "ddp_zero"), "zero1_dp2_over_fsdp2": ("fsdp2", "fsdp2_kept")}),
}


def config_of(case: Case, *, tiny: bool) -> Config:
    """The same training under the case's layout."""
    small = Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=128)
    large = Model(layers=4, hidden=256, heads=8, kv_heads=4, ffn=768, vocab=4096)
    return Config(
        run=Run(url="unused", steps=1000, seed=1),
        model=small if tiny else large,
        data=Data(sources=(Source(path="unused"),), seq_len=32 if tiny else 256),
        batch=Batch(global_batch=8, micro_batch=1),
        optimizer=Optimizer(lr=3e-4),
        parallel=Parallel(**case.parallel),
        machine=Machine(device="cpu", compute_dtype="float32", threads=1),
    )


def measure(case: Case, *, tiny: bool, rounds: int, seed: int) -> dict[str, Any]:
    """Everything about one layout."""
    config = config_of(case, tiny=tiny)
    peers = tuple(name for names in case.figures.values() for name in names)
    ranks = world(contest, config.parallel.ranks, config, peers, rounds, seed)
    turns: Mapping[str, Turn] = ranks[0]
    tokens = config.batch.global_batch * config.data.seq_len
    contestants = {
        name: {
            "tokens_per_s": round(tokens / (common.median(turn.seconds) or 1.0), 1),
            "first_loss": round(max(rank[name].first_loss for rank in ranks), 4),
            **common.summary(turn.seconds),
        }
        for name, turn in turns.items()
    }
    return {"figures": _figures(case, ranks), "contestants": contestants}


def _figures(case: Case, ranks: Sequence[Mapping[str, Turn]]) -> dict[str, dict[str, Any]]:
    """Each ratio against its fastest peer, by paired medians."""
    found, turns = {}, ranks[0]
    for figure, names in case.figures.items():
        fastest = min(names, key=lambda name: common.median(turns[name].seconds) or 0.0)
        found[figure] = {
            "value": _paired(turns[fastest].seconds, turns["ours"].seconds),
            "of_processor_time": _paired(*(_summed(rank[name].cpu_seconds for rank in ranks) for name in (fastest, "ours"))),
            "peer": fastest,
        }
    return found


def _paired(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    return common.ratio(common.median(a / b for a, b in zip(theirs, ours, strict=True)), 1.0)


def _summed(of_ranks: Iterable[Sequence[float]]) -> list[float]:
    return [sum(values) for values in zip(*of_ranks, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and say it."""
    parser = common.options(__doc__.splitlines()[0], rounds=9)
    parser.add_argument("--only", choices=sorted(CASES), help="one layout")
    chosen = parser.parse_args(arguments)
    machine = common.Machine()
    rounds = 2 if chosen.tiny else chosen.rounds
    names = [chosen.only] if chosen.only else list(CASES)
    cases = {name: measure(CASES[name], tiny=chosen.tiny, rounds=rounds, seed=chosen.seed) for name in names}
    figures = {figure: held["value"] for case in cases.values() for figure, held in case["figures"].items()}
    rows: list[tuple[str, object]] = list(figures.items())
    rows += [
        (f"{case}: {name}", f"{entry['tokens_per_s']:,.0f} tokens/s, first loss {entry['first_loss']}")
        for case, held in cases.items()
        for name, entry in held["contestants"].items()
    ]
    common.emit({**figures, "cases": cases, "machine": machine.record()}, quiet=chosen.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
