"""The planner's bytes against those found on running ranks, for layouts of every kind.

    state          weights, gradients, masters and moments, padding included; found: all storages alive between two steps
    activations    what backward keeps at the most, and messages under way between stages; found: all storages alive, beyond
                   the state, between two actions of a step
    rss            growth of the process; beside it the prediction of everything. Allocator, threads and libraries come on top

Layouts with experts have them all on each rank: where they are shared out, a rank holds what the router happens to send it.

`worst_state_error` and `worst_activations_error`: largest |predicted / found - 1| over all ranks of all layouts.
`python -m benchmarks.memory --json`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.memory_rank import Found, look
from benchmarks.ranks import world
from ftrain.config import Batch, Config, Data, Machine, Model, Optimizer, Parallel, Run, Source
from ftrain.plan import memory, profile
from ftrain.plan.setup import Setup, options_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "one, selective": {"recompute": "selective"},
    "one, full": {"recompute": "full"},
    "tp2": {"ranks": 2, "tp": 2},
    "tp2, no sp": {"ranks": 2, "tp": 2, "sp": False},
    "tp2, no regather, selective": {"ranks": 2, "tp": 2, "sp_regather": False, "recompute": "selective"},
    "dp2": {"ranks": 2},
    "pp2, 1f1b": {"ranks": 2, "pp": 2},
    "pp2, gpipe": {"ranks": 2, "pp": 2, "schedule": "gpipe"},
    "pp2, interleaved": {"ranks": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "pp2, zb_h1": {"ranks": 2, "pp": 2, "schedule": "zb_h1"},
    "pp2, zb_v": {"ranks": 2, "pp": 2, "schedule": "zb_v"},
    "tp2 pp2, full": {"ranks": 4, "tp": 2, "pp": 2, "recompute": "full"},
    "experts": {"experts": 4},
    "experts, tp2": {"experts": 4, "ranks": 2, "tp": 2},
}


def config_of(changes: dict[str, Any], *, tiny: bool) -> Config:
    """The same training under another layout; `experts`: instead of one SwiGLU in each layer."""
    hidden, cut = 64 if tiny else 256, {name: value for name, value in changes.items() if name != "experts"}
    return Config(
        run=Run(url="unused", steps=100),
        model=Model(
            layers=4, hidden=hidden, heads=8, kv_heads=4, ffn=3 * hidden, vocab=8 * hidden, experts=changes.get("experts", 0)
        ),
        data=Data(sources=(Source(path="unused"),), seq_len=256),
        batch=Batch(global_batch=8, micro_batch=1),
        optimizer=Optimizer(lr=1e-4),
        parallel=Parallel(**cut),
        machine=Machine(device="cpu", compute_dtype="float32"),
    )


def measure(changes: dict[str, Any], *, tiny: bool) -> list[dict[str, Any]]:
    """Predicted and found on each rank of a layout."""
    config = config_of(changes, tiny=tiny)
    setup = Setup(config=config, profile=profile.load("laptop"), options=options_of(config))
    predicted = memory.all_ranks(setup)
    found: list[Found] = world(look, config.parallel.ranks, config, 2)
    return [_beside(predicted[rank.pp], float(memory.link_bytes(setup)), rank) for rank in found]


def _beside(predicted: memory.RankMemory, links: float, found: Found) -> dict[str, Any]:
    kept = float(predicted.activations) + links
    return {
        "pp": found.pp,
        "tp": found.tp,
        "state": found.state,
        "state_predicted": float(predicted.state),
        "state_error": _error(float(predicted.state), found.state),
        "activations": found.activations,
        "activations_predicted": kept,
        "activations_error": _error(kept, found.activations),
        "peak_beyond_state": found.peak,
        "total_predicted": float(predicted.total),
        "rss_growth": found.rss,
    }


def _error(predicted: float, found: int) -> float:
    return round(predicted / found - 1, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and say it."""
    parser = common.options(__doc__.splitlines()[0], rounds=1)
    parser.add_argument("--only", choices=sorted(LAYOUTS), help="one layout")
    chosen = parser.parse_args(arguments)
    names = [chosen.only] if chosen.only else list(LAYOUTS)
    layouts = {name: measure(LAYOUTS[name], tiny=chosen.tiny) for name in names}
    worst = {
        f"worst_{kind}_error": max((abs(rank[f"{kind}_error"]) for ranks in layouts.values() for rank in ranks), default=None)
        for kind in ("state", "activations")
    }
    rows = [
        (f"{name}: pp {rank['pp']} tp {rank['tp']}", f"state {rank['state_error']:+.2%}, "
         f"activations {rank['activations_error']:+.2%} of {rank['activations']:,}")
        for name, ranks in layouts.items()
        for rank in ranks
    ]  # fmt: skip
    common.emit({**worst, "layouts": layouts}, quiet=chosen.json, rows=[*worst.items(), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
