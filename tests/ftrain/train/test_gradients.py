"""Gradients of many micro-batches in fp32, and the loss over valid tokens only."""

import numpy as np
import pytest
import torch
from engines import engine_of, error, initial
from reference import loss_sum
from tiny import data_of, tiny

MICRO_BATCHES = 64
BOUND = 1e-5


def exact_gradients(weights, config, batch):
    """fp64 autograd through the same bf16 weights."""
    exact = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    tokens, targets, valid = (torch.from_numpy(a) for a in (batch.tokens, batch.targets, batch.valid))
    (loss_sum(exact, config.model, tokens, targets, valid) / valid.sum()).backward()
    return {name: weight.grad for name, weight in exact.items()}


@pytest.fixture(scope="module")
def many():
    config = tiny(batch={"global_batch": MICRO_BATCHES}, machine={"compute_dtype": "float32"})
    weights = {name: master.bfloat16() for name, master in initial(config).items()}
    batch = data_of(config).sequences(0, MICRO_BATCHES)
    return config, weights, batch, exact_gradients(weights, config, batch)


def test_sixty_four_micro_batches_stay_within_the_bound(many):
    config, _, _, exact = many
    engine = engine_of(config)
    engine._accumulate_gradients(0, engine.config.batch.global_batch)
    ours = {name: parameter.main_grad for name, parameter in engine.model.named_parameters()}
    assert error(ours, exact) < BOUND


def test_accumulating_through_a_bf16_grad_would_fail_that_bound(many):
    """What autograd does with bf16 parameters: each micro-batch is rounded, and so is each sum."""
    config, weights, batch, exact = many
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    total = int(batch.valid.sum())
    for row in range(MICRO_BATCHES):
        tokens, targets, valid = (torch.from_numpy(a[row : row + 1]) for a in (batch.tokens, batch.targets, batch.valid))
        wide = {name: leaf.float() for name, leaf in leaves.items()}
        (loss_sum(wide, config.model, tokens, targets, valid) / total).backward()
    assert error({name: leaf.grad for name, leaf in leaves.items()}, exact) > 100 * BOUND


def test_masked_targets_change_nothing():
    config = tiny()
    engine = engine_of(config)
    loss, tokens = engine._accumulate_gradients(0, engine.config.batch.global_batch)
    before = [region.main_grad.clone() for region in engine.optimizer.regions]
    data = data_of(config)
    plain = data.sequences

    def wild(first, count):
        batch = plain(first, count)
        batch.targets = np.where(batch.valid, batch.targets, 7)
        return batch

    data.sequences = wild
    engine.dataset = data
    engine.optimizer.zero_grad()
    again, same = engine._accumulate_gradients(0, engine.config.batch.global_batch)
    assert (again, same) == (loss, tokens)
    assert tokens == int(plain(0, config.batch.global_batch).valid.sum())
    for region, old in zip(engine.optimizer.regions, before, strict=True):
        assert torch.equal(region.main_grad, old)


def test_a_batch_without_valid_tokens_is_a_zero_gradient():
    config = tiny()
    engine = engine_of(config)
    data = data_of(config)
    plain = data.sequences

    def nothing(first, count):
        batch = plain(first, count)
        batch.valid[:] = False
        return batch

    data.sequences = nothing
    engine.dataset = data
    result = engine.train_step(step=1, first_sequence=0)
    assert (result.loss, result.grad_norm, result.tokens, result.applied) == (0.0, 0.0, 0, True)
