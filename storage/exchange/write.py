"""Arrays from anywhere become a checkpoint of ours: packs are streamed a slab of rows at a time, then committed.

One slab is in memory at a time, packed: whatever the source hands over is laid into tiles, sealed and added to the digests
before the next slab is asked for, so a 405B model passes through a small machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from storage.box import Box
from storage.commit import CommitRef
from storage.digest import MASK, digest_part
from storage.exchange.tensor import SLAB_BYTES, Values, slabs
from storage.keys import pack_name
from storage.manifest import PackInfo, PackManifest
from storage.merge import merge
from storage.pack import ALIGNMENT, ArraySpec, PackLayout, plan_pack, seal, write_part
from storage.run import RunStore

__all__ = ["Incoming", "write_checkpoint", "write_pack"]

PACK_BYTES = 8 << 30
"""After this many bytes the next pack begins, so that no object is too large for any store."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """An array to be written: what it is, and where the values of a box of it come from."""

    spec: ArraySpec
    read: Callable[[Box], Values]


def write_checkpoint(
    run: RunStore,
    arrays: Sequence[Incoming],
    *,
    step: int,
    epoch: int,
    progress: dict[str, Any],
    created_s: float,
    pack_bytes: int = PACK_BYTES,
) -> CommitRef:
    """Write and commit a checkpoint in an epoch that this process has taken. Nothing exists before the commit."""
    readers = {incoming.spec.name: incoming for incoming in arrays}
    deliveries = [
        write_pack(run, readers, boxes, step=step, epoch=epoch, number=number)
        for number, boxes in enumerate(_packs(arrays, pack_bytes))
    ]
    manifest = merge(
        deliveries,
        step=step,
        epoch=epoch,
        attempt=0,
        progress=progress,
        created_s=created_s,
        expected=[incoming.spec for incoming in arrays],
    )
    return run.commit(manifest)


def _packs(arrays: Sequence[Incoming], pack_bytes: int) -> Iterator[list[tuple[str, Box]]]:
    """Slabs on the tile grid, dealt into packs."""
    boxes, size = list[tuple[str, Box]](), 0
    for incoming in arrays:
        spec = incoming.spec
        for box in slabs(spec.shape, spec.itemsize, most=SLAB_BYTES, rows=spec.tile[0] if spec.tile else 1):
            if boxes and size >= pack_bytes:
                yield boxes
                boxes, size = [], 0
            boxes.append((spec.name, box))
            size += math.prod(box.shape) * spec.itemsize
    if boxes:
        yield boxes


def write_pack(
    run: RunStore, readers: dict[str, Incoming], boxes: list[tuple[str, Box]], *, step: int, epoch: int, number: int
) -> PackManifest:
    """Stream boxes of arrays into the pack of writer `number`; what it delivers to the commit."""
    layout = plan_pack({name: readers[name].spec for name, _ in boxes}, boxes)
    digests = dict.fromkeys(layout.specs, 0)
    run.store.put_stream(run.pack_key(step, epoch, 0, number), _stream(layout, readers, digests))
    return PackManifest(
        pack=PackInfo(name=pack_name(epoch, 0, number), nbytes=layout.nbytes),
        arrays=list(layout.specs.values()),
        parts=list(layout.parts),
        digests=digests,
    )


def _stream(layout: PackLayout, readers: dict[str, Incoming], digests: dict[str, int]) -> Iterator[memoryview]:
    """The bytes of a pack, part by part; adds to `digests` on the way."""
    for part in layout.parts:
        spec = layout.specs[part.array]
        here = msgspec.structs.replace(part, position=0)
        alone = plan_pack(layout.specs, [(part.array, part.box)])
        padding = -alone.nbytes % ALIGNMENT if part is not layout.parts[-1] else 0
        buffer = np.zeros(alone.nbytes + padding, np.uint8)
        chunks = buffer[: alone.nbytes]
        values = np.ascontiguousarray(readers[part.array].read(part.box))
        write_part(chunks, spec, here, values)
        seal(chunks, alone)
        digests[part.array] = (digests[part.array] + digest_part(chunks, spec, here)) & MASK
        yield buffer.data
