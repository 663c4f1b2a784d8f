"""State under pipelines is the state: saved by one layout, loaded by any other, and the training goes on."""

import msgspec
import pytest
from mixed import loaded, tiers_in, trained
from tiny import tiny

BEFORE, AFTER = 2, 2
LAYOUTS = {
    "one": {},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2 zb-v": {"pp": 2, "schedule": "zb_v"},
    "pp2 interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "pp2 uneven": {"pp": 2, "layer_counts": (1, 3)},
    "dp2": {"ranks": 2},
    "pp2 dp2": {"ranks": 4, "pp": 2},
}


def config_of(name, *, tied):
    config = tiny(model={"layers": 4, "tied": tied}, machine={"compute_dtype": "float32"})
    chosen = LAYOUTS[name]
    ranks = chosen.get("ranks", chosen.get("pp", 1))
    return msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, **{**chosen, "ranks": ranks}))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(request, tmp_path_factory):
    """Two steps under pp 2, in storage and in the memory tier."""
    tiers = tiers_in(tmp_path_factory.mktemp("saved"), "pp2")
    digests, loss, manifest = trained(config_of("pp2", tied=request.param), BEFORE, tiers)
    assert manifest.digests == digests
    return tiers, digests, loss, request.param


@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_saved_under_pp_2_and_loaded_under_another_layout(name, saved):
    tiers, digests, loss, tied = saved
    there = loaded(config_of(name, tied=tied), "storage", tiers)
    assert there.at_load == digests
    assert there.eval_loss == loss  # nothing a pipeline or replicas do changes a bit of it


@pytest.mark.dist
def test_saved_under_pp_2_dp_2_and_loaded_under_pp_4(tmp_path):
    for tied in (False, True):
        tiers = tiers_in(tmp_path, f"tied-{tied}")
        digests, _, _ = trained(config_of("pp2 dp2", tied=tied), BEFORE, tiers)
        for source in ("storage", "memory"):
            assert loaded(config_of("pp4", tied=tied), source, tiers).at_load == digests


@pytest.mark.dist
def test_an_untied_run_goes_on_bit_for_bit_on_any_pipeline(tmp_path):
    """Two steps on one process or a pipeline, two on another: as if one process had done all four."""
    unbroken, _, _ = trained(config_of("one", tied=False), BEFORE + AFTER)
    tiers = tiers_in(tmp_path, "pp2")
    trained(config_of("pp2", tied=False), BEFORE, tiers)
    for name in ("one", "pp4", "pp2 zb-v", "pp2 interleaved", "pp2 uneven"):
        assert loaded(config_of(name, tied=False), "storage", tiers, steps=AFTER).at_end == unbroken
