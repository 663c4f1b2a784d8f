"""State under tensor parallelism is the state: initial values, checkpoints and resumption know no layout."""

import pytest
from layouts import laid_out
from mixed import loaded, tiers_in, trained
from resumed import BEFORE, goes_on, goes_on_bit_for_bit
from tiny import tiny

MODEL = {"vocab": 67, "heads": 4, "kv_heads": 2, "tied": True, "qk_norm": True}
OTHERS = [
    {"ranks": 1},
    {"ranks": 4},
    {"ranks": 4, "tp": 4},
    {"ranks": 2, "tp": 2, "sp": False},
    {"ranks": 4, "tp": 2, "order": ("dp", "tp", "cp", "pp")},
]


def base(dtype="float64"):
    return tiny(model=MODEL, batch={"global_batch": 6, "micro_batch": 2}, machine={"compute_dtype": dtype})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps under tp 2 x dp 2, in storage and in the memory tier."""
    tiers = tiers_in(tmp_path_factory.mktemp("saved"), "tp2dp2")
    digests, _, manifest = trained(laid_out(base(), ranks=4, tp=2), BEFORE, tiers)
    assert manifest.digests == digests
    return tiers, digests


@pytest.mark.dist
def test_initial_values_know_no_layout():
    digests = [trained(laid_out(base("float32"), **layout), 0)[0] for layout in ({"ranks": 1}, *OTHERS[2:])]
    assert all(other == digests[0] for other in digests)


@pytest.mark.dist
@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: ",".join(f"{k}={v}" for k, v in layout.items() if k != "order"))
def test_saved_under_tp_2_dp_2_and_loaded_under_another_layout(layout, saved):
    tiers, digests = saved
    assert loaded(laid_out(base(), **layout), "storage", tiers).at_load == digests


@pytest.mark.dist
def test_saved_under_another_layout_and_loaded_under_tp_2_dp_2(tmp_path):
    tiers = tiers_in(tmp_path, "dp3")
    digests, _, _ = trained(laid_out(base(), ranks=3), BEFORE, tiers)
    for source in ("storage", "memory"):
        assert loaded(laid_out(base(), ranks=4, tp=2), source, tiers).at_load == digests


@pytest.mark.dist
def test_resumed_in_the_middle_under_another_layout_it_is_one_process(saved):
    tiers, _ = saved
    goes_on(base(), tiers, OTHERS)


@pytest.mark.dist
def test_resumed_under_the_same_layout_it_is_bit_for_bit_the_same(tmp_path):
    goes_on_bit_for_bit(laid_out(base("float32"), ranks=4, tp=2), tmp_path)
