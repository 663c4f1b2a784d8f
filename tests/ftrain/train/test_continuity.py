"""What is bitwise: run to run, resumed against unbroken, and a changed number of replicas up to the sums."""

import pytest
import torch
from engines import engine_of, run_sharded, train
from tiny import tiny
from world import run_world

from ftrain.train.votes import Flags


def copy_of_state(engine):
    return [piece.tensor.clone() for piece in engine.pieces()]


def resumed(config, rank, state, step):
    """A new engine that gets masters and moments back and is told the step: all there is to restore."""
    engine = engine_of(config, rank)
    for piece, saved in zip(engine.pieces(), state, strict=True):
        piece.tensor.fill_(float("nan"))
        piece.tensor.copy_(saved)
    engine.after_load()
    engine.set_step(step)
    return engine


def _break_and_resume(rank, config):
    unbroken = engine_of(config, rank)
    train(unbroken, 2)
    state = copy_of_state(unbroken)
    rest = train(unbroken, 3)
    again = resumed(config, rank, state, 2)
    assert train(again, 3) == rest
    for a, b in zip(copy_of_state(again), copy_of_state(unbroken), strict=True):
        assert torch.equal(a, b)
    for ours, theirs in zip(again.optimizer.regions, unbroken.optimizer.regions, strict=True):
        assert torch.equal(ours.weights, theirs.weights)
    assert again.evaluate() == unbroken.evaluate()
    return rest


def test_one_process_resumes_bit_for_bit():
    _break_and_resume(0, tiny(machine={"compute_dtype": "float32"}))


@pytest.mark.dist
def test_replicas_resume_bit_for_bit():
    run_world(_break_and_resume, 3, tiny(ranks=3, machine={"compute_dtype": "float32"}))


@pytest.mark.dist
def test_two_runs_are_the_same_bits():
    config = tiny(ranks=3, machine={"compute_dtype": "float32"})
    (first, state, loss), (second, other, again) = run_sharded(config, 3), run_sharded(config, 3)
    assert (first, loss) == (second, again)
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.dist
def test_other_numbers_of_replicas_compute_the_same_batches():
    """fp32: the sums differ in their last bits, the batches not at all. 16 sequences over 8 replicas, then 7."""
    results = {}
    for ranks in (1, 7, 8):
        config = tiny(ranks=ranks, batch={"global_batch": 16}, machine={"compute_dtype": "float32"})
        results[ranks], _, _ = run_sharded(config, 3)
    for ranks in (7, 8):
        for ours, one in zip(results[ranks], results[1], strict=True):
            assert ours.tokens == one.tokens
            assert ours.loss == pytest.approx(one.loss, rel=1e-5)  # fp32 after three updates


@pytest.mark.dist
def test_more_replicas_than_micro_batches():
    config = tiny(ranks=3, batch={"global_batch": 2})
    results, _, _ = run_sharded(config, 2)
    one, _, _ = run_sharded(tiny(batch={"global_batch": 2}), 2)
    assert [result.loss for result in results] == pytest.approx([result.loss for result in one], rel=1e-12)


@pytest.mark.dist
def test_the_evaluation_is_bitwise_the_same_over_dp():
    losses = set()
    for ranks in (1, 2, 4):
        config = tiny(ranks=ranks, evaluate={"sequences": 7}, batch={"micro_batch": 2}, machine={"compute_dtype": "float32"})
        losses |= {value.hex() for value in run_world(_evaluate, ranks, config)}
    assert len(losses) == 1


def _evaluate(rank, config):
    return engine_of(config, rank).evaluate()


def _one_rank_is_broken(rank, config):
    calls = []
    engine = engine_of(config, rank, before_update=lambda: calls.append(engine.step))
    before = copy_of_state(engine)
    reduce = engine.optimizer.start_reduce

    def poisoned(bucket, **options):
        if rank == 1 and bucket == 0:
            engine.optimizer.regions[0].main_grad[0] = float("inf")
        reduce(bucket, **options)

    engine.optimizer.start_reduce = poisoned
    result = engine.train_step(step=1, first_sequence=0)
    assert not result.applied
    assert calls == [0]  # before the vote, whatever it says: who has passed it may overwrite what others still copy
    assert all(torch.equal(a, b) for a, b in zip(copy_of_state(engine), before, strict=True))
    engine.optimizer.start_reduce = reduce
    assert engine.train_step(step=2, first_sequence=8).applied
    assert calls == [0, 1]
    assert not all(torch.equal(a, b) for a, b in zip(copy_of_state(engine), before, strict=True))


@pytest.mark.dist
def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_update_on_all():
    run_world(_one_rank_is_broken, 2, tiny(ranks=2))


def _wishes(rank, config):
    return engine_of(config, rank).train_step(step=1, first_sequence=0, flags=Flags(stop=int(rank == 2), no_slot=int(rank > 0)))


@pytest.mark.dist
def test_wishes_are_summed_over_ranks():
    results = run_world(_wishes, 3, tiny(ranks=3))
    assert {result.flags for result in results} == {Flags(stop=1, save=0, no_slot=2, uploading=0)}


def test_the_state_knows_its_step():
    engine = engine_of(tiny())
    with pytest.raises(ValueError, match="asked for update 3, but the state is that after update 0"):
        engine.train_step(step=3, first_sequence=0)


def test_training_learns():
    """Each sequence repeated: the loss falls below that of guessing."""
    config = tiny(run={"steps": 60}, optimizer={"lr": 0.02}, machine={"compute_dtype": "float32"})
    engine = engine_of(config)
    losses = [engine.train_step(step=step, first_sequence=0).loss for step in range(1, 31)]
    assert losses[-1] < losses[0] / 2
