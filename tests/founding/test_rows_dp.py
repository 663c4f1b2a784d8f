"""The founding rows that concern data parallelism, batches and ZeRO-1 in the engine, by number."""

import pytest
import torch
from engines import engine_of, train
from pipelines import run_mesh, same_bits
from tiny import tiny
from world import run_world

from ftrain.config import Parallel
from ftrain.load import load
from ftrain.parallel.mesh import Mesh
from ftrain.parallel.partition import microbatches
from ftrain.parallel.program import Reduce
from ftrain.parallel.shape import SHARD_AXES, Coordinate, MeshShape, mesh_shape
from ftrain.schema import ConfigProblems


def test_row_13_the_engine_reduces_a_shard_over_its_80_replicas():
    """Stage 3, card 2: itself and the 79 others that hold the same parameters, each with other micro-batches."""
    config = load("configs/dense-500b.toml")
    shape = mesh_shape(config)
    rank = shape.rank(Coordinate(tp=2, pp=3))
    group = shape.group(rank, SHARD_AXES)
    assert len(group) == 1 + 79
    assert {(place.tp, place.pp) for place in map(shape.coordinate, group)} == {(2, 3)}
    read = [part for replica in range(80) for part in microbatches(2560, 1, 80, replica)]
    assert [index for part in read for index in part] == list(range(2560))


def _worked_example(rank):
    """Gradients as the engine makes them: of the summed loss over the tokens of *all* replicas, which it knows beforehand."""
    mesh = Mesh(MeshShape(dp=2), rank)
    counts = mesh.all_reduce(torch.tensor(1), ("dp",))  # equal-weight micro-batches
    grads = torch.full((2,), (2.0, 4.0)[rank]) / counts
    mean = mesh.reduce_scatter(grads)
    weights = torch.full((2,), 10.0)
    mesh.region(weights).sub_(0.1 * mean)
    mesh.all_gather(weights)
    return mean.tolist(), weights.tolist()


@pytest.mark.dist
def test_row_14_both_replicas_reach_9_7():
    """Both start at 10; gradients 2 and 4, mean 3; 10 - 0.1 x 3 = 9.7 on both. Each updates its half."""
    for mean, weights in run_world(_worked_example, 2):
        assert mean == [3.0]
        assert weights == [pytest.approx(9.7, abs=1e-6)] * 2


def test_row_19_global_batch_is_micro_times_count_times_replicas():
    """1 x 32 x 80 = 2,560; where it does not divide, replicas take unequal counts and nothing is lost or invented."""
    counts = [len(microbatches(2560, 1, 80, replica)) for replica in range(80)]
    assert counts == [32] * 80
    after_a_loss = [len(microbatches(2560, 1, 79, replica)) for replica in range(79)]
    assert sum(after_a_loss) == 2560
    assert set(after_a_loss) == {32, 33}


def test_row_19_what_cannot_be_dealt_is_refused_with_the_nearest_legal_values():
    with pytest.raises(ConfigProblems) as caught:
        load("configs/llama3-8b.toml", ["batch.global_batch=30", "batch.micro_batch=1"])
    (problem,) = caught.value.problems
    assert problem.path == "batch.global_batch"
    assert problem.hint == "nearest: 32"


def _bytes(engine):
    own = engine.optimizer.regions
    return {
        "weights": sum(region.weights.nbytes for region in own),
        "gradients": sum(region.main_grad.nbytes for region in own),
        "master": sum(region.master.nbytes for region in own),
        "moments": sum(region.exp_avg.nbytes + region.exp_avg_sq.nbytes for region in own),
        "elements": sum(region.bucket.numel for region in own),
    }


@pytest.mark.dist
def test_row_22_weights_and_gradients_are_whole_and_the_rest_is_halved():
    ran = run_mesh(tiny(ranks=2, machine={"compute_dtype": "float32"}), 1, _bytes)
    for held in ran.ranks:
        n = held["elements"]
        assert held["weights"] == 2 * n
        assert held["gradients"] == 4 * n
        assert held["master"] == 4 * n // 2
        assert held["moments"] == 8 * n // 2


def test_row_24_gradients_of_the_last_layers_are_reduced_while_the_first_are_computed():
    """C1, G1, C2, U: a bucket's reduction starts between two pieces of the backward; the update waits for all."""
    engine = engine_of(tiny(model={"layers": 3}, parallel={"overlap_reduce": True}))
    (program,) = engine.passes.program(2).ranks
    first = next(index for index, instruction in enumerate(program) if isinstance(instruction, Reduce))
    assert any(not isinstance(instruction, Reduce) for instruction in program[first:]), "nothing is computed behind it"
    train(engine, 1)
    assert not engine.optimizer._pending
    (plain,) = engine_of(tiny(model={"layers": 3})).passes.program(2).ranks
    first = next(index for index, instruction in enumerate(plain) if isinstance(instruction, Reduce))
    assert all(isinstance(instruction, Reduce) for instruction in plain[first:])


@pytest.mark.dist
def test_row_25_overlap_is_off_by_default_and_changes_no_bit():
    assert not Parallel().overlap_reduce
    assert not Parallel().overlap_gather
    assert not Parallel().tp_overlap
    plain = tiny(ranks=2, machine={"compute_dtype": "float32"})
    both = tiny(ranks=2, machine={"compute_dtype": "float32"}, parallel={"overlap_reduce": True, "overlap_gather": True})
    off, on = run_mesh(plain, 2), run_mesh(both, 2)
    assert off.results == on.results
    assert same_bits(on.arrays, off.arrays) == []
