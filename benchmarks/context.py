"""What context parallelism keeps of keys and values, and what it costs: the ring against all-gather, and against one process.

    memory   the largest sum of live keys, values and their gradients (those of the exchange, not a kernel's own) during forward
             and backward of one attention layer, over that of one process' whole sequence: the ring must fall as 1/cp
    time     the same forward and backward on cp ranks of one thread, against one process of one thread. CPU seconds of all
             ranks over those of one process say what the exchange and the merging cost, wherever there are fewer cores

`python -m benchmarks.context --json`
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import common
from benchmarks.ranks import world
from ftrain.config import CpExchange
from ftrain.model.attention import attention
from ftrain.parallel.context import ContextGroup
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import MeshShape

EXCHANGES: tuple[CpExchange, ...] = ("all_gather", "ring")
HEADS, KV_HEADS, SIZE = 8, 2, 64


class LiveBlocks(TorchDispatchMode):
    """The most bytes that stacks of keys and values, [..., 2, 1, T, H, K], take at one time; nothing else has such a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Carry out, and look at what was made."""
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-5:-3] == (2, 1) and out._base is None:
            storage = out.untyped_storage()
            self._live[storage.data_ptr()] = (weakref.ref(storage), storage.nbytes())
            self._live = {key: held for key, held in self._live.items() if held[0]() is not None}
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


def operands(length: int) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, length, heads, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def layer(rank: int, cp: int, exchange: CpExchange, length: int, rounds: int) -> tuple[list[common.Elapsed], int]:
    """Forward and backward on one rank: time of each round, and the most bytes of keys, values and gradients."""
    group = ContextGroup(mesh=Mesh(MeshShape(cp=cp), rank), exchange=exchange) if cp > 1 else None
    *mine, dout = [x if group is None else group.cut(x) for x in operands(length)]

    def once() -> None:
        leaves = [x.clone().requires_grad_() for x in mine]
        attention(*leaves, group).backward(dout)

    live = LiveBlocks()
    with live:
        once()
    elapsed = []
    for _ in range(rounds):
        begin, cpu = time.perf_counter(), time.process_time()
        once()
        elapsed.append(common.Elapsed(time.perf_counter() - begin, time.process_time() - cpu))
    return elapsed, live.peak


def figures(ranks: Sequence[tuple[list[common.Elapsed], int]]) -> dict[str, float]:
    """The slowest rank's wall time and all ranks' CPU seconds, by medians over the rounds; the largest peak."""
    rounds = list(zip(*(elapsed for elapsed, _ in ranks), strict=True))
    wall = common.median(max(rank.wall for rank in entry) for entry in rounds)
    cpu = common.median(sum(rank.cpu for rank in entry) for entry in rounds)
    assert wall is not None
    assert cpu is not None
    return {"wall_s": round(wall, 4), "cpu_s": round(cpu, 4), "peak_bytes": max(peak for _, peak in ranks)}


def measure(sizes: Sequence[int], length: int, rounds: int) -> dict[str, Any]:
    """All cases, one after the other in each of three turns, of which the least disturbed (by CPU seconds) counts."""
    cases = [(1, EXCHANGES[0]), *((cp, exchange) for cp in sizes for exchange in EXCHANGES)]
    found: dict[str, dict[str, float]] = {}
    for _ in range(3):
        for cp, exchange in cases:
            name = f"cp{cp} {exchange}" if cp > 1 else "one process"
            once = figures(world(layer, cp, cp, exchange, length, rounds))
            found[name] = min(found.get(name, once), once, key=lambda entry: entry["cpu_s"])
    return found


def main() -> int:
    """The benchmark's command line."""
    options = common.options(__doc__.splitlines()[0] if __doc__ else "", rounds=3).parse_args()
    machine = common.Machine()
    sizes, length = ((2,), 512) if options.tiny else ((2, 4, 8), 4096)
    found = measure(sizes, length, options.rounds)
    whole = 4 * length * KV_HEADS * SIZE * 4  # bytes of keys, values and the gradient of each
    one = found["one process"]
    kept = {name: entry["peak_bytes"] / whole for name, entry in found.items() if name != "one process"}
    falls = [kept[f"cp{cp} ring"] * cp for cp in sizes]
    result = {
        "ring_peak_times_cp": round(max(falls), 3),  # of the whole sequence's; constant over cp: it falls as 1/cp
        "ring_peak_times_cp_spread": round(max(falls) / min(falls), 3),
        "ring_over_all_gather": {f"cp{cp}": round(kept[f"cp{cp} ring"] / kept[f"cp{cp} all_gather"], 3) for cp in sizes},
        "cpu_over_one_process": {
            name: common.ratio(entry["cpu_s"], one["cpu_s"]) for name, entry in found.items() if name != "one process"
        },
        "speedup_of_two": {e: common.ratio(one["wall_s"], found[f"cp2 {e}"]["wall_s"]) for e in EXCHANGES},
        "kept_of_whole": {name: round(share, 3) for name, share in kept.items()},
        "cases": found,
        "tokens": length,
        "machine": machine.record(),
    }
    rows = [(name, f"K/V and gradients {share:.2f} of the whole") for name, share in kept.items()]
    common.emit(result, quiet=options.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
