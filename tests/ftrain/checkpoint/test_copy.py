"""The strided copy into an arena, against storage's own numpy writer as oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.checkpoint import copy as copy_module
from ftrain.checkpoint.copy import _staged_pairs, copy_pairs, copy_runs, run_copy
from ftrain.parallel.arrays import StatePiece
from storage.box import Box
from storage.pack import ArraySpec, PartGeometry, plan_pack, seal, write_part

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@st.composite
def boxes_on_a_grid(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    """(shape, tile, box) with the box on the tile grid, at the array's end or before it."""
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(ndim))
    tile = tuple(draw(st.integers(1, n)) for n in shape)
    offset, extent = [], []
    for n, t in zip(shape, tile, strict=True):
        first = draw(st.integers(0, (n - 1) // t)) * t
        stop = draw(st.sampled_from([*range(first + t, n, t), n]))
        offset.append(first)
        extent.append(stop - first)
    return shape, tile, Box(tuple(offset), tuple(extent))


@settings(max_examples=150, deadline=None)
@given(case=boxes_on_a_grid(), dtype=st.sampled_from(sorted(DTYPES)))
def test_the_copy_fills_a_pack_as_the_reference_writer_does(
    case: tuple[tuple[int, ...], tuple[int, ...], Box], dtype: str
) -> None:
    shape, tile, box = case
    spec = ArraySpec(name="weights/w", shape=shape, dtype=dtype, tile=tile)
    live = torch.float64 if dtype == "float64" else torch.float32
    tensor = torch.randn(box.shape, dtype=live)
    layout = plan_pack({spec.name: spec}, [(spec.name, box)])
    ours, theirs = np.zeros(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    run_copy(copy_pairs(ours, layout, [StatePiece(spec.name, box, tensor, dtype)]))
    stored = tensor.to(DTYPES[dtype])
    bits = stored.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else stored.numpy()
    write_part(theirs, spec, layout.parts[0], bits)
    assert np.array_equal(ours, theirs)


def test_weights_are_the_masters_rounded_to_nearest_even() -> None:
    """1 + 2**-8 lies half way between two bfloat16 values: the even one, 1.0, is right; 1 + 3 * 2**-8 goes up to 1 + 2**-6."""
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)], dtype=torch.float32)
    spec = ArraySpec(name="weights/w", shape=(3,), dtype="bfloat16", tile=(3,))
    layout = plan_pack({spec.name: spec}, [(spec.name, Box((0,), (3,)))])
    payload = np.zeros(layout.nbytes, np.uint8)
    run_copy(copy_pairs(payload, layout, [StatePiece(spec.name, Box((0,), (3,)), master, "bfloat16")]))
    stored = torch.from_numpy(payload[:6].copy()).view(torch.bfloat16)
    assert stored.tolist() == [1.0, 1 + 2**-6, -1.0]


def test_pieces_that_do_not_match_the_layout_are_refused() -> None:
    spec = ArraySpec(name="master/w", shape=(4, 4), dtype="float32", tile=(2, 4))
    layout = plan_pack({spec.name: spec}, [(spec.name, Box((0, 0), (2, 4)))])
    other = StatePiece(spec.name, Box((2, 0), (2, 4)), torch.zeros(2, 4), "float32")
    with pytest.raises(ValueError, match="does not match"):
        copy_pairs(np.zeros(layout.nbytes, np.uint8), layout, [other])
    with pytest.raises(ValueError, match="0 pieces"):
        copy_pairs(np.zeros(layout.nbytes, np.uint8), layout, [])
    assert layout.nbytes == math.prod((2, 4)) * 4 + 4


def test_the_staged_copy_of_a_gpu_leaves_no_stale_bytes_behind_an_edge() -> None:
    """The staging buffer serves all parts: the second part's edge chunk must not carry values of the first."""
    specs = {
        name: ArraySpec(name=name, shape=shape, dtype="float32", tile=(2, 4))
        for name, shape in (("master/a", (4, 8)), ("master/b", (3, 5)))
    }
    layout = plan_pack(specs, [(name, Box.whole(spec.shape)) for name, spec in specs.items()])
    tensors = [torch.full(spec.shape, float(number + 1)) for number, spec in enumerate(specs.values())]
    ours, theirs = np.zeros(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    staging = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    for part, tensor in zip(layout.parts, tensors, strict=True):
        spec = specs[part.array]
        nbytes = PartGeometry.of(spec, part.shape).nbytes
        host = torch.from_numpy(ours)[part.position : part.position + nbytes]
        run_copy(list(_staged_pairs(host, staging[:nbytes], spec, part, tensor)))
        write_part(theirs, spec, part, tensor.numpy())
    seal(ours, layout)
    seal(theirs, layout)
    assert np.array_equal(ours, theirs)


def test_after_each_run_what_it_vouches_for_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where weights are copied beside the masters that they are rounded from, and at the edges of an array."""
    monkeypatch.setattr(copy_module, "RUN_BYTES", 64)
    specs = {
        name: ArraySpec(name=name, shape=(7, 10), dtype=dtype, tile=(2, 4))
        for name, dtype in (("exp_avg/w", "float32"), ("master/w", "float32"), ("weights/w", "bfloat16"))
    }
    layout = plan_pack(specs, [(name, Box.whole(spec.shape)) for name, spec in specs.items()])
    moment, master = torch.rand(7, 10) + 1, torch.rand(7, 10) + 1
    pieces = [
        StatePiece(part.array, part.box, moment if part.array == "exp_avg/w" else master, specs[part.array].dtype)
        for part in layout.parts
    ]
    whole, growing = np.zeros(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.uint8)
    run_copy(copy_pairs(whole, layout, pieces))
    runs = copy_runs(growing, copy_pairs(growing, layout, pieces))
    said = []
    for run in runs:
        run_copy(run.pairs)
        assert np.array_equal(growing[: run.filled], whole[: run.filled])
        said.append(run.filled)
    assert said == sorted(said)
    assert len(set(said)) > 4
    assert said[-1] == layout.nbytes
    assert np.array_equal(growing, whole)
