"""Boxes: their arithmetic against sets of index tuples, the tiling check against counting every element."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import box as box_module
from storage.box import Box, tiling_problems
from tests.storage.strategies import boxes, cuts, shapes


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, s) for o, s in zip(box.offset, box.stop, strict=True))))


@given(st.data(), shapes)
def test_arithmetic_is_that_of_sets_of_indices(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert a.contains(b) == (elements(b) <= elements(a))
    assert a.size == len(elements(a))
    array = np.zeros(shape, dtype=bool)
    array[a.slices()] = True
    assert {tuple(i) for i in np.argwhere(array)} == elements(a)
    if common:
        assert common.relative_to(a).shift(a.offset) == common


@given(st.data(), shapes)
def test_any_cut_tiles_and_any_change_of_it_does_not(data: st.DataObject, shape: tuple[int, ...]) -> None:
    pieces = data.draw(cuts(shape))
    assert tiling_problems(shape, pieces) == []
    assert tiling_problems(shape, [*pieces, pieces[0]])
    assert tiling_problems(shape, pieces[1:])


@given(st.data(), shapes, st.integers(0, 5))
def test_the_check_agrees_with_counting_every_element(data: st.DataObject, shape: tuple[int, ...], count: int) -> None:
    pieces = [data.draw(boxes(shape)) for _ in range(count)]
    counted = np.zeros(shape, dtype=int)
    for piece in pieces:
        counted[piece.slices()] += 1
    assert (tiling_problems(shape, pieces) == []) == bool((counted == 1).all())


@given(st.data(), shapes)
def test_halving_the_space_finds_the_same_faults(data: st.DataObject, shape: tuple[int, ...]) -> None:
    pieces = [data.draw(boxes(shape)) for _ in range(data.draw(st.integers(0, 4)))]
    at_once = bool(tiling_problems(shape, pieces))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_module, "MAX_CELLS", 1)
        assert bool(tiling_problems(shape, pieces)) == at_once


def test_gaps_overlaps_and_strays_are_named() -> None:
    problems = tiling_problems((4, 4), [Box((0, 0), (2, 4)), Box((1, 0), (2, 4)), Box((3, 2), (1, 3))])
    assert "outside: box [3:4, 2:5] in [0:4, 0:4]" in problems
    assert "covered 2 times: [1:2, 0:2]" in problems
    assert "gap: [3:4, 0:2]" in problems


def test_boxes_of_other_dimensions_are_named() -> None:
    assert tiling_problems((4,), [Box((0, 0), (4, 4))]) == ["box (0, 0) + (4, 4) has 2 dimensions instead of 1"]


@pytest.mark.parametrize("bad", [((0,), (0,)), ((-1,), (2,)), ((0, 0), (1,))])
def test_impossible_boxes_are_refused(bad: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="box"):
        Box(*bad)


def test_a_million_boxes_are_checked_without_a_million_objects_of_memory() -> None:
    rows, columns = 1000, 1000
    offsets = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
    assert box_module.coverage_problems(Box.whole((rows, columns)), offsets, offsets + 1) == []
    assert box_module.coverage_problems(Box.whole((rows, columns)), offsets[1:], offsets[1:] + 1) == ["gap: [0:1, 0:1]"]
