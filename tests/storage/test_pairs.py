"""Saved by any number of writers, loaded by any other: every pair of layouts, on the shapes that break things.

The cuts are those that parallel layouts make: each rank of a world owns an even share of one dimension, on the grid, as small
arrays and uneven dimensions allow. The digest of what all ranks loaded is the digest of what was saved.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.box import Box, tiling_problems
from storage.digest import digest_box
from storage.grid import MAX_CHUNK_BYTES, tile_shape
from storage.keys import step_folder
from storage.memory import MemoryStore
from storage.pack import ArraySpec
from storage.reader import LoadReport, Want
from storage.run import RunStore
from storage.testing import CountingStore
from tests.storage.building import build_pack, even_cut
from tests.storage.strategies import random_bits

WORLDS = range(1, 9)


def spec(shape: tuple[int, ...], tp_dim: int | None, row_tile: int | None = None, dtype: str = "float32") -> ArraySpec:
    itemsize = 2 if dtype == "bfloat16" else 4
    tile = tile_shape(shape, itemsize, tp_dim=tp_dim, row_tile=row_tile)
    return ArraySpec(name="a", shape=shape, dtype=dtype, tile=tile)


def shares(array: ArraySpec, world: int, dim: int) -> list[Box]:
    return even_cut(array, world, dim)


def saved(array: ArraySpec, values: np.ndarray, boxes: list[Box]) -> RunStore:
    """Each box is one writer's pack."""
    from storage.merge import merge

    run = RunStore(MemoryStore())
    epoch = run.take_epoch(owner={})
    deliveries = []
    for writer, box in enumerate(boxes):
        key = run.pack_key(10, epoch, 0, writer)
        data, delivery = build_pack({"a": array}, {"a": values}, [("a", box)], key.removeprefix(step_folder(10)))
        run.store.put(key, data)
        deliveries.append(delivery)
    run.commit(merge(deliveries, step=10, epoch=epoch, attempt=0, progress={}, created_s=0.0))
    return run


def check_load(run: RunStore, array: ArraySpec, values: np.ndarray, boxes: list[Box]) -> list[LoadReport]:
    """Each box is one rank's load: bits and digest are those that were saved."""
    checkpoint, total, reports = run.open(), 0, []
    for box in boxes:
        got = np.empty(box.shape, values.dtype)
        reports.append(checkpoint.load([Want("a", box, got)]))
        np.testing.assert_array_equal(got, values[box.slices()] if box.ndim else values, strict=True)
        total += digest_box(got, array.shape, box)
    assert total % 2**64 == checkpoint.manifest.digests["a"]
    return reports


def check_tile(array: ArraySpec, tp_dim: int | None) -> None:
    """What the grid rules promise of a tile."""
    itemsize = max(4, array.itemsize)
    assert math.prod(array.tile) * itemsize <= MAX_CHUNK_BYTES
    assert all(1 <= t <= n for t, n in zip(array.tile, array.shape, strict=True))
    if tp_dim is not None:
        dim, tile = array.shape[tp_dim], array.tile[tp_dim]
        assert tile <= 512
        assert all(dim // n % tile == 0 for n in (*range(2, 11), 12, 14, 15, 16) if dim % n == 0), "it divides the even cuts"
        padded = -(-dim // tile) * tile
        assert padded - dim <= dim / 128, "and pads less than 1/128"


def check_pair(shape: tuple[int, ...], dims: tuple[int, int], worlds: tuple[int, int], dtype: str = "float32") -> None:
    tp_dim = max(range(len(shape)), key=lambda d: shape[d]) if shape else None
    array = spec(shape, tp_dim, dtype=dtype)
    check_tile(array, tp_dim)
    values = random_bits(shape, array.itemsize, seed=sum(shape))
    written, read = (shares(array, world, dim) for world, dim in zip(worlds, dims, strict=True))
    assert tiling_problems(shape, written) == []
    check_load(saved(array, values, written), array, values, read)


SHAPES = [(d,) for d in range(1, 10)] + [(a, b) for a in range(1, 10) for b in (1, 2, 7, 9)]
SHAPES += [(97,), (13, 31), (3, 5, 7), (2, 9, 4), (1, 1, 1)]  # primes, and three dimensions


@given(st.sampled_from([*SHAPES, ()]), st.sampled_from(WORLDS), st.sampled_from(WORLDS), st.data())
def test_any_pair_of_layouts(shape: tuple[int, ...], writers: int, readers: int, data: st.DataObject) -> None:
    dim = st.integers(0, max(0, len(shape) - 1))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    check_pair(shape, (data.draw(dim), data.draw(dim)), (writers, readers), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("writers", WORLDS)
def test_all_pairs_of_layouts(writers: int) -> None:
    for shape, readers in itertools.product(SHAPES, WORLDS):
        for dims in itertools.product(range(len(shape)), repeat=2):
            check_pair(shape, dims, (writers, readers))


@pytest.mark.parametrize(("columns", "tp"), [(11008, 8), (11008, 4), (4096, 8), (1009, 7), (50257, 3)])
def test_columns_as_tensor_parallelism_cuts_them(columns: int, tp: int) -> None:
    """Llama-2's feed-forward has 11008 columns: 8 does not divide 11008/512, and yet no cut goes through a tile."""
    rows = 24
    array = spec((rows, columns), 1)
    check_tile(array, 1)
    values = random_bits((rows, columns), 4, seed=columns)
    run = saved(array, values, shares(array, 3, 0))  # by rows, as ZeRO-1 would if it could
    boxes = shares(array, tp, 1)
    if columns % tp == 0:
        assert [box.shape[1] for box in boxes] == [columns // tp] * tp
    reports = check_load(run, array, values, boxes)
    assert sum(r.read_bytes for r in reports) <= 1.1 * sum(r.wanted_bytes for r in reports)


def test_all_ranks_of_a_load_together_read_each_chunk_about_once() -> None:
    """Why nothing is exchanged between ranks (ADR): what they want does not overlap, and the tiles divide what they want.

    512 x 11008, saved by rows on 6 ranks; loaded by columns on 8, by rows on 4, in blocks of 2 x 4.
    """
    array = spec((512, 11008), 1, row_tile=16)
    values = random_bits(array.shape, 4, seed=1)
    run = saved(array, values, shares(array, 6, 0))
    rows, columns = shares(array, 2, 0), shares(array, 4, 1)
    blocks = [a.intersect(b) for a in rows for b in columns]
    for boxes in (shares(array, 8, 1), shares(array, 4, 0), [box for box in blocks if box]):
        counting = CountingStore(run.store)
        checkpoint = RunStore(counting).open()
        before = counting.bytes_read
        for box in boxes:
            checkpoint.load([Want("a", box, np.empty(box.shape, "<u4"))])
        assert (counting.bytes_read - before) / checkpoint.manifest.nbytes <= 1.1
