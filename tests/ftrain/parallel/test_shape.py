"""Rank arithmetic against brute force."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftrain.parallel.mesh import GROUPS, groups, members
from ftrain.parallel.partition import deal, microbatches, partition_layers
from ftrain.parallel.shape import AXES, SHARD_AXES, Coordinate, MeshShape

SIZES = st.integers(1, 4)
MESHES = st.builds(
    lambda tp, cp, pp, dp, order: MeshShape(tp=tp, cp=cp, pp=pp, dp=dp, order=tuple(order)),
    SIZES,
    SIZES,
    SIZES,
    SIZES,
    st.permutations(AXES),
)


@settings(deadline=None)
@given(MESHES)
def test_rank_and_coordinate_are_inverse(mesh):
    assert [mesh.rank(place) for place in mesh.coordinates()] == list(range(mesh.world))
    assert len(set(mesh.coordinates())) == mesh.world


@settings(deadline=None)
@given(MESHES, st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(mesh, axes):
    axes = tuple(axes)
    found = {mesh.group(rank, axes) for rank in range(mesh.world)}
    assert sorted(rank for group in found for rank in group) == list(range(mesh.world))
    for group in found:
        assert list(group) == sorted(group)
        places = {mesh.coordinate(rank) for rank in group}
        for axis in AXES:
            assert len({place.on(axis) for place in places}) == (mesh.size(axis) if axis in axes else 1)


@settings(deadline=None)
@given(MESHES, st.data())
def test_all_groups_of_a_kind_are_those_of_every_rank_in_the_order_of_their_first(mesh, data):
    mesh = replace(mesh, ep=data.draw(st.sampled_from([n for n in range(1, mesh.shards + 1) if mesh.shards % n == 0])))
    for along in GROUPS:
        assert list(groups(mesh, along)) == list(dict.fromkeys(members(mesh, rank, along) for rank in range(mesh.world)))


@settings(deadline=None)
@given(MESHES)
def test_shards_number_each_group(mesh):
    for rank in range(mesh.world):
        group = mesh.group(rank, SHARD_AXES)
        assert [mesh.shard(mesh.coordinate(member)) for member in group] == list(range(mesh.shards))


def test_founding_layout():
    mesh = MeshShape(tp=8, pp=8, dp=80)
    assert mesh.world == 5120
    assert mesh.group(0, ("tp",)) == tuple(range(8))
    assert mesh.group(0, ("pp",)) == tuple(range(0, 64, 8))
    assert mesh.coordinate(64) == Coordinate(dp=1)


def test_order_must_name_each_axis_once():
    with pytest.raises(ValueError, match="exactly once"):
        MeshShape(tp=2, order=("tp", "tp", "pp", "dp"))
    with pytest.raises(ValueError, match="rank 4"):
        MeshShape(dp=4).coordinate(4)


@given(st.integers(0, 300), st.integers(1, 60))
def test_deal_is_contiguous_and_even(num_items, num_hands):
    hands = [deal(num_items, num_hands, hand) for hand in range(num_hands)]
    assert [item for hand in hands for item in hand] == list(range(num_items))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@given(st.integers(1, 100), st.integers(1, 9), st.integers(1, 20))
def test_microbatches_do_not_depend_on_the_replicas(global_batch, micro_batch, replicas):
    dealt = [part for replica in range(replicas) for part in microbatches(global_batch, micro_batch, replicas, replica)]
    assert tuple(dealt) == microbatches(global_batch, micro_batch, 1, 0)
    assert [sequence for part in dealt for sequence in part] == list(range(global_batch))
    assert all(len(part) == micro_batch for part in dealt[:-1])


def test_sixteen_sequences_over_seven_replicas():
    assert [len(microbatches(16, 1, 7, replica)) for replica in range(7)] == [3, 3, 2, 2, 2, 2, 2]


@given(st.integers(1, 130), st.integers(1, 130))
def test_layers_of_the_stages(layers, stages):
    if stages > layers:
        with pytest.raises(ValueError, match="every stage needs a layer"):
            partition_layers(layers, stages)
        return
    parts = partition_layers(layers, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_llama3_gives_the_ends_one_layer_fewer():
    assert [len(part) for part in partition_layers(126, 16)] == [7, *[8] * 14, 7]
    assert [len(part) for part in partition_layers(5, 2, (4, 1))] == [4, 1]
    with pytest.raises(ValueError, match="add up to 5"):
        partition_layers(5, 2, (3, 1))


def test_planning_needs_no_torch():
    """The supervisor's `--dry-run` and the planner ask these modules; none of them may pay for torch."""
    modules = ("shape", "partition", "layout", "buckets")
    code = (
        "import sys; " + "; ".join(f"import ftrain.parallel.{name}" for name in modules) + "; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
