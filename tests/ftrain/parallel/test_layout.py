"""The placement table and the bucket plan: for every layout, the boxes tile every array exactly once and lie on the grid."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.config import Model
from ftrain.parallel import buckets as bucket_plans
from ftrain.parallel.arrays import EXACT, StateTypes, array_specs
from ftrain.parallel.buckets import may_be_cut, plan_buckets, state_boxes
from ftrain.parallel.layout import Kind, Placement, is_owner, local_box, parameters, vocabulary_unit
from ftrain.parallel.shape import AXES, Coordinate, MeshShape
from storage.box import Box, tiling_problems
from storage.pack import plan_pack


@st.composite
def layouts(draw, *, wide=False):
    """A model and a mesh that may cut it; `wide` models have arrays large enough for ZeRO-1 to cut."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if tp % n == 0 or n % tp == 0]))
    heads = kv * draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if kv * n % tp == 0]))
    hidden = draw(st.sampled_from([1024, 1536, 2048] if wide else [48, 64, 96]))
    model = Model(
        layers=draw(st.integers(1, 5)),
        hidden=hidden,
        heads=heads,
        kv_heads=kv,
        head_dim=draw(st.sampled_from([64, 128] if wide else [8, 16])),
        ffn=tp * draw(st.integers(1, 9)) * (256 if wide else 16),
        vocab=draw(st.sampled_from([8192, 5003, 1009] if wide else [256, 257, 1009])),
        tied=draw(st.booleans()),
        experts=draw(st.sampled_from([0, 2, 8])),
    )
    pp = draw(st.integers(1, min(3, model.layers)))
    cp, dp = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 5, 8]))
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if cp * dp % n == 0 and model.experts % n == 0])) if model.experts else 1
    mesh = MeshShape(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, order=draw(st.sampled_from([AXES, ("dp", "tp", "cp", "pp")])))
    return model, mesh, draw(st.sampled_from([0.01, 1.0, 64.0])) * 2**20


def written(model, mesh, bucket_bytes):
    """Every box that any place of the mesh writes, by parameter."""
    specs = parameters(model, mesh)
    boxes = {spec.name: [] for spec in specs}
    for place in mesh.coordinates():
        for name, box in state_boxes(plan_buckets(specs, mesh, place, bucket_bytes=bucket_bytes), mesh, place):
            boxes[name].append(box)
    return specs, boxes


@settings(max_examples=60, deadline=None)
@given(layouts() | layouts(wide=True))
def test_written_boxes_tile_every_array_on_its_grid(layout):
    model, mesh, bucket_bytes = layout
    specs, boxes = written(model, mesh, bucket_bytes)
    for types in (StateTypes(), EXACT):
        arrays = {array.name: array for array in array_specs(specs, mesh, bucket_bytes=bucket_bytes, types=types)}
        for spec in specs:
            assert tiling_problems(spec.shape, boxes[spec.name]) == []
            for slot in ("weights", "master"):
                plan_pack(arrays, [(f"{slot}/{spec.name}", box) for box in boxes[spec.name]])  # raises off the grid


@settings(max_examples=60, deadline=None)
@given(layouts() | layouts(wide=True))
def test_buckets_hold_what_the_place_computes_with(layout):
    model, mesh, bucket_bytes = layout
    specs = parameters(model, mesh)
    for place in {Coordinate(tp=tp, pp=pp) for tp in range(mesh.tp) for pp in range(mesh.pp)}:
        buckets = plan_buckets(specs, mesh, place, bucket_bytes=bucket_bytes)
        slots = [slot for bucket in buckets for slot in bucket.slots]
        assert {slot.spec.name: slot.box for slot in slots} == {
            spec.name: box for spec in specs if (box := local_box(spec, mesh, place))
        }
        for bucket in buckets:
            assert {slot.spec.sharers(mesh.ep) for slot in bucket.slots} == {bucket.sharers}
            assert bucket.num_regions * bucket.sharers == mesh.shards
            ends = [0] + [slot.stop for slot in bucket.slots]
            assert all(slot.start >= end for slot, end in zip(bucket.slots, ends, strict=False))
            assert ends[-1] <= bucket.numel
            parts = [part for region in range(bucket.num_regions) for part in bucket.parts(region)]
            for slot in bucket.slots:
                mine = [part for part in parts if part.spec is slot.spec]
                assert sum(part.box.size for part in mine) == slot.box.size
                assert len(mine) == 1 or may_be_cut(slot.spec)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_the_grid_of_small_arrays_does_not_depend_on_the_layout(layout):
    model, mesh, bucket_bytes = layout
    one = MeshShape()
    here = array_specs(parameters(model, mesh), mesh, bucket_bytes=bucket_bytes, types=StateTypes())
    plain = array_specs(parameters(model, one), one, bucket_bytes=bucket_bytes, types=StateTypes())
    assert [array.name for array in here] == [array.name for array in plain]
    for array, other in zip(here, plain, strict=True):
        if mesh.tp in (1, 2, 4, 8):
            assert array == other


@given(layouts())
def test_every_element_is_owned_once_by_ranks_with_the_same_optimizer_region(layout):
    model, mesh, _ = layout
    for spec in parameters(model, mesh):
        owned = [
            box
            for place in mesh.coordinates()
            if mesh.shard(place) < spec.sharers(mesh.ep) and is_owner(spec, place) and (box := local_box(spec, mesh, place))
        ]
        assert tiling_problems(spec.shape, owned) == []


@pytest.mark.parametrize(
    ("vocab", "unit"),
    [(128256, 16), (163840, 64), (256, 16), (257, 2), (1009, 8), (50257, 64), (7, 1)],  # 1009 pads to 1016: 0.7 %
)
def test_the_vocabulary_is_cut_evenly_where_it_can_be(vocab, unit):
    assert vocabulary_unit(vocab) == unit
    for tp in (2, 4, 8, 16):
        parts = [Placement(Kind.CUT, unit=unit).interval(vocab, tp, index) for index in range(tp)]
        assert [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
        assert (parts[0][0], parts[-1][1]) == (0, vocab)
        if vocab % 16 == 0:
            assert {stop - start for start, stop in parts} == {vocab // tp}


def test_kv_heads_are_copied_when_tp_exceeds_them():
    model = Model(layers=1, hidden=64, heads=8, kv_heads=2, ffn=64, vocab=256)
    mesh = MeshShape(tp=4)
    wk = next(spec for spec in parameters(model, mesh) if spec.name == "layers.0.attention.wk")
    assert wk.tp.copies == 2
    offsets = [local_box(wk, mesh, Coordinate(tp=tp)).offset[0] for tp in range(4)]
    assert offsets == [0, 0, 8, 8]
    assert [is_owner(wk, Coordinate(tp=tp)) for tp in range(4)] == [True, False, True, False]


def test_tied_embedding_is_one_array_with_two_stages():
    model = Model(layers=2, hidden=64, heads=4, ffn=64, vocab=256, tied=True)
    mesh = MeshShape(pp=2, dp=2)
    specs = parameters(model, mesh)
    assert [spec.name for spec in specs if spec.shape == (256, 64)] == ["embedding"]
    buckets = [plan_buckets(specs, mesh, Coordinate(pp=pp), bucket_bytes=2**26) for pp in range(2)]
    twins = [next(b for b in stage if any(s.spec.name == "embedding" for s in b.slots)) for stage in buckets]
    assert twins[0] == twins[1]
    arrays = array_specs(specs, mesh, bucket_bytes=2**26, types=StateTypes())
    assert arrays[0].attributes == {"tied": ["head"]}


@pytest.mark.parametrize(
    ("model", "mesh", "layers_of_a_bucket"),
    [
        pytest.param(
            Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256), MeshShape(dp=64), 2, id="8B"
        ),
        pytest.param(
            Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256), MeshShape(tp=8, dp=64), 4, id="70B"
        ),
        pytest.param(
            Model(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256),
            MeshShape(tp=8, pp=16, dp=128),
            4,
            id="405B",
        ),
        pytest.param(
            Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, experts=8),
            MeshShape(dp=64, ep=8),
            2,
            id="8x7B",
        ),
    ],
)
def test_padding_of_real_models_is_small(model, mesh, layers_of_a_bucket):
    specs = parameters(model, mesh)
    one_layer = 2 * sum(prod(spec.shape) for spec in specs if spec.block == "layers.0") / mesh.tp
    bucket_bytes = (layers_of_a_bucket - 0.5) * one_layer
    for stage in (0, mesh.pp - 1):
        buckets = plan_buckets(specs, mesh, Coordinate(pp=stage), bucket_bytes=bucket_bytes)
        assert sum(b.padding for b in buckets) <= 0.05 * sum(b.numel for b in buckets)


def test_placement_of_the_table():
    specs = {spec.name: spec for spec in parameters(Model(layers=1, hidden=64, heads=4, ffn=64, vocab=256), MeshShape(tp=2))}
    cuts = {name: (spec.tp.kind, spec.tp.dim) for name, spec in specs.items()}
    assert cuts["layers.0.attention.wo"] == cuts["layers.0.mlp.w2"] == (Kind.CUT, 1)
    assert cuts["layers.0.attention.wq"] == cuts["layers.0.mlp.w1"] == cuts["embedding"] == cuts["head"] == (Kind.CUT, 0)
    assert cuts["norm"][0] is Kind.PARTIAL
    assert specs["norm"].reduce_axes() == ("tp", "cp", "dp")
    assert [name for name, spec in specs.items() if not spec.decay] == [
        "layers.0.attention_norm",
        "layers.0.mlp_norm",
        "norm",
    ]


def test_placement_of_experts():
    model = Model(layers=1, hidden=64, heads=4, ffn=96, vocab=256, experts=4)
    mesh = MeshShape(tp=2, cp=2, dp=2, ep=2)
    specs = {spec.name.removeprefix("layers.0.moe."): spec for spec in parameters(model, mesh) if ".moe." in spec.name}
    assert {name: spec.shape for name, spec in specs.items()} == {
        "router": (4, 64),
        "w1": (4, 96, 64),
        "w2": (4, 64, 96),
        "w3": (4, 96, 64),
    }
    here = Coordinate(tp=1, cp=1, dp=1)  # index 3 of cp x dp, so the second of the second pair
    assert mesh.expert_group(mesh.rank(here)) == (5, 7)
    assert mesh.expert_replicas(mesh.rank(here)) == (3, 7)
    assert local_box(specs["w1"], mesh, here) == Box((2, 48, 0), (2, 48, 64))
    assert local_box(specs["w2"], mesh, here) == Box((2, 0, 48), (2, 64, 48))
    assert local_box(specs["router"], mesh, here) == Box.whole((4, 64))
    assert (specs["router"].tp.kind, specs["router"].sharers(2), specs["w1"].sharers(2)) == (Kind.PARTIAL, 1, 2)
    plain = parameters(model, mesh, sequence_parallel=False)
    assert next(spec.tp.kind for spec in plain if spec.name.endswith("router")) is Kind.REPLICATED


def test_a_region_of_stacked_matrices_is_at_most_three_boxes():
    box = Box((0, 0, 0), (5, 6, 8))
    for first in range(31):
        for last in range(first + 1, 31):
            boxes = list(bucket_plans._row_boxes(box, first, last))
            rows = [
                (b.offset[0] + m) * 6 + b.offset[1] + r for b in boxes for m in range(b.shape[0]) for r in range(b.shape[1])
            ]
            assert rows == list(range(first, last))
            assert len(boxes) <= 3
