"""Every schedule computes what one process computes: the same bits if untied, the same numbers if tied or cut further."""

import pytest
from pipelines import SCHEDULES, errors, one_of, piped, run_mesh, same_bits

STEPS = 3


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_pipeline_is_one_process_bit_for_bit(schedule, pp):
    config = piped(schedule, pp=pp)
    ours, one = run_mesh(config, STEPS), run_mesh(one_of(config), STEPS)
    assert ours.results == one.results
    assert same_bits(ours.arrays, one.arrays) == []
    assert ours.loss == one.loss
