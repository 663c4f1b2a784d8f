"""The runs of a certificate in its folder: written by workers as packs, committed here, read here.

The fp64 oracle of the narrower modes starts from the very numbers those modes start from; `widen` writes them down as an fp64
state, the one explicit conversion there is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from ftrain.parallel.arrays import MASTER, WEIGHTS
from storage.box import Box
from storage.checkpoint import Checkpoint
from storage.digest import digest_part
from storage.manifest import PackInfo, PackManifest
from storage.merge import merge
from storage.objects import open_store
from storage.pack import plan_pack, seal, write_part
from storage.run import RunStore


def new_run(url: str) -> RunStore:
    """A run of its own, empty."""
    run = RunStore(open_store(url))
    run.take_epoch(owner={}, starts_from=None)
    return run


def commit(run: RunStore, packs: Sequence[PackManifest], step: int) -> Checkpoint:
    """Make a checkpoint of what all ranks wrote, and open it; CoverageError if it is not all there exactly once."""
    assert run.epoch is not None
    manifest = merge(packs, step=step, epoch=run.epoch, attempt=0, progress={"step": step}, created_s=time.time())
    run.commit(manifest)
    return run.open(step)


def widen(checkpoint: Checkpoint, run: RunStore) -> None:
    """The same state in fp64. Its weights are the masters, unrounded: fp64's own invariant."""
    step = checkpoint.step
    specs = {name: msgspec.structs.replace(checkpoint.array(name), dtype="float64") for name in checkpoint.names}
    layout = plan_pack(specs, [(name, Box.whole(spec.shape)) for name, spec in specs.items()])
    buffer, digests = np.zeros(layout.nbytes, np.uint8), {}
    for part in layout.parts:
        source = part.array.replace(WEIGHTS, MASTER, 1) if part.array.startswith(f"{WEIGHTS}/") else part.array
        write_part(buffer, specs[part.array], part, checkpoint.read(source).astype(np.float64))
        digests[part.array] = digest_part(buffer, specs[part.array], part)
    seal(buffer, layout)
    key = run.pack_key(step, 0, 0, 0)
    run.store.put(key, buffer.tobytes())
    info = PackInfo(name=key.rsplit("/", 1)[1], nbytes=layout.nbytes)
    commit(run, [PackManifest(pack=info, arrays=list(specs.values()), parts=list(layout.parts), digests=digests)], step)
