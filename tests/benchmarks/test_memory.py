"""The planner's bytes are those found on running ranks: state within 1 %, activations within 10 %, whatever the layout."""

import pytest

from benchmarks.memory import LAYOUTS, measure

QUICK = ("one, selective", "pp2, 1f1b")


@pytest.mark.dist
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_predicted_bytes_are_those_found(name):
    for rank in measure(LAYOUTS[name], tiny=False):
        assert abs(rank["state_error"]) < 0.01, rank
        assert abs(rank["activations_error"]) < 0.10, rank
