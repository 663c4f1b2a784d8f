"""Small checkpoints for the tests: random values, stored by several writers under any cut that the grid allows."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.box import Box
from storage.commit import CommitRef
from storage.compress import Compressor
from storage.deflate import Deflated
from storage.digest import digest_part
from storage.keys import pack_name
from storage.manifest import Manifest, PackInfo, PackManifest
from storage.merge import merge
from storage.objects import ObjectStore
from storage.pack import ArraySpec, plan_pack, seal, write_part
from storage.run import RunStore

Values = dict[str, NDArray[np.unsignedinteger]]
"""Array name -> bits."""

SPECS = {
    spec.name: spec
    for spec in (
        ArraySpec(name="weights/layers.0.wq", shape=(12, 10), dtype="bfloat16", tile=(2, 5)),
        ArraySpec(name="master/layers.0.wq", shape=(12, 10), dtype="float32", tile=(2, 5), attributes={"tied": ["head"]}),
        ArraySpec(name="exp_avg/layers.0.wq", shape=(12, 10), dtype="float32", tile=(2, 5)),
        ArraySpec(name="master/norm", shape=(7,), dtype="float32", tile=(7,)),
        ArraySpec(name="master/odd", shape=(5, 3, 7), dtype="float32", tile=(2, 3, 4)),
        ArraySpec(name="steps", shape=(), dtype="int64", tile=()),
    )
}

COMPRESSIBLE = {
    spec.name: spec
    for spec in (
        ArraySpec(name="weights/layers.0.wq", shape=(48, 40), dtype="bfloat16", tile=(8, 20)),
        ArraySpec(name="master/layers.0.wq", shape=(48, 40), dtype="float32", tile=(8, 20), attributes={"tied": ["head"]}),
        ArraySpec(name="exp_avg/layers.0.wq", shape=(48, 40), dtype="float32", tile=(8, 20)),
        ArraySpec(name="master/norm", shape=(70,), dtype="float32", tile=(70,)),
        ArraySpec(name="master/odd", shape=(5, 3, 70), dtype="float32", tile=(2, 3, 40)),
        ArraySpec(name="steps", shape=(), dtype="int64", tile=()),
    )
}
"""The same with tiles that are worth compressing: Blosc stores what has less than 128 bytes as it is."""


def random_values(specs: Mapping[str, ArraySpec], seed: int) -> Values:
    rng = np.random.default_rng(seed)
    values = {}
    for name, spec in specs.items():
        raw = rng.integers(0, 256, spec.nbytes, dtype=np.uint8)
        values[name] = raw.view(f"<u{spec.itemsize}").reshape(spec.shape)
    return values


def smooth_values(specs: Mapping[str, ArraySpec], seed: int) -> Values:
    """Bits of normal numbers: as with trained ones, their signs and exponents can be compressed and the rest is noise."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, spec in specs.items():
        bits = rng.standard_normal(spec.shape).astype("<f4").view("<u4")
        values[name] = (bits >> np.uint32(16) if spec.itemsize == 2 else bits).astype(f"<u{spec.itemsize}")
    return values


def even_cut(spec: ArraySpec, parts: int, dim: int = 0) -> list[Box]:
    """At most `parts` boxes along one dimension, on the grid."""
    if not spec.shape:
        return [Box.whole(spec.shape)]
    dim = min(dim, len(spec.shape) - 1)
    tiles = -(-spec.shape[dim] // spec.tile[dim])
    edges = sorted({min(spec.shape[dim], i * tiles // parts * spec.tile[dim]) for i in range(parts)} | {spec.shape[dim]})
    boxes = []
    for start, stop in itertools.pairwise(edges):
        offset, shape = [0] * len(spec.shape), list(spec.shape)
        offset[dim], shape[dim] = start, stop - start
        boxes.append(Box(tuple(offset), tuple(shape)))
    return boxes


def deal(specs: Mapping[str, ArraySpec], writers: int, dim: int = 0) -> list[list[tuple[str, Box]]]:
    """Every array cut into as many boxes as there are writers, dealt out in turn."""
    hands: list[list[tuple[str, Box]]] = [[] for _ in range(writers)]
    turn = 0
    for name, spec in specs.items():
        for box in even_cut(spec, writers, dim):
            hands[turn % writers].append((name, box))
            turn += 1
    return [hand for hand in hands if hand]


def build_pack(
    specs: Mapping[str, ArraySpec],
    values: Values,
    boxes: Sequence[tuple[str, Box]],
    name: str,
    compressor: Compressor | None = None,
) -> tuple[bytes, PackManifest]:
    layout = plan_pack(specs, boxes)
    buffer = np.zeros(layout.nbytes, np.uint8)
    digests: dict[str, int] = {}
    for part in layout.parts:
        spec = specs[part.array]
        write_part(buffer, spec, part, values[part.array][(*part.box.slices(), ...)])
        digests[part.array] = (digests.get(part.array, 0) + digest_part(buffer, spec, part)) % 2**64
    seal(buffer, layout)
    info = PackInfo(name=name, nbytes=layout.nbytes)
    plain = PackManifest(pack=info, arrays=list(layout.specs.values()), parts=list(layout.parts), digests=digests)
    if compressor is None:
        return buffer.tobytes(), plain
    deflated = Deflated(buffer, layout, compressor)
    return b"".join(deflated), deflated.described(plain)


def write_packs(
    store: ObjectStore,
    values: Values,
    *,
    step: int,
    epoch: int,
    attempt: int = 0,
    writers: int = 2,
    dim: int = 0,
    compressor: Compressor | None = None,
    specs: Mapping[str, ArraySpec] | None = None,
    **more: Any,
) -> Manifest:
    """Store the packs of a checkpoint; returns its manifest, uncommitted. `specs`: other arrays than this module's; `more`: in
    its progress record.
    """
    specs = SPECS if specs is None else specs
    deliveries = []
    for number, boxes in enumerate(deal(specs, writers, dim)):
        data, delivery = build_pack(specs, values, boxes, pack_name(epoch, attempt, number), compressor)
        store.put(RunStore(store).pack_key(step, epoch, attempt, number), data)
        deliveries.append(delivery)
    progress: dict[str, Any] = {"step": step, "tokens": 10 * step, **more}
    return merge(deliveries, step=step, epoch=epoch, attempt=attempt, progress=progress, created_s=1e9 + step)


def save(run: RunStore, values: Values, *, step: int, epoch: int, **how: Any) -> CommitRef:
    return run.commit(write_packs(run.store, values, step=step, epoch=epoch, **how))
