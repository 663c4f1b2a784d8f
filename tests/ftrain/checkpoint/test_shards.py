"""Boxes from shardings: against the way FSDP2 and tensor parallelism really cut, and by their own laws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from ftrain.checkpoint.shards import Cut, edges, held_intervals, regions, tile_of
from storage.box import Box, tiling_problems
from storage.grid import MAX_CHUNK_BYTES


def indices(intervals: tuple[tuple[int, int], ...]) -> list[int]:
    return [index for start, stop in intervals for index in range(start, stop)]


@given(st.integers(1, 60), st.integers(1, 9))
def test_a_plain_cut_is_torch_chunk(extent: int, size: int) -> None:
    chunks = torch.arange(extent).chunk(size)
    for index in range(size):
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert indices(held_intervals(extent, [Cut(0, size, 0)], (index,))) == expected


@given(st.integers(1, 80), st.integers(1, 5), st.integers(1, 5))
def test_a_strided_cut_is_a_chunk_of_the_right_axis_chunk(extent: int, fsdp: int, tp: int) -> None:
    """What FSDP2 over tensor parallelism holds: the tensor parallel chunk, cut again."""
    cuts = [Cut(0, fsdp, 0, split_factor=tp), Cut(1, tp, 0)]
    for left, right in itertools.product(range(fsdp), range(tp)):
        columns = torch.arange(extent).chunk(tp)
        inner = columns[right].chunk(fsdp) if right < len(columns) else ()
        expected = inner[left].tolist() if left < len(inner) else []
        assert indices(held_intervals(extent, cuts, (left, right))) == expected


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_a_literal_strided_cut_is_what_dtensor_describes(extent: int, size: int, split_factor: int) -> None:
    shards, _ = _StridedShard(0, split_factor=split_factor)._split_tensor(torch.arange(extent), size, with_padding=False)
    for index, shard in enumerate(shards):
        held = held_intervals(extent, [Cut(0, size, 0, split_factor)], (index,), literally=True)
        assert indices(held) == shard.tolist()


@given(
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 1)), min_size=1, max_size=3),
)
def test_all_ranks_together_hold_everything_once_and_no_tile_is_cut(
    shape: tuple[int, int], axes: list[tuple[int, int]]
) -> None:
    cuts = [Cut(axis, size, dim) for axis, (size, dim) in enumerate(axes)]
    boxes: list[Box] = []
    tile = tile_of(shape, 4, [edges(extent, [c for c in cuts if c.dim == dim]) for dim, extent in enumerate(shape)])
    for place in itertools.product(*(range(cut.size) for cut in cuts)):
        held = [held_intervals(extent, [c for c in cuts if c.dim == dim], place) for dim, extent in enumerate(shape)]
        local = [sum(stop - start for start, stop in each) for each in held]
        found, _ = regions(shape, cuts, place, local)
        boxes += [region.box for region in found]
        assert sum(region.local.size for region in found) == math.prod(local)
    assert tiling_problems(shape, boxes) == []
    for box in boxes:
        assert all(o % t == 0 and (s % t == 0 or s == n) for o, s, t, n in zip(box.offset, box.stop, tile, shape, strict=True))


def test_a_part_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="has no part"):
        regions((10, 4), [Cut(0, 4, 0)], (0,), (2, 4))


@pytest.mark.parametrize(
    ("shape", "itemsize"), [((4096, 4096), 4), ((50257, 768), 4), ((10**7,), 8), ((3, 3 * 10**6), 4), ((64, 3, 700, 700), 2)]
)
def test_large_arrays_have_tiles_that_another_layout_can_read(shape: tuple[int, ...], itemsize: int) -> None:
    tile = tile_of(shape, itemsize, [{0, extent} for extent in shape])
    assert 16 * 1024 <= math.prod(tile) * itemsize <= MAX_CHUNK_BYTES
    padded = math.prod(-(-n // t) * t for n, t in zip(shape, tile, strict=True))
    assert padded / math.prod(shape) < 1.01
    if len(shape) == 2 and shape[1] % 2 == 0:
        assert (shape[1] // 2) % tile[1] == 0
