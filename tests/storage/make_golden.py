"""Writes the golden checkpoints of a format version: python -m tests.storage.make_golden FOLDER [VERSION]

Run once per version, never again for an old one: what lies in tests/storage/golden must be readable for ever.
"""

import sys
from pathlib import Path

import numpy as np

from storage.compress import Compressor
from storage.keys import pack_name
from storage.memory import MemoryStore
from storage.merge import merge
from storage.pack import ArraySpec
from storage.run import RunStore
from tests.storage.building import Values, build_pack, deal

SPECS = {
    spec.name: spec
    for spec in (
        ArraySpec(name="buffers/flags", shape=(9,), dtype="bool", tile=(4,)),
        ArraySpec(name="buffers/step", shape=(), dtype="int64", tile=()),
        ArraySpec(name="exp_avg/layers.0.wq", shape=(12, 10), dtype="float32", tile=(4, 3)),
        ArraySpec(name="exp_avg_sq/layers.0.wq", shape=(12, 10), dtype="float32", tile=(4, 3)),
        ArraySpec(name="experts/w1", shape=(3, 5, 7), dtype="float32", tile=(1, 5, 4)),
        ArraySpec(name="master/layers.0.wq", shape=(12, 10), dtype="float32", tile=(4, 3), attributes={"tied": ["head"]}),
        ArraySpec(name="master/norm", shape=(7,), dtype="float32", tile=(7,)),
        ArraySpec(name="weights/layers.0.wq", shape=(12, 10), dtype="bfloat16", tile=(4, 3)),
    )
}
STEP, EPOCH, ATTEMPT = 1000, 1, 7
PROGRESS = {"step": 1000, "tokens": 2_048_000, "eval_loss": 2.25, "config": {"seed": 7}}


def golden_values() -> Values:
    """Bits by a formula that anybody can repeat: (flat index + 1) times a large odd number, cut to the element's size."""
    values = {}
    for number, (name, spec) in enumerate(SPECS.items()):
        count = spec.nbytes // spec.itemsize
        bits = (np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + 2 * number)) >> np.uint64(8)
        if spec.dtype == "bool":
            bits &= np.uint64(1)
        values[name] = bits.astype(f"<u{spec.itemsize}").reshape(spec.shape)
    return values


def golden_store() -> MemoryStore:
    """A run with an epoch that was rolled back, and one good checkpoint of the next."""
    store, run = _begun()
    values = golden_values()
    run.take_epoch(owner={"host": "golden"})
    for epoch, step in ((0, 990), (0, 1010), (EPOCH, STEP)):
        if epoch == EPOCH:
            run.take_epoch(owner={"host": "golden"}, starts_from=990)
        _commit(run, store, SPECS, values, epoch=epoch, step=step)
    return store


def _begun() -> tuple[MemoryStore, RunStore]:
    store = MemoryStore()
    store.url = "memory://golden"
    return store, RunStore(store, clock=lambda: 1_700_000_000.0)


def _commit(
    run: RunStore,
    store: MemoryStore,
    specs: dict[str, ArraySpec],
    values: Values,
    *,
    epoch: int,
    step: int,
    compressor: Compressor | None = None,
) -> None:
    """A checkpoint by three writers."""
    deliveries = []
    for writer, hand in enumerate(deal(specs, 3)):
        data, delivery = build_pack(specs, values, hand, pack_name(epoch, ATTEMPT, writer), compressor)
        store.put(run.pack_key(step, epoch, ATTEMPT, writer), data)
        deliveries.append(delivery)
    progress = {**PROGRESS, "step": step}
    run.commit(merge(deliveries, step=step, epoch=epoch, attempt=ATTEMPT, progress=progress, created_s=1.7e9))


COMPRESSED = {
    spec.name: spec
    for spec in (
        ArraySpec(name="buffers/flags", shape=(300,), dtype="bool", tile=(256,)),
        ArraySpec(name="buffers/step", shape=(), dtype="int64", tile=()),
        ArraySpec(name="exp_avg/layers.0.wq", shape=(24, 20), dtype="float32", tile=(8, 10)),
        ArraySpec(name="experts/w1", shape=(3, 10, 14), dtype="float32", tile=(1, 10, 8)),
        ArraySpec(name="master/layers.0.wq", shape=(24, 20), dtype="float32", tile=(8, 10), attributes={"tied": ["head"]}),
        ArraySpec(name="weights/layers.0.wq", shape=(24, 20), dtype="bfloat16", tile=(8, 10)),
    )
}
COMPRESSORS = {980: None, 990: Compressor(cname="zstd", clevel=3, shuffle="shuffle"), 1000: Compressor()}
"""Of each step of the golden run of version 2, the newest last."""


def compressed_values() -> Values:
    """The same formula below the exponent of numbers from 1 to 2; the moment is all zeros."""
    values = {}
    for number, (name, spec) in enumerate(COMPRESSED.items()):
        index = np.arange(1, spec.nbytes // spec.itemsize + 1, dtype=np.uint64)
        noise = (index * np.uint64(0x9E3779B97F4A7C15 + 2 * number)) >> np.uint64(44)
        top = {"float32": 0x3F800000, "bfloat16": 0x3F80}.get(spec.dtype, 0)
        bits = np.uint64(top) | (noise & np.uint64({"float32": 0xFFFFF, "bfloat16": 0x7F, "bool": 1}.get(spec.dtype, 0xFFFFF)))
        if name.startswith("exp_avg/"):
            bits = bits * np.uint64(0)
        values[name] = bits.astype(f"<u{spec.itemsize}").reshape(spec.shape)
    return values


def compressed_store() -> MemoryStore:
    """One state three times: as it is, and compressed in two ways."""
    store, run = _begun()
    values = compressed_values()
    epoch = run.take_epoch(owner={"host": "golden"})
    for step, compressor in COMPRESSORS.items():
        _commit(run, store, COMPRESSED, values, epoch=epoch, step=step, compressor=compressor)
    return store


def main(folder: Path, version: int = 2) -> None:
    """Write all objects as files."""
    store = {1: golden_store, 2: compressed_store}[version]()
    for info in store.list():
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(info.key))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
