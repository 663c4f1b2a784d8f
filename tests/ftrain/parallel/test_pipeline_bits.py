"""Every schedule computes what one process computes: the same bits if untied, the same numbers if tied or cut further."""

import pytest
import torch
from engines import engine_of, train
from pipelines import SCHEDULES, errors, one_of, piped, run_mesh, same_bits
from world import run_world

STEPS = 3


def check_bits(config):
    ours, one = run_mesh(config, STEPS), run_mesh(one_of(config), STEPS)
    assert ours.results == one.results
    assert same_bits(ours.arrays, one.arrays) == []
    assert ours.loss == one.loss


def check_numbers(config):
    """fp64, within rounding."""
    ours, one = run_mesh(config, STEPS), run_mesh(one_of(config), STEPS)
    for result, wanted in zip(ours.results, one.results, strict=True):
        assert result.loss == pytest.approx(wanted.loss, rel=1e-12)
        assert result.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-12)
        assert result.tokens == wanted.tokens
    worst = errors(ours.arrays, one.arrays)
    assert max(worst.values()) < 1e-12, max(worst, key=worst.__getitem__)
    assert ours.loss == pytest.approx(one.loss, rel=1e-12)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pipeline_is_one_process_bit_for_bit(schedule, pp):
    check_bits(piped(schedule, pp=pp))


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "zb_v"])
def test_one_rank_may_use_any_schedule(schedule):
    check_bits(piped(schedule, pp=1))


@pytest.mark.dist
def test_bf16_activations_are_the_same_bits():
    check_bits(piped("zb_h1", dtype="bfloat16"))


@pytest.mark.dist
@pytest.mark.parametrize("counts", [(1, 3), (3, 1)])
def test_uneven_stages_are_the_same_bits(counts):
    check_bits(piped("1f1b", model={"layers": 4}, parallel={"layer_counts": counts}))


@pytest.mark.dist
def test_a_short_last_micro_batch_travels_in_its_own_shape():
    check_bits(piped("1f1b", batch={"global_batch": 8, "micro_batch": 3}))


@pytest.mark.dist
def test_fewer_micro_batches_than_stages():
    check_bits(piped("zb_h1", pp=3, batch={"global_batch": 2}))


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tied_embedding_across_the_ends(schedule):
    check_numbers(piped(schedule, model={"tied": True}, dtype="float64"))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("schedule", "tied", "batch"),
    [
        ("1f1b", True, 8),
        ("1f1b", False, 7),  # 4 and 3 micro-batches
        ("interleaved", True, 8),
        ("zb_v", True, 7),
        ("zb_h1", False, 8),
        ("gpipe", True, 1),  # the second replica has nothing to do
    ],
)
def test_pipelines_side_by_side(schedule, tied, batch):
    """pp 2 x dp 2; replicas may have unequal numbers of micro-batches."""
    check_numbers(piped(schedule, ranks=4, model={"tied": tied}, batch={"global_batch": batch}, dtype="float64"))


@pytest.mark.dist
@pytest.mark.parametrize(("schedule", "sp"), [("1f1b", True), ("zb_v", True), ("zb_h1", False)])
def test_pipelines_of_tensor_parallel_stages(schedule, sp):
    """pp 2 x tp 2."""
    config = piped(schedule, ranks=4, model={"tied": schedule == "1f1b"}, parallel={"tp": 2, "sp": sp}, dtype="float64")
    check_numbers(config)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
def test_overlap_changes_no_bit(schedule):
    """pp 2 x dp 2, tied: reductions beside the last backward, gathers beside the next forward."""
    plain = piped(schedule, ranks=4, model={"tied": True}, batch={"global_batch": 8})
    both = piped(
        schedule,
        ranks=4,
        model={"tied": True},
        batch={"global_batch": 8},
        parallel={"overlap_reduce": True, "overlap_gather": True},
    )
    ours, theirs = run_mesh(both, STEPS), run_mesh(plain, STEPS)
    assert ours.results == theirs.results
    assert same_bits(ours.arrays, theirs.arrays) == []
    assert ours.loss == theirs.loss


@pytest.mark.dist
def test_overlap_without_a_pipeline_changes_no_bit():
    plain, both = (
        piped("1f1b", pp=1, ranks=2, model={"layers": 4}, parallel={"overlap_reduce": switch, "overlap_gather": switch})
        for switch in (False, True)
    )
    ours, theirs = run_mesh(both, STEPS), run_mesh(plain, STEPS)
    assert ours.results == theirs.results
    assert same_bits(ours.arrays, theirs.arrays) == []


def _break_and_resume(rank, config):
    unbroken = engine_of(config, rank)
    train(unbroken, 2)
    state = [piece.tensor.clone() for piece in unbroken.pieces()]
    rest = train(unbroken, 2)
    again = engine_of(config, rank)
    for piece, saved in zip(again.pieces(), state, strict=True):
        piece.tensor.copy_(saved)
    again.after_load()
    again.set_step(2)
    assert train(again, 2) == rest
    for ours, theirs in zip(again.optimizer.regions, unbroken.optimizer.regions, strict=True):
        assert torch.equal(ours.weights, theirs.weights)
        assert torch.equal(ours.master, theirs.master)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_pipeline_resumes_bit_for_bit(schedule):
    run_world(_break_and_resume, 4, piped(schedule, ranks=4, model={"tied": True}))
