"""The digest: its definition spelled out element by element, and the same value under any cut."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import digest as digest_module
from storage.box import Box
from storage.digest import column_keys, digest_box, digest_part, row_keys
from storage.pack import plan_pack, write_part
from tests.storage.strategies import cuts, grids, random_bits

MASK = 2**64 - 1


def key(seed: int, index: int) -> int:
    """splitmix64's finaliser in plain integers."""
    z = (seed + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def by_definition(bits: np.ndarray) -> int:
    total = 0
    for index in itertools.product(*(range(n) for n in bits.shape)):
        row = index[0] if index else 0
        column = int(np.ravel_multi_index(index[1:], bits.shape[1:])) if len(index) > 1 else 0
        total += int(bits[index]) * key(0x243F6A8885A308D3, row) * key(0x13198A2E03707344, column)
    return total & MASK


def test_keys_are_those_of_the_definition() -> None:
    assert row_keys(5, 8).tolist() == [key(0x243F6A8885A308D3, i) for i in (5, 6, 7)]
    assert column_keys(np.array([0, 9])).tolist() == [key(0x13198A2E03707344, i) for i in (0, 9)]


@given(st.data(), st.lists(st.integers(1, 7), max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8]))
def test_any_cut_adds_up_to_the_definition(data: st.DataObject, shape: tuple[int, ...], itemsize: int) -> None:
    bits = random_bits(shape, itemsize)
    parts = [digest_box(np.ascontiguousarray(bits[b.slices()]), shape, b) for b in data.draw(cuts(shape))]
    assert sum(parts) & MASK == by_definition(bits)


@given(grids(), st.sampled_from([1, 4, 1 << 20]))
@settings(max_examples=200)
def test_a_packed_part_has_the_digest_of_its_box(grid: tuple[object, Box], max_columns: int) -> None:
    """Whatever stands in the padding, and however few column keys are held at once."""
    spec, box = grid
    layout = plan_pack({"a": spec}, [("a", box)])
    buffer = random_bits((layout.nbytes,), 1, seed=1)
    values = np.ascontiguousarray(random_bits(spec.shape, spec.itemsize)[box.slices()])
    write_part(buffer, spec, layout.parts[0], values)
    padded = [digest_part(buffer, spec, layout.parts[0])]
    default = digest_module.MAX_COLUMNS
    try:
        digest_module.MAX_COLUMNS = max_columns
        padded.append(digest_part(buffer, spec, layout.parts[0]))
        assert digest_box(values, spec.shape, box) == padded[0] == padded[1]
    finally:
        digest_module.MAX_COLUMNS = default


def test_every_single_bit_counts() -> None:
    bits = random_bits((5, 3), 2)
    seen = {by_definition(bits)}
    for index in itertools.product(range(5), range(3)):
        for bit in range(16):
            changed = bits.copy()
            changed[index] ^= 1 << bit
            seen.add(digest_box(changed, (5, 3), Box.whole((5, 3))))
    assert len(seen) == 1 + 5 * 3 * 16


def test_float_views_count_by_their_bits() -> None:
    values = np.array([[0.0, -0.0], [np.nan, 1.0]], dtype=np.float32)
    assert digest_box(values, (2, 2), Box.whole((2, 2))) == by_definition(values.view("<u4"))
