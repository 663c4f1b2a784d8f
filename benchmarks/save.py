"""A whole save to the local disk: processor time and wall, against a plain file of the same bytes and against PyTorch DCP.

    1 GiB of state (14 bytes per parameter) of one process
    ours            copy into an arena slot, crc32c of every chunk, stream, fsync, manifest, view, commit
    ours_digest     the same with the layout-free digests, as the keeper does it
    plain_fsync     the same number of bytes from warm memory into one file, and fsync
    dcp, dcp_2      `torch.distributed.checkpoint.save` with fsync, one and two threads
    ours_compressed with `--compression lz4|zstd`: as ours_digest, compressed, to the same disk. The state is normal noise,
                    which shrinks less than trained numbers do; `ftrain ckpt show` says what those of a run shrink to

Ours goes through the production code (`copy_runs`, `SlotStream`, `put_stream`, `merge`, `commit`). The slot is sealed and
stored behind the copy into it, as the keeper does where it has a core of its own; here it is a thread. A checkpoint of each
kind is read back and compared. Processor time is that of the whole process, all threads.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.checkpoint_stall import CONFIG
from benchmarks.peers import dcp_sync
from ftrain.checkpoint.arena import ArenaSlot, slot_nbytes
from ftrain.checkpoint.copy import copy_pairs, copy_runs, run_copy
from ftrain.checkpoint.layout import rank_layout
from ftrain.checkpoint.memory import pack_manifest
from ftrain.checkpoint.stream import BLOCK_NBYTES, SlotStream
from ftrain.load import parse
from ftrain.parallel.arrays import StatePiece
from ftrain.parallel.shape import Coordinate
from storage.compress import Compressor, compressor_named
from storage.keys import pack_name
from storage.local import LocalStore
from storage.manifest import PackManifest
from storage.merge import merge
from storage.pack import PackLayout
from storage.run import RunStore

GIB = 2**30
FULL = {"layers": 6, "hidden": 1024, "ffn": 2816, "vocab": 3840, "seq_len": 16}  # 76.7M parameters
TINY = {"layers": 2, "hidden": 128, "ffn": 192, "vocab": 257, "seq_len": 16}
CASES = ("ours", "ours_digest", "plain_fsync", "dcp", "dcp_2")


class State:
    """The live state: masters and moments in fp32; weights are the rounded masters."""

    def __init__(self, layout: PackLayout, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.pieces: list[StatePiece] = []
        masters: dict[str, torch.Tensor] = {}
        for part in layout.parts:
            slot, _, name = part.array.partition("/")
            if slot in ("weights", "master"):
                tensor = masters.setdefault(name, torch.randn(part.shape, generator=random))
            else:
                tensor = torch.randn(part.shape, generator=random)
            self.pieces.append(StatePiece(part.array, part.box, tensor, layout.specs[part.array].dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """As DCP gets it: weights as a bf16 copy."""
        return {p.array: p.tensor.bfloat16() if p.dtype == "bfloat16" else p.tensor for p in self.pieces}

    def change(self, number: int) -> None:
        """So that no two saves are the same."""
        for piece in self.pieces:
            piece.tensor.view(-1)[0] = number


class Ours:
    """The production path, in one process."""

    def __init__(self, folder: Path, layout: PackLayout, state: State) -> None:
        fd = os.memfd_create("arena")
        os.posix_fallocate(fd, 0, slot_nbytes(layout))
        self._slot = ArenaSlot(fd, populate=True)
        os.close(fd)
        payload = self._slot.prepare(layout)
        self._runs = copy_runs(payload, copy_pairs(payload, layout, state.pieces))
        self._keeper = ThreadPoolExecutor(1)
        self._store = LocalStore(folder)
        self.run = RunStore(self._store)
        self._epoch = self.run.take_epoch(owner={"benchmark": "save"}, starts_from=None)
        self._layout, self._step = layout, 0

    def save(self, *, digest: bool, compressor: Compressor | None = None) -> None:
        """One checkpoint, committed."""
        self._step += 1
        slot, step = self._slot, self._step
        slot.begin(epoch=self._epoch, attempt=0, step=step, rank=0, world=1, upload=True)
        stored = self._keeper.submit(self._keep, digest=digest, compressor=compressor)
        for run in self._runs:
            run_copy(run.pairs)
            slot.fill(run.filled)
        slot.complete(b'{"step":%d}' % step, upload=True)
        delivery = stored.result()
        manifest = merge([delivery], step=step, epoch=self._epoch, attempt=0, progress={"step": step}, created_s=time.time())
        self.run.commit(manifest)

    def _keep(self, *, digest: bool, compressor: Compressor | None) -> PackManifest:
        known = {} if digest else dict.fromkeys(self._layout.specs, 0)
        with SlotStream(self._slot, digests=known, compressor=compressor) as stream:
            self._store.put_stream(self.run.pack_key(self._step, self._epoch, 0, 0), stream)
            return stream.described(pack_manifest(self._slot, pack_name(self._epoch, 0, 0), stream.digests()))

    def forget(self) -> None:
        """Remove the last one."""
        for info in list(self._store.list(f"checkpoints/step-{self._step:08d}/")):
            self._store.delete(info.key)


def plain(path: Path, data: memoryview) -> None:
    """One file and fsync."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for at in range(0, len(data), BLOCK_NBYTES):
        os.write(fd, data[at : at + BLOCK_NBYTES])
    os.fsync(fd)
    os.close(fd)


class Save:
    """All cases over one state."""

    def __init__(self, folder: Path, *, tiny: bool, seed: int, compressor: Compressor | None = None) -> None:
        self.compressor, self.cases = compressor, CASES + (("ours_compressed",) if compressor else ())
        config = parse(CONFIG.format(url=folder / "run", ranks=1, **(TINY if tiny else FULL)))
        self.layout = rank_layout(config, Coordinate())
        self.state = State(self.layout, seed)
        self.ours = Ours(folder / "run", self.layout, self.state)
        self._folder, self._warm = folder, bytearray(self.layout.nbytes)
        self._warm[:] = os.urandom(2**20) * (len(self._warm) // 2**20) + bytes(len(self._warm) % 2**20)
        self.cpu: dict[str, list[float]] = {case: [] for case in self.cases}

    def measure(self, case: str, number: int) -> float:
        """One save; what it wrote is removed outside the measurement.

        A file of the same size is written and removed just before: fresh pages cost a virtual machine ten times a recycled one,
        and who gets them would be chance.
        """
        self.state.change(number)
        tensors = self.state.tensors() if case.startswith("dcp") else {}
        path = self._folder / f"{case}-{number}"
        action = {
            "ours": lambda: self.ours.save(digest=False),
            "ours_digest": lambda: self.ours.save(digest=True),
            "ours_compressed": lambda: self.ours.save(digest=True, compressor=self.compressor),
            "plain_fsync": lambda: plain(path, memoryview(self._warm)),
            "dcp": lambda: dcp_sync.save(tensors, path, threads=1),
            "dcp_2": lambda: dcp_sync.save(tensors, path, threads=2),
        }[case]
        plain(self._folder / "warm-up", memoryview(self._warm))
        (self._folder / "warm-up").unlink()
        begin, cpu = time.perf_counter(), time.process_time()
        action()
        seconds = time.perf_counter() - begin
        self.cpu[case].append(time.process_time() - cpu)
        if case.startswith("ours"):
            self.ours.forget()
        else:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return seconds

    def check(self) -> int:
        """Both sides store what they were given; returns the bytes verified."""
        self.ours.save(digest=True)
        checkpoint = self.ours.run.open()
        report = checkpoint.verify()
        tensors = self.state.tensors()
        name = "exp_avg/layers.1.mlp.w2"
        if not report.ok or not torch.equal(torch.from_numpy(checkpoint.read(name)), tensors[name]):
            raise RuntimeError(f"our save does not hold the state: {report.problems[:3]}")
        dcp_sync.save(tensors, self._folder / "check", threads=1)
        found = {key: torch.empty_like(value) for key, value in tensors.items()}
        dcp_sync.load(found, self._folder / "check")
        if not all(torch.equal(found[key], value) for key, value in tensors.items()):
            raise RuntimeError("DCP's save does not hold the state")
        return report.read_bytes

    def compression(self) -> dict[str, Any]:
        """What compressing comes to: the bytes, and the processor time of a load, which are nobody else's figures."""
        figures: dict[str, Any] = {"compressor": str(self.compressor)}
        for name, compressor in (("plain", None), ("compressed", self.compressor)):
            self.ours.save(digest=True, compressor=compressor)
            checkpoint, begin = self.ours.run.open(), time.process_time()
            for array in checkpoint.names:
                checkpoint.read(array)
            figures[f"load_cpu_s_per_gib_{name}"] = round((time.process_time() - begin) / (self.layout.nbytes / GIB), 3)
            if not checkpoint.verify().ok:
                raise RuntimeError(f"the {name} checkpoint does not verify")
            figures["ratio"] = round(self.layout.nbytes / checkpoint.manifest.nbytes, 4)
            self.ours.forget()
        return figures


def run(folder: Path, *, rounds: int, tiny: bool, seed: int, compressor: Compressor | None = None) -> dict[str, Any]:
    """The whole benchmark."""
    machine = common.Machine()
    torch.set_num_threads(1)
    save = Save(folder, tiny=tiny, seed=seed, compressor=compressor)
    verified = save.check()
    cases: dict[str, Callable[[int], float]] = {case: partial(save.measure, case) for case in save.cases}
    for name, case in cases.items():
        case(0)
        save.cpu[name].clear()
    seconds = common.interleaved(cases, rounds)
    gib = save.layout.nbytes / GIB
    wall = {case: common.median(seconds[case]) or 0.0 for case in save.cases}
    cpu = {case: (common.median(save.cpu[case]) or 0.0) / gib for case in save.cases}
    best = min(("dcp", "dcp_2"), key=wall.__getitem__)
    compressed: dict[str, Any] = {}
    if compressor is not None:
        more = cpu["ours_compressed"] - cpu["ours_digest"]
        compressed = {"compression": {**save.compression(), "cpu_s_per_gib_more": round(more, 3)}}
    return {
        "cpu_s_per_gib": round(cpu["ours"], 3),
        "cpu_s_per_gib_with_digest": round(cpu["ours_digest"], 3),
        "wall_over_plain_fsync": common.ratio(wall["ours"], wall["plain_fsync"]),
        "dcp_wall_over_ours": common.ratio(wall[best], wall["ours"]),
        "dcp_best": best,
        "dcp_cpu_over_ours": common.ratio(min(cpu["dcp"], cpu["dcp_2"]), cpu["ours"]),
        "plain_cpu_s_per_gib": round(cpu["plain_fsync"], 3),
        "gib": round(gib, 4),
        "verified_bytes": verified,
        **compressed,
        "cases": {case: {**common.summary(seconds[case]), "cpu_s_per_gib": round(cpu[case], 3)} for case in save.cases},
        "machine": machine.record(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    options = common.options(__doc__.splitlines()[0], rounds=7)
    options.add_argument("--compression", choices=("none", "lz4", "zstd"), default="none", help="also save compressed")
    options.add_argument("--level", type=int, default=5, help="of the compression (default 5)")
    args = options.parse_args(argv)
    compressor = compressor_named(args.compression, args.level)
    with common.scratch(args.dir) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP notes that it runs in one process
        result = run(folder, rounds=1 if args.tiny else args.rounds, tiny=args.tiny, seed=args.seed, compressor=compressor)
    rows = [(case, f"{r['median_s']:.3f} s, cpu {r['cpu_s_per_gib']} s/GiB") for case, r in result["cases"].items()]
    figures = ("cpu_s_per_gib", "cpu_s_per_gib_with_digest", "wall_over_plain_fsync", "dcp_wall_over_ours")
    rows += [(f"compression {name}", value) for name, value in result.get("compression", {}).items()]
    common.emit(result, quiet=args.json, rows=[*rows, *((name, result[name]) for name in figures)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
