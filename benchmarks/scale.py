"""What a checkpoint of the largest models costs in everything but its bytes: index, tiling check, commit, read plan.

    500B on 5,120 writers and 405B on 16,384, the layouts of configs/; nothing is allocated, every box is real
    deliveries   what each keeper sends, encoded as it is sent, boxes from `parallel.layout` and `parallel.buckets`
    commit       decode all of them, merge, check that every array is tiled exactly once, encode the manifest
    view         what the commit writes of the Zarr view, and one array's, made on demand (ADR 0009)
    read plan    one rank under another layout opens the manifest and plans its reads, in a process of its own

The peer is a plain list of the same boxes in Python objects: how long the pairwise check of one array takes that way, and how
large the same index is as JSON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import common
from ftrain.config import Config
from ftrain.load import load
from ftrain.parallel.arrays import SLOTS, WEIGHTS, StateTypes, array_specs
from ftrain.parallel.buckets import Bucket, plan_buckets, state_boxes
from ftrain.parallel.layout import parameters
from ftrain.parallel.shape import Coordinate, mesh_shape
from storage.box import Box
from storage.keys import pack_name
from storage.manifest import Manifest, PackInfo, PackManifest, decode
from storage.merge import merge
from storage.pack import plan_pack
from storage.reader import LIMITS
from storage.reshard import plan_reads
from storage.zarr_view import array_files, reference_files

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A model, the layout that wrote it (its config's), and another one that reads it."""

    config: str
    other: tuple[str, ...]
    tiny: bool = False


CASES = {
    "dense-500b": Case("configs/dense-500b.toml", ("parallel.ranks=4096", "parallel.tp=4", "parallel.pp=16")),
    "llama3-405b": Case("configs/llama3-405b.toml", ("parallel.ranks=8192", "parallel.tp=4", "parallel.pp=8")),
}
SMALL = ("model.layers=4", "model.hidden=512", "model.heads=8", "model.kv_heads=8", "model.ffn=2048", "model.vocab=4096")
TINY = {
    name: Case(
        case.config,
        (*SMALL, "parallel.ranks=8", "parallel.tp=4", "parallel.pp=1", "parallel.bucket_mib=4", "batch.global_batch=64"),
        tiny=True,
    )
    for name, case in CASES.items()
}
TINY_WRITER = (*SMALL, "parallel.ranks=16", "parallel.tp=2", "parallel.pp=2", "parallel.bucket_mib=4", "batch.global_batch=64")


class Layout:
    """Which boxes each place of a mesh writes; what is the same for a whole stage is planned once."""

    def __init__(self, config: Config) -> None:
        self.mesh = mesh_shape(config)
        self._bytes = config.parallel.bucket_mib * MIB
        self._specs = parameters(config.model, self.mesh)
        self.arrays = array_specs(self._specs, self.mesh, bucket_bytes=self._bytes, types=StateTypes())
        self._buckets = cache(self._plan)

    def _plan(self, tp: int, pp: int) -> tuple[Bucket, ...]:
        return plan_buckets(self._specs, self.mesh, Coordinate(tp=tp, pp=pp), bucket_bytes=self._bytes)

    def boxes(self, coordinate: Coordinate) -> list[tuple[str, Box]]:
        """Parameters and boxes of one place's ZeRO-1 share."""
        return state_boxes(self._buckets(coordinate.tp, coordinate.pp), self.mesh, coordinate)


def deliveries(layout: Layout) -> Iterator[bytes]:
    """What every writer sends to the coordinator, in rank order."""
    arrays = {spec.name: spec for spec in layout.arrays}
    for rank, coordinate in enumerate(layout.mesh.coordinates()):
        pack = plan_pack(arrays, [(f"{slot}/{name}", box) for name, box in layout.boxes(coordinate) for slot in SLOTS])
        yield PackManifest(
            pack=PackInfo(name=pack_name(1, 1, rank), nbytes=pack.nbytes),
            arrays=layout.arrays if rank == 0 else list(pack.specs.values()),
            parts=list(pack.parts),
            digests={name: hash((name, rank)) % 2**64 for name in pack.specs},
        ).encode()


def write(layout: Layout, folder: Path) -> tuple[dict[str, Any], Manifest]:
    """The coordinator's side of a commit."""
    sent = list(deliveries(layout))
    begin, cpu = time.perf_counter(), time.process_time()
    manifest = merge(
        (PackManifest.decode(raw) for raw in sent), step=1000, epoch=1, attempt=1, progress={"step": 1000}, created_s=0.0
    )
    data = manifest.encode()
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    (folder / "manifest").write_bytes(data)
    facts = {
        "writers": layout.mesh.world,
        "arrays": len(manifest.arrays),
        "parts": len(manifest.table),
        "chunks": _num_chunks(manifest),
        "state_tib": round(manifest.nbytes / 2**40, 3),
        "bytes_over_14": round(manifest.nbytes / _logical_nbytes(manifest), 5),
        "delivered_mb": round(sum(map(len, sent)) / 1e6, 2),
        "manifest_mb": round(len(data) / 1e6, 3),
        "commit_check_s": round(seconds, 3),
        "commit_check_cpu_s": round(cpu_s, 3),
    }
    return facts, manifest


def _logical_nbytes(manifest: Manifest) -> int:
    return sum(spec.nbytes for spec in manifest.arrays)


def _num_chunks(manifest: Manifest) -> int:
    tiles = [spec.tile + (1,) * (manifest.table.offset.shape[1] - len(spec.tile)) for spec in manifest.arrays]
    total = 0
    for number, tile in enumerate(tiles):
        shapes = manifest.table.shape[manifest.table.rows_of(number)]
        total += int((-(-shapes // list(tile))).prod(axis=1).sum())
    return total


def peer(manifest: Manifest) -> dict[str, Any]:
    """The same index as plain objects: pairwise overlap check of the array with most boxes, and its size as JSON."""
    rows = [manifest.table.rows_of(number) for number in range(len(manifest.arrays))]
    number = max(range(len(rows)), key=lambda n: len(rows[n]))
    ndim = len(manifest.arrays[number].shape)
    boxes = [Box(*manifest.table.box(int(row), ndim)) for row in rows[number]]
    begin = time.process_time()
    overlaps = sum(a.intersect(b) is not None for i, a in enumerate(boxes) for b in boxes[:i])
    cpu_s = time.process_time() - begin
    assert overlaps == 0
    text = json.dumps([[p.array, p.offset, p.shape, p.position, info.name] for info, p in manifest.parts])
    return {"boxes_of_one_array": len(boxes), "pairwise_cpu_s": round(cpu_s, 3), "json_mb": round(len(text) / 1e6, 2)}


def view(manifest: Manifest) -> dict[str, Any]:
    """The Zarr view: what a commit writes of it, and what the array with most chunks takes when its view is asked for."""
    written = sum(len(data) for _, data in reference_files(manifest, base_url="s3://bucket/run/checkpoints/step-00001000"))
    largest = max(manifest.arrays, key=lambda spec: math.prod(-(-n // t) for n, t in zip(spec.shape, spec.tile, strict=True)))
    begin = time.process_time()
    ((_, data),) = array_files(manifest, [largest.name], base_url="s3://bucket/run/checkpoints/step-00001000")
    chunks = math.prod(-(-n // t) for n, t in zip(largest.shape, largest.tile, strict=True))
    return {
        "view_mb": round(written / 1e6, 3),
        "view_one_array_mb": round(len(data) / 1e6, 3),
        "view_one_array_cpu_s": round(time.process_time() - begin, 3),
        "view_bytes_per_chunk": round(len(data) / chunks, 1),
    }


def read(layout: Layout, rank: int, path: Path) -> dict[str, Any]:
    """One rank of another layout, in this process: open the manifest, plan the load of masters and moments."""
    boxes = layout.boxes(layout.mesh.coordinate(rank))
    wants = [(f"{slot}/{name}", box) for name, box in boxes for slot in SLOTS if slot != WEIGHTS]
    before = _status("VmRSS")
    begin = time.perf_counter()
    manifest = decode(path.read_bytes())
    opened = time.perf_counter()
    plan = plan_reads(manifest, wants, limits=LIMITS)
    done = time.perf_counter()
    chunks = sum(span.count for planned in plan.ranges for span in planned.spans)
    return {
        "rank": rank,
        "decode_s": round(opened - begin, 4),
        "read_plan_s": round(done - opened, 4),
        "plan_memory_mb": round((_status("VmHWM") - before) / 1e6, 1),
        "wanted_mib": round(plan.wanted_bytes / MIB, 1),
        "bytes_read_over_needed": round(plan.read_bytes / plan.wanted_bytes, 4),
        "chunks_per_rank": chunks,
        "requests_per_rank": len(plan.ranges),
        "packs_per_rank": len({planned.pack for planned in plan.ranges}),
        "mean_range_kib": round(plan.read_bytes / len(plan.ranges) / 1024, 1),
    }


def _status(field: str) -> int:
    """Bytes of one line of /proc/self/status. (getrusage's high-water mark may be that of whoever started this process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(name: str, *, tiny: bool, folder: Path) -> dict[str, Any]:
    """One model: the writer's side here, three ranks of the other layout in processes of their own."""
    case = (TINY if tiny else CASES)[name]
    facts, manifest = write(Layout(load(str(common.ROOT / case.config), TINY_WRITER if tiny else ())), folder)
    world = load(str(common.ROOT / case.config), case.other).parallel.ranks
    ranks = [_reader(name, tiny, rank, folder) for rank in (0, world // 2 + world // 16, world - 1)]
    worst = {key: max(found[key] for found in ranks) for key in ranks[0] if key not in ("rank", "mean_range_kib")}
    worst["mean_range_kib"] = min(found["mean_range_kib"] for found in ranks)
    return {**facts, **view(manifest), **worst, "read_by": " ".join(case.other), "readers": ranks, "peer": peer(manifest)}


def _reader(name: str, tiny: bool, rank: int, folder: Path) -> dict[str, Any]:
    words = ["--read", name, "--rank", str(rank), "--dir", str(folder), *(["--tiny"] if tiny else [])]
    done = subprocess.run(
        common.python("benchmarks.scale", *words),
        capture_output=True,
        check=True,
        cwd=common.ROOT,
        env={**os.environ, **common.environment()},
    )
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def run(folder: Path, *, tiny: bool) -> dict[str, Any]:
    """The whole benchmark; top-level keys are those of the 500B model."""
    machine = common.Machine()
    models = {name: measure(name, tiny=tiny, folder=folder) for name in CASES}
    keys = ("manifest_mb", "commit_check_s", "commit_check_cpu_s", "read_plan_s", "plan_memory_mb")
    keys += ("chunks", "requests_per_rank", "mean_range_kib", "bytes_read_over_needed")
    keys += ("view_mb", "view_one_array_mb", "view_bytes_per_chunk")
    return {**{key: models["dense-500b"][key] for key in keys}, "models": models, "machine": machine.record()}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = common.options(__doc__.splitlines()[0], rounds=1)
    parser.add_argument("--read", choices=list(CASES), help=argparse_hidden())
    parser.add_argument("--rank", type=int, default=0, help=argparse_hidden())
    args = parser.parse_args(argv)
    if args.read:
        case = (TINY if args.tiny else CASES)[args.read]
        layout = Layout(load(str(common.ROOT / case.config), case.other))
        common.emit(read(layout, args.rank, Path(args.dir) / "manifest"), quiet=True)
        return 0
    with common.scratch(args.dir) as folder:
        result = run(folder, tiny=args.tiny)
    rows = [
        (f"{name}: {key}", found[key])
        for name, found in result["models"].items()
        for key, value in found.items()
        if isinstance(value, int | float) and not math.isnan(value)
    ]
    common.emit(result, quiet=args.json, rows=rows)
    return 0


def argparse_hidden() -> str:
    """The options by which this program starts itself are not for people."""
    import argparse

    return argparse.SUPPRESS


if __name__ == "__main__":
    sys.exit(main())
