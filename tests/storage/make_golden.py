"""Writes the golden checkpoint of a format version: python -m tests.storage.make_golden FOLDER

Run once per version, never again for an old one: what lies in tests/storage/golden must be readable for ever.
"""

import sys
from pathlib import Path

import numpy as np

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
    store = MemoryStore()
    store.url = "memory://golden"
    run = RunStore(store, clock=lambda: 1_700_000_000.0)
    run.take_epoch(owner={"host": "golden"})
    for epoch, step in ((0, 990), (0, 1010), (EPOCH, STEP)):
        if epoch == EPOCH:
            run.take_epoch(owner={"host": "golden"}, starts_from=990)
        deliveries = []
        for writer, hand in enumerate(deal(SPECS, 3)):
            data, delivery = build_pack(SPECS, golden_values(), hand, pack_name(epoch, ATTEMPT, writer))
            store.put(run.pack_key(step, epoch, ATTEMPT, writer), data)
            deliveries.append(delivery)
        progress = {**PROGRESS, "step": step}
        run.commit(merge(deliveries, step=step, epoch=epoch, attempt=ATTEMPT, progress=progress, created_s=1.7e9))
    return store


def main(folder: Path) -> None:
    """Write all objects as files."""
    store = golden_store()
    for info in store.list():
        path = folder / info.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get(info.key))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
