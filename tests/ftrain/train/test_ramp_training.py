"""A batch that grows in the middle of a run: the same data under every layout, and resumed bit for bit."""

import pytest
import torch
from engines import engine_of, train
from pipelines import one_of, piped, run_mesh
from tiny import tiny
from world import run_world

from ftrain.config import Ramp

# 12 tokens a sequence: updates of 2, 2, 4, 4 and then 8 sequences, which begin at 0, 2, 4, 8 and 12, ...
RAMP = {"ramp": (Ramp(tokens=4 * 12, global_batch=2), Ramp(tokens=12 * 12, global_batch=4))}
SIZES = [2, 2, 4, 4, 8, 8]


def ramped(ranks=1):
    return tiny(ranks=ranks, batch=RAMP, machine={"compute_dtype": "float32"})


def state_of(engine):
    return [piece.tensor.clone() for piece in engine.pieces()]


def _resumed_anywhere(rank, config):
    unbroken = engine_of(config, rank)
    states, results = [state_of(unbroken)], []
    for _ in SIZES:
        results += train(unbroken, 1)
        states.append(state_of(unbroken))
    assert [result.sequences for result in results] == SIZES
    for step in range(1, len(SIZES)):
        again = engine_of(config, rank)
        for piece, saved in zip(again.pieces(), states[step], strict=True):
            piece.tensor.copy_(saved)
        again.after_load()
        again.set_step(step)
        assert train(again, len(SIZES) - step) == results[step:]
        assert all(torch.equal(a, b) for a, b in zip(state_of(again), states[-1], strict=True))


def test_one_process_resumes_anywhere_in_a_ramp():
    _resumed_anywhere(0, ramped())


@pytest.mark.dist
def test_replicas_resume_anywhere_in_a_ramp():
    run_world(_resumed_anywhere, 2, ramped(ranks=2))


@pytest.mark.dist
def test_a_pipeline_takes_the_same_batches():
    """fp32: a pipeline is bit-identical to one process, whatever the number of micro-batches of each step."""
    config = piped(batch=RAMP)
    ran, one = run_mesh(config, len(SIZES)), run_mesh(one_of(config), len(SIZES))
    assert [result.sequences for result in ran.results] == SIZES
    assert [(result.tokens, result.loss) for result in ran.results] == [(result.tokens, result.loss) for result in one.results]
    assert all(torch.equal(ran.arrays[name], one.arrays[name]) for name in one.arrays)
