"""One rank of benchmarks.supervision_overhead without any supervision: the same engine, data and steps, and nothing else.

    python -m benchmarks.overhead_rank CONFIG.toml RANK PORT PAGE

No heartbeat, no snapshot, no metrics, no ledger. Rank 0 writes the number of finished steps into PAGE, eight bytes of shared
memory, so that whoever measures sees the boundary of a step as soon as the step is over.
"""

from __future__ import annotations

import mmap
import struct
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ftrain.data.dataset import Dataset
from ftrain.data.stdlib import cache_root
from ftrain.load import load
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import mesh_shape
from ftrain.train.step import Engine


def main(argv: list[str]) -> int:
    """Train until killed."""
    config, rank, port, page = load(argv[0]), int(argv[1]), int(argv[2]), Path(argv[3])
    torch.set_num_threads(config.machine.threads)
    world = config.parallel.ranks
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(hours=1)
    )
    dataset = Dataset(config, root=cache_root())
    engine = Engine(config, mesh=Mesh(mesh_shape(config), rank), device="cpu", dataset=dataset)
    engine.init_state()
    with page.open("r+b") as file, mmap.mmap(file.fileno(), 8) as done:
        first = 0
        while True:
            result = engine.train_step(step=engine.step + 1, first_sequence=first)
            first += result.sequences
            if rank == 0:
                done[:8] = struct.pack("<q", result.step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
