"""ftrain.Checkpointer against PyTorch DCP on the same state: how long training stands still, and until everything is stored.

    2 ranks, FSDP2 with AdamW, about 250 MiB a rank
    ours      Checkpointer.save, then wait
    memcpy    as many warm bytes, both ranks at once
    dcp_*     save, and async_save in thread and process mode, with the defaults and with a stager that is kept
    step      a step of training without a save
    ours_overlapped, dcp_*_async_stager   a save whose copy runs beside the step that follows, and that step

`dcp_stall_over_ours`: the shortest stall of any of DCP's forms over that of ours, which is the overlapped one's. Each stall is
all that the loop waits for, also before the optimizer's step. What the step beside a save took longer is `inflation`; that
includes what storing takes from it on the same processors. `phases_ms` says what the stalls are made of.
`blocking`: the same of the forms that return when the state may be changed (`dcp_defaults_...`: of those without a kept
stager). There a copy is the floor for everybody.
`dcp_wall_over_ours`: the fastest form's time to storage over ours.
`bytes_read_over_needed`: what a load under another layout reads over what its ranks hold, the worst of several.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import common
from benchmarks.checkpointer_rank import Result
from benchmarks.peers.dcp import BESIDE
from ftrain.checkpoint.shards import Cut, held_intervals
from storage.box import Box
from storage.local import LocalStore
from storage.manifest import Manifest
from storage.reader import LIMITS
from storage.reshard import plan_reads
from storage.run import RunStore

WORLD = 2
TIMEOUT_S = 540.0
LAYOUTS = {"3 by rows": (3, 0), "4 by rows": (4, 0), "1": (1, 0), "TP 2 by columns": (2, 1), "TP 4 by columns": (4, 1)}


def measure(folder: Path, *, size: str, rounds: int) -> list[Result]:
    """All cases on all ranks."""
    results = [folder / f"result-{rank}" for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            common.python(
                "benchmarks.checkpointer_rank",
                str(rank),
                str(WORLD),
                str(folder / "rendezvous"),
                str(folder),
                size,
                str(rounds),
                str(results[rank]),
            ),
            env={**os.environ, **common.environment()},
            stdout=sys.stderr,
        )
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            if process.wait(TIMEOUT_S):
                raise RuntimeError(f"a rank ended with {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in results]


def bytes_read(manifest: Manifest) -> dict[str, float]:
    """Layout -> bytes that all its ranks read, over bytes that they hold."""
    found = {}
    for name, (world, dim) in LAYOUTS.items():
        read = needed = 0
        for rank in range(world):
            wants = [(spec.name, box) for spec in manifest.arrays if (box := part(spec.shape, world, dim, rank)) is not None]
            plan = plan_reads(manifest, wants, limits=LIMITS)
            read, needed = read + plan.read_bytes, needed + plan.wanted_bytes
        found[name] = round(read / needed, 4)
    return found


def part(shape: Sequence[int], world: int, dim: int, rank: int) -> Box | None:
    """What a rank holds of an array cut along `dim` (whole, if the array has no such dim); None if that is nothing."""
    if dim >= len(shape):
        return Box.whole(shape)
    held = held_intervals(shape[dim], [Cut(0, world, dim)], (rank,))
    if not held:
        return None
    ((start, stop),) = held
    return Box(
        tuple(start if d == dim else 0 for d in range(len(shape))),
        tuple(stop - start if d == dim else n for d, n in enumerate(shape)),
    )


def overlapped(peers: Sequence[str], stall: Mapping[str, float], steps: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Saves whose copy runs beside the next step: how much longer than one without a save the step took."""
    longer = {case: [w - wo for w, wo in zip(steps[case], steps["step"], strict=True)] for case in ("ours_overlapped", *peers)}
    inflation = {
        case: dict(
            zip(("median_s", "low_s", "high_s"), (round(value, 4) for value in common.median_within(values)), strict=True)
        )
        for case, values in longer.items()
    }
    return {
        "stall_over_memcpy": common.ratio(stall["ours_overlapped"], stall["memcpy"]),
        "inflation_over_memcpy": {case: common.ratio(each["median_s"], stall["memcpy"]) for case, each in inflation.items()},
        "inflation": inflation,
        "step": common.summary(steps["step"]),
    }


def run(folder: Path, *, rounds: int, tiny: bool) -> dict[str, Any]:
    """The whole benchmark; the result as it is printed."""
    machine = common.Machine()
    results = measure(folder, size="tiny" if tiny else "full", rounds=rounds)
    stalls, walls, steps, phases = {}, {}, {}, {}
    for case in results[0].times:
        both = list(zip(*(result.times[case] for result in results), strict=True))
        stalls[case] = [max(each.stall for each in ranks) for ranks in both]
        walls[case] = [max(each.wall for each in ranks) for ranks in both]
        steps[case] = [max(each.step for each in ranks) for ranks in both]
        phases[case] = {
            phase: round(1000 * (common.median(max(each.phases[phase] for each in ranks) for ranks in both) or 0.0), 2)
            for phase in both[0][0].phases
        }
    stall = {case: common.median(values) or 0.0 for case, values in stalls.items()}
    wall = {case: common.median(values) or 0.0 for case, values in walls.items()}
    beside = [f"dcp_{form}" for form in BESIDE]
    everything = [case for case in stall if case.startswith("dcp")]
    peers = [case for case in everything if case not in beside]
    checkpoint = RunStore(LocalStore(str(folder / "ours"))).open()
    report = checkpoint.verify()
    if not report.ok:
        raise RuntimeError(f"what was stored does not verify: {report.problems[:5]}")
    read = bytes_read(checkpoint.manifest)
    return {
        "dcp_stall_over_ours": common.ratio(min(stall[case] for case in everything), stall["ours_overlapped"]),
        "dcp_wall_over_ours": common.ratio(min(wall[case] for case in peers), wall["ours"]),
        "bytes_read_over_needed": max(read.values()),
        "dcp_best_stall": min(everything, key=stall.__getitem__),
        "dcp_best_wall": min(peers, key=wall.__getitem__),
        "phases_ms": {case: held for case, held in phases.items() if held},
        "overlapped": overlapped(beside, stall, steps),
        "blocking": {
            "dcp_stall_over_ours": common.ratio(min(stall[case] for case in peers), stall["ours"]),
            "dcp_best_stall": min(peers, key=stall.__getitem__),
            "dcp_defaults_stall_over_ours": common.ratio(min(stall["dcp_thread"], stall["dcp_process"]), stall["ours"]),
            "stall_over_memcpy": common.ratio(stall["ours"], stall["memcpy"]),
        },
        "mib_per_rank": round(max(result.nbytes for result in results) / 2**20, 1),
        "verified_bytes": report.read_bytes,
        "layouts_read": read,
        "stall": {case: common.summary(values) for case, values in stalls.items()},
        "wall": {case: common.summary(values) for case, values in walls.items()},
        "machine": machine.record(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = common.options(__doc__.splitlines()[0], rounds=5).parse_args(argv)
    with common.scratch(args.dir) as folder:
        result = run(folder, rounds=1 if args.tiny else args.rounds, tiny=args.tiny)
    rows = [
        (case, f"stall {1000 * held['median_s']:.1f} ms, wall {1000 * result['wall'][case]['median_s']:.1f} ms")
        for case, held in result["stall"].items()
    ]
    rows += [(f"phases of {case}", f"{held} ms") for case, held in result["phases_ms"].items()]
    rows += [(name, result[name]) for name in ("dcp_stall_over_ours", "dcp_wall_over_ours", "bytes_read_over_needed")]
    rows += [(f"{part}: {name}", value) for part in ("overlapped", "blocking") for name, value in result[part].items()]
    common.emit(result, quiet=args.json, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
