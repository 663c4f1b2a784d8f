"""Packs: an independent decoder of single chunks reads what the writer wrote; flipped bytes are found where they are."""

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings

from storage.box import Box
from storage.pack import ArraySpec, PackLayout, check, iter_chunks, plan_pack, seal, write_part
from tests.storage.strategies import grids, random_bits, spec_of


@given(grids(), grids())
@settings(max_examples=200)
def test_chunks_hold_their_tile_in_c_order_and_its_crc(one: tuple[ArraySpec, Box], two: tuple[ArraySpec, Box]) -> None:
    specs = {"one": one[0], "two": two[0]}
    layout = plan_pack({k: spec_of(k, s.shape, s.tile, s.dtype) for k, s in specs.items()}, [("one", one[1]), ("two", two[1])])
    buffer = np.zeros(layout.nbytes, dtype=np.uint8)
    wholes = {k: random_bits(s.shape, s.itemsize) for k, s in specs.items()}
    for part in layout.parts:
        assert part.position % 64 == 0
        write_part(buffer, layout.specs[part.array], part, np.ascontiguousarray(wholes[part.array][part.box.slices()]))
    seal(buffer, layout)
    for part in layout.parts:
        spec = layout.specs[part.array]
        for at, inside in iter_chunks(part, spec):
            tile = np.zeros(spec.tile, dtype=f"<u{spec.itemsize}")
            values = wholes[part.array][inside.slices()]
            tile[tuple(slice(0, n) for n in values.shape)] = values
            body = tile.tobytes()
            assert buffer[at : at + len(body)].tobytes() == body
            assert int.from_bytes(buffer[at + len(body) : at + len(body) + 4].tobytes(), "little") == google_crc32c.value(body)
    assert check(buffer, layout) == []


@pytest.fixture
def layout() -> PackLayout:
    specs = {"a": spec_of("a", (8, 8), (2, 8)), "b": spec_of("b", (3,), (3,))}
    return plan_pack(specs, [("a", Box((0, 0), (8, 8))), ("b", Box((0,), (3,)))])


def test_every_flipped_bit_of_a_chunk_is_found_where_it_is(layout: PackLayout) -> None:
    buffer = np.zeros(layout.nbytes, dtype=np.uint8)
    seal(buffer, layout)
    chunks = dict.fromkeys((0, 68, 136, 204), 64) | {320: 12}
    for at, size in chunks.items():
        for byte in range(at, at + size + 4):
            buffer[byte] ^= 0x10
            assert [d.offset for d in check(buffer, layout)] == [at]
            buffer[byte] ^= 0x10


def test_the_layout_is_a_pure_function_of_its_input(layout: PackLayout) -> None:
    again = plan_pack(layout.specs, [(p.array, p.box) for p in layout.parts])
    assert again == layout
    assert layout.nbytes == 320 + 16


@pytest.mark.parametrize(
    ("box", "why"),
    [
        (Box((1, 0), (2, 8)), "cuts through the tiles"),
        (Box((0, 0), (3, 8)), "cuts through the tiles"),
        (Box((0, 0), (8, 9)), "reaches past the shape"),
        (Box((0,), (8,)), "has 1 dimensions"),
    ],
)
def test_boxes_off_the_grid_are_refused(box: Box, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plan_pack({"a": spec_of("a", (8, 8), (2, 8))}, [("a", box)])


def test_a_buffer_of_another_size_is_refused(layout: PackLayout) -> None:
    with pytest.raises(ValueError, match="the buffer has"):
        seal(np.zeros(layout.nbytes - 1, dtype=np.uint8), layout)
