"""Loading under another layout than the one that saved: bytes, wall, memory, against PyTorch DCP in the same processes.

    1.25 GiB of fp32 matrices, saved by rows over 4 writers; read warm, from memory the kernel holds
    rows_to_columns   4 ranks, by columns what tensor parallelism cuts by columns (1 GiB)
    4_to_2, 4_to_3    by rows over fewer ranks; 3 does not divide it
    dp_to_tp_pp       2 stages of 2 ranks, half of the arrays each, by rows or columns as tensor parallelism does

Each round opens the checkpoint anew. A figure is that of the slowest rank; bytes and memory are sums over the ranks, bytes as
the kernel counted them, memory as growth over what was resident before. The first load of each kind is compared with what was
saved.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import common
from benchmarks.reshard_cases import PAIRS, WRITERS, arrays, bits, part
from storage.box import Box
from storage.digest import digest_part
from storage.keys import pack_name
from storage.local import LocalStore
from storage.manifest import PackInfo, PackManifest
from storage.merge import merge
from storage.pack import plan_pack, seal, write_part
from storage.run import RunStore

CASES = ("ours", "dcp")


class Ranks:
    """Four processes that answer together."""

    def __init__(self, folder: Path, *, tiny: bool) -> None:
        words = [str(folder), "{rank}", "tiny" if tiny else "full"]
        env = {**os.environ, **common.environment()}
        self._processes = [
            subprocess.Popen(
                common.python("benchmarks.reshard_rank", *(word.format(rank=rank) for word in words)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=common.ROOT,
                env=env,
                text=True,
            )
            for rank in range(WRITERS)
        ]
        self.answers: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """The same request to all, and their answers."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(request).decode() + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a rank is gone; its message is above")
        found: dict[str, Any] = msgspec.json.decode(line)
        return found

    def load(self, pair: str, case: str, number: int) -> float:
        """The slowest rank's seconds of one load."""
        found = self.ask({"do": "load", "pair": pair, "case": case, "check": number == 0})
        wrong = [name for answer in found for name in answer["wrong"]]
        if wrong:
            raise RuntimeError(f"{case} loaded wrong values under {pair}: {wrong[:5]}")
        self.answers.setdefault((pair, case), []).append(found)
        return float(max(answer["seconds"] for answer in found))

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(60)


@contextmanager
def started(folder: Path, *, tiny: bool) -> Iterator[Ranks]:
    """The ranks, ended at the end."""
    ranks = Ranks(folder, tiny=tiny)
    try:
        yield ranks
    finally:
        ranks.close()


def save_ours(folder: Path, *, tiny: bool) -> None:
    """The same values as our checkpoint, one pack for each writer."""
    run = RunStore(LocalStore(folder))
    epoch = run.take_epoch(owner={"benchmark": "reshard"}, starts_from=None)
    held = {array.name: array for array in arrays(tiny=tiny)}
    specs = {name: array.spec() for name, array in held.items()}
    deliveries = []
    for writer in range(WRITERS):
        boxes: list[tuple[str, Box]] = [(name, part(array, 0, WRITERS, writer)) for name, array in held.items()]
        layout = plan_pack(specs, boxes)
        buffer = np.zeros(layout.nbytes, np.uint8)
        for each in layout.parts:
            write_part(buffer, specs[each.array], each, bits(held[each.array], each.box))
        seal(buffer, layout)
        digests = {each.array: digest_part(buffer, specs[each.array], each) for each in layout.parts}
        run.store.put(run.pack_key(1, epoch, 0, writer), buffer.data)
        info = PackInfo(name=pack_name(epoch, 0, writer), nbytes=layout.nbytes)
        deliveries.append(PackManifest(pack=info, arrays=list(specs.values()), parts=list(layout.parts), digests=digests))
    run.commit(merge(deliveries, step=1, epoch=epoch, attempt=0, progress={}, created_s=0.0))


def run(folder: Path, *, rounds: int, tiny: bool) -> dict[str, Any]:
    """The whole benchmark; top-level figures are the worst pair's, the wall that of rows to columns."""
    machine = common.Machine()
    save_ours(folder / "ours", tiny=tiny)
    state = sum(array.spec().nbytes for array in arrays(tiny=tiny))
    with started(folder, tiny=tiny) as ranks:
        ranks.ask({"do": "save"})
        pairs = {pair: _pair(ranks, pair, rounds, state) for pair in PAIRS}
    worst = {key: max(found[key] for found in pairs.values()) for key in ("bytes_read_over_needed", "peak_memory_over_state")}
    return {
        **worst,
        "dcp_wall_over_ours": pairs["rows_to_columns"]["dcp_wall_over_ours"],
        "dcp_cpu_over_ours": pairs["rows_to_columns"]["dcp_cpu_over_ours"],
        "state_gib": round(state / 2**30, 4),
        "pairs": pairs,
        "machine": machine.record(),
    }


def _pair(ranks: Ranks, pair: str, rounds: int, state: int) -> dict[str, Any]:
    cases = {case: partial(ranks.load, pair, case) for case in CASES}
    for case in cases.values():
        case(0)
    ranks.answers.clear()
    seconds = common.interleaved(cases, rounds)
    found: dict[str, Any] = {}
    for case in CASES:
        answers = ranks.answers[pair, case]
        found[case] = {
            **common.summary(seconds[case]),
            "cpu_s": round(common.median(sum(a["cpu_s"] for a in turn) for turn in answers) or 0.0, 4),
            "bytes_read_over_needed": round(max(_sum(turn, "read") / _sum(turn, "needed") for turn in answers), 4),
            "peak_memory_over_state": round(max(_sum(turn, "peak") for turn in answers) / state, 4),
        }
    ours, dcp = found["ours"], found["dcp"]
    return {
        "bytes_read_over_needed": ours["bytes_read_over_needed"],
        "peak_memory_over_state": ours["peak_memory_over_state"],
        "dcp_wall_over_ours": common.ratio(dcp["median_s"], ours["median_s"]),
        "dcp_cpu_over_ours": common.ratio(dcp["cpu_s"], ours["cpu_s"]),
        "dcp_bytes_over_ours": common.ratio(dcp["bytes_read_over_needed"], ours["bytes_read_over_needed"]),
        **found,
    }


def _sum(answers: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(answer[key] for answer in answers))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = common.options(__doc__.splitlines()[0], rounds=5).parse_args(argv)
    with common.scratch(args.dir) as folder:
        result = run(folder, rounds=1 if args.tiny else args.rounds, tiny=args.tiny)
    keys = ("bytes_read_over_needed", "dcp_wall_over_ours", "dcp_cpu_over_ours", "peak_memory_over_state")
    rows = [(f"{pair}: {key}", found[key]) for pair, found in result["pairs"].items() for key in keys]
    common.emit(result, quiet=args.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
