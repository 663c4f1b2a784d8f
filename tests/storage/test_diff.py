"""Differences between checkpoints, whatever layouts wrote them."""

import numpy as np
import pytest

from storage.checkpoint import Checkpoint
from storage.diff import ArrayDiff
from storage.diff import diff as compare
from storage.memory import MemoryStore
from storage.merge import merge
from storage.pack import ArraySpec
from tests.storage.building import SPECS, Values, build_pack, deal, random_values


def stored(specs: dict[str, ArraySpec], values: Values, writers: int = 1, dim: int = 0) -> Checkpoint:
    store, deliveries = MemoryStore(), []
    for number, hand in enumerate(deal(specs, writers, dim)):
        data, delivery = build_pack(specs, values, hand, f"p{number}.pack")
        store.put(f"p{number}.pack", data)
        deliveries.append(delivery)
    return Checkpoint(store, merge(deliveries, step=1, epoch=0, attempt=0, progress={}, created_s=0.0))


def test_the_same_values_under_other_layouts_and_tiles_do_not_differ() -> None:
    values = random_values(SPECS, 1)
    whole = {n: ArraySpec(name=n, shape=s.shape, dtype=s.dtype, tile=s.shape) for n, s in SPECS.items()}
    assert compare(stored(SPECS, values, 3), stored(whole, values, 2)) == []


def test_changed_elements_are_counted_and_measured() -> None:
    values = {n: np.zeros(s.shape, f"<u{s.itemsize}") for n, s in SPECS.items()}
    changed = {n: v.copy() for n, v in values.items()}
    changed["master/odd"].view("<f4")[4, 2, 6] = -2.5
    changed["master/odd"].view("<f4")[0, 0, 0] = 1.0
    changed["weights/layers.0.wq"][3, 3] = 0x4040  # 3.0 in bfloat16
    changed["steps"][...] = 7
    found = {d.array: d for d in compare(stored(SPECS, values), stored(SPECS, changed, 3))}
    assert found.keys() == {"master/odd", "weights/layers.0.wq", "steps"}
    assert (found["master/odd"].num_different, found["master/odd"].max_abs) == (2, 2.5)
    assert (found["weights/layers.0.wq"].num_different, found["weights/layers.0.wq"].max_abs) == (1, 3.0)
    assert found["steps"].max_abs == 7.0


def test_a_zero_that_changed_its_sign_counts_as_different_by_nothing() -> None:
    specs = {"master/norm": SPECS["master/norm"]}
    plus, minus = {"master/norm": np.zeros(7, "<u4")}, {"master/norm": np.full(7, 0x80000000, "<u4")}
    (found,) = compare(stored(specs, plus), stored(specs, minus))
    assert (found.num_different, found.max_abs) == (7, 0.0)


@pytest.mark.parametrize("order", [1, -1])
def test_missing_and_extra_arrays_and_other_shapes_are_named(order: int) -> None:
    one = {n: SPECS[n] for n in ("master/norm", "steps")}
    two = {"master/norm": ArraySpec(name="master/norm", shape=(8,), dtype="float32", tile=(8,))}
    pair = [stored(one, random_values(one, 1)), stored(two, random_values(two, 1))][::order]
    found = compare(pair[0], pair[1])
    assert [(d.array, d.kind) for d in found] == [("master/norm", "spec"), ("steps", "extra" if order == 1 else "missing")]
    assert all(isinstance(d, ArrayDiff) and d.array in d.text for d in found)
