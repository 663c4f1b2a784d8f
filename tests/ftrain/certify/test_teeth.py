"""Each seeded defect is found, and by name."""

import re
from pathlib import Path

import certify_defects as defects
import pytest

from ftrain.load import load
from ftrain.train.certify.certify import Certifier
from ftrain.train.certify.layouts import parse_layouts
from ftrain.train.certify.pool import Pool

HERE = Path(__file__).parent
CONFIG = load(str(HERE.parents[2] / "configs" / "certify.toml"), ["model.layers=2", "data.seq_len=8", "certify.layouts=[]"])
ENV = {"PYTHONPATH": str(HERE)}


@pytest.fixture(scope="module")
def certifiers(tmp_path_factory):
    """By mode; they keep their references and their workers."""
    with Pool(4, env=ENV) as pool:
        yield {
            mode: Certifier(pool=pool, folder=tmp_path_factory.mktemp(mode), steps=1, modes=[mode]) for mode in ("fp64", "fp32")
        }


@pytest.mark.dist
@pytest.mark.parametrize("name", defects.DEFECTS)
def test_a_seeded_defect_is_found_and_named(name, certifiers):
    layout, parameter, what, mode = defects.DEFECTS[name]
    certifier = certifiers[mode]
    certifier.defect = f"certify_defects:{name}"
    certificate = certifier.certify(CONFIG, parse_layouts(layout, CONFIG))
    assert not certificate.holds
    found = [f for f in certificate.failures if f.what == what and re.search(parameter, f.parameter)]
    assert found, [str(failure) for failure in certificate.failures]
    assert {(f.layout, f.mode) for f in found} == {(layout, mode)}
    assert found[0].step == (0 if what == "digest" else 1)


@pytest.mark.dist
def test_without_a_defect_the_same_layouts_hold(certifiers):
    layouts = parse_layouts(";".join(dict.fromkeys(layout for layout, _, _, _ in defects.DEFECTS.values())), CONFIG)
    certifiers["fp64"].defect = ""
    certificate = certifiers["fp64"].certify(CONFIG, layouts)
    assert certificate.holds, [str(failure) for failure in certificate.failures]


@pytest.mark.dist
def test_data_in_another_order_is_found(certifiers):
    certifiers["fp64"].defect = "certify_defects:wrong_microbatches_dealt"
    certificate = certifiers["fp64"].certify(CONFIG, parse_layouts("dp=2", CONFIG))
    assert any(failure.what == "data" for failure in certificate.failures)
