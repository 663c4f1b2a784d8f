"""The largest models, built by the real engine without memory: one rank of each distinct stage, on the meta device.

A fake process group stands for the 5,120 and 16,384 ranks: groups are made as in a run, and nothing is sent.
"""

from itertools import product

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ftrain.load import load
from ftrain.parallel.buckets import plan_buckets
from ftrain.parallel.layout import is_owner
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.shape import Coordinate, mesh_shape
from ftrain.parallel.stages import config_parameters
from ftrain.plan import memory, profile
from ftrain.plan.setup import Setup, options_of
from ftrain.train.step import Engine
from storage.box import tiling_problems

STAGES = {"dense-500b": (0, 1, 7), "llama3-405b": (0, 1, 15), "mixtral-8x7b": (0, 1, 3)}  # first, middle, last


@pytest.fixture
def world():
    """Joins a process group of any size."""
    yield lambda rank, size: dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    dist.destroy_process_group()


@pytest.mark.parametrize(("name", "pp"), [(name, pp) for name, stages in STAGES.items() for pp in stages])
def test_a_rank_of_each_stage_has_the_bytes_of_the_plan(name, pp, world):
    config = load(f"configs/{name}.toml")
    shape = mesh_shape(config)
    place = Coordinate(pp=pp)
    world(shape.rank(place), shape.world)
    engine = Engine(config, mesh=Mesh(shape, shape.rank(place)), device="meta", dataset=None)

    regions = engine.optimizer.regions
    numel = sum(region.bucket.numel for region in regions)
    padding = sum(region.bucket.padding for region in regions)
    assert 0 < padding < 0.05 * numel

    setup = Setup(config=config, profile=profile.load("h100"), options=options_of(config))
    predicted = memory.all_ranks(setup)[pp]
    assert sum(parameter.numel() for module in engine.passes.modules.values() for parameter in module.parameters()) == (
        predicted.params
    )
    assert predicted.params == numel - padding
    assert predicted.weights == 2 * (numel - padding)
    buffers = [t for r in regions for t in (r.weights, r.main_grad, r.master, r.exp_avg, r.exp_avg_sq)]
    assert all(tensor.is_meta for tensor in buffers)
    assert predicted.state == sum(tensor.nbytes for tensor in buffers)


@pytest.mark.parametrize(("name", "pp"), [(name, pp) for name, stages in STAGES.items() for pp in stages])
def test_boxes_of_a_stage_tile_its_arrays(name, pp):
    """What all tensor ranks and replicas of the stage write, together."""
    config = load(f"configs/{name}.toml")
    shape = mesh_shape(config)
    specs = config_parameters(config, shape)
    boxes = {spec.name: [] for spec in specs if spec.stages[0] == pp}
    for tp, ep in product(range(shape.tp), range(shape.ep)):
        here = Coordinate(tp=tp, pp=pp, dp=ep)  # the first replica with these experts
        buckets = plan_buckets(specs, shape, here, bucket_bytes=config.parallel.bucket_mib * 2**20)
        for shard in range(ep, shape.shards, shape.ep):
            for part in (part for bucket in buckets for part in bucket.parts(bucket.region_of(shard))):
                if is_owner(part.spec, here):
                    boxes[part.spec.name].append(part.box)
    assert boxes
    for spec in specs:
        if spec.name in boxes:
            assert tiling_problems(spec.shape, boxes[spec.name]) == [], spec.name
