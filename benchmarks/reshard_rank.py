"""One rank of benchmarks.reshard: saves by rows once, then loads under other layouts, ours and DCP's in turns.

Requests are lines of JSON on stdin, answers lines of JSON on stdout. What is wanted is the same for both: boxes of the arrays,
in memory that has been touched before. Bytes read are what the kernel counted for this process, whoever asked for them.
"""

from __future__ import annotations

import ctypes
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from benchmarks.peers import dcp_sync
from benchmarks.reshard_cases import PAIRS, WRITERS, Array, Pair, arrays, bits, boxes
from storage.box import Box
from storage.local import LocalStore
from storage.reader import Want
from storage.run import RunStore


class Rank:
    """Meshes and groups are made once, by all ranks together."""

    def __init__(self, folder: Path, rank: int, tiny: bool) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WRITERS)
        self.folder, self.rank, self.arrays = folder, rank, arrays(tiny=tiny)
        self._groups: dict[int, Any] = {world: dist.new_group(list(range(world))) for world in (2, 3, 4)}
        self._meshes = {world: DeviceMesh("cpu", torch.arange(world)) for world in (2, 3, 4)}
        self._stages = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3])]

    def save(self) -> None:
        """DCP's checkpoint: every array by rows over all ranks."""
        state = {a.name: self._dtensor(a, self._meshes[WRITERS], 0, fill=True) for a in self.arrays}
        dcp_sync.save(state, self.folder / "dcp", alone=False)

    def _dtensor(self, array: Array, mesh: DeviceMesh, dim: int, *, fill: bool = False) -> torch.Tensor:
        """This rank's part of an array that is cut along `dim` over a mesh."""
        placement: list[Placement] = [Shard(dim)]
        local, offset = _local(array, mesh, dim)
        values = bits(array, Box(offset, local)) if fill else None
        tensor = torch.from_numpy(values).view(torch.float32) if values is not None else torch.zeros(local)
        stride = (array.shape[1], 1)
        return DTensor.from_local(tensor, mesh, placement, run_check=False, shape=torch.Size(array.shape), stride=stride)

    def load(self, pair: Pair, case: str, *, check: bool) -> dict[str, Any]:
        """One load, from opening the checkpoint to the last byte in its place."""
        mine = [] if self.rank >= pair.world else boxes(pair, self.rank, self.arrays)
        action, values = self._ours(mine) if case == "ours" else self._dcp(pair, mine)
        ctypes.CDLL(None).malloc_trim(0)  # what earlier loads have left in the heap would hide what this one takes
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        memory, read, begin, cpu = _status("VmRSS"), _read_bytes(), time.perf_counter(), time.process_time()
        if mine:
            action()
        seconds, cpu_s, nbytes = time.perf_counter() - begin, time.process_time() - cpu, _read_bytes() - read
        peak = _status("VmHWM") - memory
        wrong = [a.name for (a, box), v in zip(mine, values, strict=True) if check and not _same(a, box, v)]
        needed = sum(4 * box.size for _, box in mine)
        return {"seconds": seconds, "cpu_s": cpu_s, "read": nbytes, "needed": needed, "peak": peak, "wrong": wrong}

    def _ours(self, mine: list[tuple[Array, Box]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        values = [torch.zeros(box.shape) for _, box in mine]
        wants = [Want(array.name, box, value.numpy()) for (array, box), value in zip(mine, values, strict=True)]

        def action() -> None:
            RunStore(LocalStore(self.folder / "ours")).open().load(wants)

        return action, values

    def _dcp(self, pair: Pair, mine: list[tuple[Array, Box]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        mesh = self._stages[self.rank // 2] if pair.stages else self._meshes[pair.world]
        state = {array.name: self._dtensor(array, mesh, pair.dim(array)) for array, _ in mine}
        values = [tensor.to_local() for tensor in state.values() if isinstance(tensor, DTensor)]
        group = self._groups[pair.world]
        return lambda: dcp_sync.load(state, self.folder / "dcp", group=group, alone=False), values


def _local(array: Array, mesh: DeviceMesh, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of this rank's part, as DTensor cuts."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    size, chunk = array.shape[dim], -(-array.shape[dim] // mesh.size())
    start = min(coordinate[0] * chunk, size)
    shape, offset = list(array.shape), [0, 0]
    shape[dim], offset[dim] = min(chunk, size - start), start
    return tuple(shape), tuple(offset)


def _same(array: Array, box: Box, values: torch.Tensor) -> bool:
    return torch.equal(values.view(torch.int32), torch.from_numpy(bits(array, box)))


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main(argv: list[str]) -> int:
    """`python -m benchmarks.reshard_rank FOLDER RANK tiny|full`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = Rank(Path(argv[0]), int(argv[1]), argv[2] == "tiny")
    for line in sys.stdin:
        request = msgspec.json.decode(line)
        answer: dict[str, Any] = {}
        if request["do"] == "save":
            rank.save()
        else:
            answer = rank.load(PAIRS[request["pair"]], request["case"], check=request["check"])
        sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
