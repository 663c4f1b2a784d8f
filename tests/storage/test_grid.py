"""Grid rules of the format: cuts fall on tiles, chunks stay small, padding stays within the one percent."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.grid import MAX_CHUNK_BYTES, is_small, tile_shape, tp_tile

shapes = st.lists(st.integers(1, 20_000), min_size=1, max_size=3).map(tuple)


@given(shapes, st.data())
def test_even_tensor_cuts_fall_on_tiles_and_chunks_stay_small(shape: tuple[int, ...], data: st.DataObject) -> None:
    tp_dim = data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    tile = tile_shape(shape, 4, tp_dim=tp_dim, row_tile=None)
    assert all(1 <= t <= n for t, n in zip(tile, shape, strict=True))
    assert 4 * math.prod(tile) <= MAX_CHUNK_BYTES
    if tp_dim is not None:
        for parts in (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16):  # 11 and 13: ADR 0008
            if shape[tp_dim] % parts == 0:
                assert shape[tp_dim] // parts % tile[tp_dim] == 0


@given(shapes, st.integers(0, 8), st.booleans())
def test_cuts_of_data_parallelism_fall_on_tiles(shape: tuple[int, ...], power: int, cut_rows: bool) -> None:
    row_tile = 2**power
    tile = tile_shape(shape, 2, tp_dim=0 if cut_rows else None, row_tile=row_tile)
    assert row_tile % tile[0] == 0 or row_tile >= shape[0]


@given(shapes, st.one_of(st.none(), st.just(0)))
def test_all_arrays_of_a_parameter_have_one_grid(shape: tuple[int, ...], tp_dim: int | None) -> None:
    assert tile_shape(shape, 2, tp_dim=tp_dim, row_tile=None) == tile_shape(shape, 4, tp_dim=tp_dim, row_tile=None)


@given(st.integers(1, 300_000))
def test_dimensions_without_an_even_cut_pad_little(dim: int) -> None:
    width = tp_tile(dim)
    assert (-dim % width) <= dim / 128


@pytest.mark.parametrize(
    ("shape", "tp_dim", "tile"),
    [
        pytest.param((128, 128), 0, (8, 128), id="demo-rows"),
        pytest.param((128, 344), 1, (128, 43), id="demo-columns"),
        pytest.param((4096, 11008), 1, (2048, 344), id="llama2-columns-under-tp8"),
        pytest.param((11008, 4096), 0, (172, 4096), id="llama2-rows"),
        pytest.param((1024, 2816), 1, (1024, 176), id="eleven-does-not-make-tiles-narrow"),
        pytest.param((16384, 53248), 1, (2341, 416), id="llama3-405b-columns-hold-thirteen"),
        pytest.param((128256, 16384), 0, (16, 16384), id="llama3-405b-vocabulary"),
        pytest.param((10007, 10007), 1, (10007, 64), id="prime"),
        pytest.param((4096,), None, (4096,), id="norm"),
        pytest.param((), None, (), id="scalar"),
        pytest.param((8, 4096, 14336), 2, (2, 4096, 128), id="experts"),
    ],
)
def test_known_shapes(shape: tuple[int, ...], tp_dim: int | None, tile: tuple[int, ...]) -> None:
    assert tile_shape(shape, 4, tp_dim=tp_dim, row_tile=None) == tile


def stored_bytes(shape: tuple[int, ...], itemsize: int, tile: tuple[int, ...]) -> int:
    chunks = math.prod(-(-n // t) for n, t in zip(shape, tile, strict=True))
    return chunks * (math.prod(tile) * itemsize + 4)


@pytest.mark.parametrize("hidden", [512, 768, 1000, 1009, 2048])
@pytest.mark.parametrize("row_tile", [None, 4])
def test_padding_and_checksums_stay_within_one_percent(hidden: int, row_tile: int | None) -> None:
    """A model of more than 10 million parameters, all matrices cut one way or the other."""
    ffn, vocab, layers = -(-8 * hidden // 48) * 16, 32_003, 8
    matrices = [((vocab, hidden), 0), *[((hidden, hidden), 0), ((hidden, ffn), 1), ((ffn, hidden), 0)] * layers]
    needed = stored = 0
    for shape, tp_dim in matrices:
        tile = tile_shape(shape, 4, tp_dim=tp_dim, row_tile=None if is_small(shape) else row_tile)
        needed += 14 * math.prod(shape)
        stored += stored_bytes(shape, 2, tile) + 3 * stored_bytes(shape, 4, tile)
    assert needed / 14 > 1e7
    assert stored <= 1.01 * needed
