"""Experts that are shared out are the same state and the same training as experts that are not."""

import pytest
from layouts import laid_out
from mixed import loaded, tiers_in, trained
from resumed import BEFORE, goes_on, goes_on_bit_for_bit
from tiny import tiny

from ftrain.parallel.buckets import may_be_cut, plan_buckets
from ftrain.parallel.shape import Coordinate, mesh_shape
from ftrain.parallel.stages import config_parameters

PP4 = {"ranks": 4, "pp": 4}
EP4 = {"ranks": 4, "ep": 4}
OTHERS = [
    {"ranks": 1},
    {"ranks": 2},
    {"ranks": 2, "ep": 2},
    {"ranks": 4, "ep": 2, "tp": 2},
    {"ranks": 4, "ep": 2, "cp": 2, "cp_exchange": "ring"},
    {"ranks": 4, "ep": 2, "pp": 2},
    {"ranks": 4, "ep": 2, "order": ("dp", "tp", "cp", "pp")},
]


def base(dtype="float64", **model):
    chosen = {"layers": 4, "experts": 4, "capacity": 1.5, "balance_coef": 0.1, **model}
    sizes = {"batch": {"global_batch": 12}, "evaluate": {"sequences": 12}}  # replicas that share experts take equal shares
    return tiny(model=chosen, machine={"compute_dtype": dtype}, **sizes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps of a pipeline of four, in storage and in the memory tier."""
    tiers = tiers_in(tmp_path_factory.mktemp("saved"), "pp4")
    digests, _, manifest = trained(laid_out(base(), **PP4), BEFORE, tiers)
    assert manifest.digests == digests
    return tiers, digests


@pytest.mark.dist
def test_pp4_goes_on_as_ep4(saved):
    """Digests equal, from storage and from memory, and the training goes on (Megatron-LM 1517)."""
    tiers, digests = saved
    for source in ("storage", "memory"):
        assert loaded(laid_out(base(), **EP4), source, tiers).at_load == digests
    goes_on(base(), tiers, [EP4])


@pytest.mark.dist
@pytest.mark.slow
def test_ep4_is_loaded_as_pp4(tmp_path):
    tiers = tiers_in(tmp_path, "ep4")
    digests, _, _ = trained(laid_out(base("float32"), **EP4), BEFORE, tiers)
    assert loaded(laid_out(base("float32"), **PP4), "storage", tiers).at_load == digests


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: ",".join(f"{k}={v}" for k, v in layout.items() if k != "order"))
def test_pp4_goes_on_under_any_other_layout(layout, saved):
    tiers, digests = saved
    assert loaded(laid_out(base(), **layout), "storage", tiers).at_load == digests
    goes_on(base(), tiers, [layout])


@pytest.mark.dist
def test_resumed_under_the_same_layout_it_is_bit_for_bit_the_same(tmp_path):
    goes_on_bit_for_bit(laid_out(base("float32"), ranks=4, ep=2), tmp_path)


def large(**parallel):
    """Stacks above 4 MiB: two replicas with the same three experts share nine matrices, and cut one of them."""
    config = base("float32", layers=1, hidden=512, ffn=512, experts=6)
    return laid_out(config, bucket_mib=4.0, **parallel)


@pytest.mark.dist
def test_regions_end_within_experts(tmp_path):
    config = large(ranks=4, ep=2)
    mesh, tiers = mesh_shape(config), tiers_in(tmp_path, "large")
    buckets = plan_buckets(config_parameters(config, mesh), mesh, Coordinate(), bucket_bytes=4 * 2**20)
    parts = [part for bucket in buckets for region in range(bucket.num_regions) for part in bucket.parts(region)]
    assert any(may_be_cut(part.spec) and part.box.shape[1] < part.spec.shape[1] for part in parts if ".moe.w" in part.spec.name)
    digests, _, _ = trained(config, 1, tiers)
    assert loaded(large(ranks=3), "storage", tiers).at_load == digests
    assert loaded(large(ranks=3, ep=3), "memory", tiers).at_load == digests
