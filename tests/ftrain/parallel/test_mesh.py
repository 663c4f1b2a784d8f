"""The groups of a mesh, and the flat collectives, on real process groups."""

import pytest
import tiny  # noqa: F401  (one thread)
import torch
from world import RankError, run_world

from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import AXES, SHARD_AXES, MeshShape

SHAPE = MeshShape(tp=2, cp=2, dp=2)


def _sums(rank, shape):
    mesh = Mesh(shape, rank)
    for axes in [(axis,) for axis in AXES] + [SHARD_AXES, AXES]:
        total = mesh.all_reduce(torch.tensor([1.0, float(rank)]), axes)
        members = shape.group(rank, axes)
        assert total.tolist() == [len(members), sum(members)], axes
    return mesh.shard


@pytest.mark.dist
def test_sums_go_over_the_axes_they_name():
    shards = run_world(_sums, SHAPE.world, SHAPE)
    assert shards == [SHAPE.shard(place) for place in SHAPE.coordinates()]


def _flat(rank, shape):
    mesh = Mesh(shape, rank)
    numbers = torch.arange(12, dtype=torch.float32)
    members = shape.group(rank, SHARD_AXES)
    flat = numbers * (rank + 1)
    mine = mesh.reduce_scatter(flat)
    region = slice(mesh.shard * 3, mesh.shard * 3 + 3)
    assert torch.equal(mine, numbers[region] * sum(member + 1 for member in members))
    assert mine.data_ptr() == flat[region].data_ptr()
    weights = torch.zeros(12, dtype=torch.bfloat16)
    mesh.region(weights).fill_(rank)
    mesh.all_gather(weights)
    assert weights.tolist() == [member for member in members for _ in range(3)]


@pytest.mark.dist
def test_row_23_flat_collectives_work_in_place():
    run_world(_flat, SHAPE.world, SHAPE)


def _wrong(rank):
    Mesh(MeshShape(dp=3), rank)


@pytest.mark.dist
def test_a_mesh_of_another_size_is_refused_and_the_error_names_a_rank():
    with pytest.raises(RankError, match=r"rank [01] of 2 failed(?s:.*)the process group says rank [01] of 2"):
        run_world(_wrong, 2)


def test_one_rank_needs_no_process_group():
    mesh = Mesh(MeshShape(), 0)
    numbers = torch.arange(4.0)
    assert mesh.group() is None
    assert torch.equal(mesh.reduce_scatter(numbers), numbers)
    mesh.all_gather(numbers)
    assert mesh.all_reduce(numbers).tolist() == [0, 1, 2, 3]
