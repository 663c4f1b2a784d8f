"""The parts of a certificate that need no processes: layouts as text, errors, the plans of all pairs, the table."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from ftrain.load import ConfigProblems, load
from ftrain.train.certify import planning
from ftrain.train.certify.certify import by_model
from ftrain.train.certify.compare import Result, distance, failures_of, rounded_truth
from ftrain.train.certify.layouts import in_mode, parse_layouts
from ftrain.train.certify.messages import StepDone
from ftrain.train.certify.verdict import Certificate, Failure, Row, Worst, text, worst_of

CONFIG = load(str(Path(__file__).parents[3] / "configs" / "certify.toml"))


def layouts(written):
    return parse_layouts(written, CONFIG)


def test_a_layout_says_all_of_itself():
    (one,) = layouts("tp=2, pp=2,dp=3,schedule=gpipe,layer_counts=1+3,order=dp+tp+cp+pp")
    parallel = one.config.parallel
    assert (parallel.ranks, parallel.tp, parallel.cp, parallel.pp) == (12, 2, 1, 2)
    assert (parallel.schedule, parallel.layer_counts, parallel.order) == ("gpipe", (1, 3), ("dp", "tp", "cp", "pp"))
    (other,) = parse_layouts("dp=2", one.config)
    assert (other.config.parallel.ranks, other.config.parallel.pp, other.config.parallel.layer_counts) == (2, 1, ())
    assert other.config.parallel.bucket_mib == CONFIG.parallel.bucket_mib  # a switch stays the config's
    assert other.one.parallel.ranks == 1


def test_layouts_of_one_model_are_compared_with_the_same_process():
    groups = by_model(layouts("tp=2;tp=2,model.tied=true;dp=2;pp=2,model.tied=true,sp=false"))
    assert [[layout.name for layout in group] for group in groups] == [
        ["tp=2", "dp=2"],
        ["tp=2,model.tied=true", "pp=2,model.tied=true,sp=false"],
    ]


def test_everything_wrong_with_a_list_is_said_at_once():
    with pytest.raises(ConfigProblems) as caught:
        layouts("tp=3;pp=9;dp=x;cp=3;speed=1;tp=2")
    problems = [str(problem) for problem in caught.value.problems]
    for name in ("tp=3", "pp=9", "dp=x", "cp=3", "speed=1"):
        assert any(problem.startswith(f"{name}: ") for problem in problems), (name, problems)
    assert not any(problem.startswith("tp=2:") for problem in problems)
    with pytest.raises(ConfigProblems, match="no layout"):
        layouts(" ; ")


@pytest.mark.parametrize(
    "written",
    ["tp=2,tp=4", "ranks=8,dp=2", "parallel.ranks=8,dp=2", "dp=true", "machine.compute_dtype=float32,dp=2", "dp=2,", "tp"],
)
def test_what_would_be_overwritten_is_refused(written):
    """Else the certificate would be of another layout than the one it names."""
    with pytest.raises(ConfigProblems):
        layouts(written)


def test_an_axis_may_be_named_as_the_config_does():
    (layout,) = layouts("parallel.tp=2,parallel.schedule=zb_v,pp=2")
    assert (layout.config.parallel.ranks, layout.config.parallel.tp, layout.config.parallel.schedule) == (4, 2, "zb_v")


def test_the_shipped_list_is_what_the_issue_asks_for():
    every = layouts(";".join(CONFIG.certify.layouts))
    parallels = [layout.config.parallel for layout in every]
    assert len(every) >= 16
    assert {p.schedule for p in parallels if p.pp > 1} == {"1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"}
    assert any(p.tp == 2 * CONFIG.model.kv_heads for p in parallels)
    assert any(len(set(p.layer_counts)) > 1 for p in parallels)
    assert {layout.config.model.tied for layout in every} == {True, False}
    assert CONFIG.model.vocab == 257  # a prime
    assert any(p.tp > 1 and p.pp > 1 and p.ranks == 2 * p.tp * p.pp for p in parallels)


def test_modes_choose_the_dtype():
    assert [in_mode(CONFIG, mode).machine.compute_dtype for mode in ("fp64", "fp32", "bf16")] == [
        "float64",
        "float32",
        "bfloat16",
    ]


def test_the_distance_is_relative_to_the_scale():
    truth = np.array([1e-9, -4.0])
    assert distance(np.array([1e-9, -4.0]), truth, 4.0) == 0
    assert distance(np.array([1e-9 + 0.002, -4.0]), truth, 4.0) == pytest.approx(0.0005)
    assert distance(np.zeros(2), np.zeros(2), 0.0) == 0
    assert distance(np.ones(2), np.zeros(2), 0.0) == math.inf
    assert distance(np.array([np.nan, -4.0]), truth, 4.0) == math.inf
    assert distance(np.zeros(3), truth, 4.0) == math.inf


def test_all_pairs_are_planned():
    chosen = layouts("tp=4;pp=3,layer_counts=1+2+1;tp=2,pp=2,dp=2")
    assert planning.check_pairs(chosen) == (9, [])


def test_a_part_that_nobody_writes_is_named(monkeypatch):
    original = planning.rank_layouts

    def without_one(config):
        for rank, found in enumerate(original(config)):
            kept = tuple(part for part in found.parts if part.array != "exp_avg/layers.2.mlp.w1" or rank % 2)
            yield replace(found, parts=kept)

    monkeypatch.setattr(planning, "rank_layouts", without_one)
    _, failures = planning.check_pairs(layouts("tp=2"))
    assert {(failure.what, failure.parameter) for failure in failures} == {("planning", "layers.2.mlp.w1")}


def test_the_table_names_layout_error_and_failure():
    worst = worst_of(
        [
            Worst(what="grad", parameter="a", step=1, error=1e-15, bound=1e-12),
            Worst(what="grad", parameter="b", step=2, error=None, bound=1e-12),
        ]
    )
    assert [w.parameter for w in worst] == ["b"]
    failure = Failure(layout="tp=2", mode="fp64", step=2, what="grad", parameter="b", bound=1e-12)
    certificate = Certificate(
        version="0",
        config_fingerprint="f",
        environment={},
        steps=2,
        modes=["fp64"],
        rows=[Row(layout="tp=2", mode="fp64", worst=worst, failures=1)],
        ring=[],
        pairs=0,
        failures=[failure],
    )
    assert not certificate.holds
    shown = text(certificate)
    assert "tp=2 fp64 step 2: grad of b: error not finite, bound 1e-12" in shown
    assert msgspec.json.decode(msgspec.json.encode(certificate), type=Certificate) == certificate


def result(scale, loss=2.0):
    """An update whose arrays are `scale` off: a number in their last element, a list in both."""
    arrays = {f"{kind}/{name}": np.array([1.0, 0.5]) for kind in ("grad", "master") for name in ("a", "b")}
    for name, off in scale.items():
        arrays[name] = arrays[name] + (off if isinstance(off, list) else [0.0, off])
    done = StepDone(step=1, loss=loss, grad_norm=1.0, applied=True, pack=None, held=[], data=[])
    return Result(done, SimpleNamespace(names=sorted(arrays)), arrays)


def test_the_bound_is_four_times_the_worst_array_of_the_kind_and_own_errors_are_counted():
    truth = rounded_truth(result({}), result({"grad/a": 1e-4}), "fp32")
    found = {f"{w.what}/{w.parameter}": w for w in truth.differences(result({"grad/b": 3e-4, "master/a": 3e-4}))}
    assert found["grad/b"].bound == pytest.approx(4e-4)
    assert found["grad/b"].beyond_own
    assert found["master/a"].bound == 4 * 2.0**-23  # one process is exact here: the floor
    assert [f.parameter for f in failures_of(list(found.values()), "tp=2", "fp32")] == ["a"]
    (loss,) = failures_of(list(truth.differences(result({}, loss=2.1))), "tp=2", "fp32")
    assert (loss.what, loss.parameter, loss.error) == ("loss", "", pytest.approx(0.05))


def test_an_array_that_is_zero_in_truth_is_measured_by_its_kind_and_hides_no_other():
    """Rounding leaves something where there is nothing: an error of its own size would be infinite, and so would be the bound
    of everything else of the kind."""
    zero = {"grad/a": [-1.0, -0.5]}  # of sequences of one token: the queries' and the keys'
    truth = rounded_truth(result(zero), result({"grad/a": [-1.0, -0.5 + 1e-3]}), "bf16")
    rounded = {f"{w.what}/{w.parameter}": w for w in truth.differences(result({"grad/a": [-1.0, -0.5 + 2e-3]}))}
    assert rounded["grad/a"].error == pytest.approx(2e-3)  # over 1.0, the largest of grad/b
    assert not failures_of(list(rounded.values()), "dp=2", "bf16")
    (wrong,) = failures_of(list(truth.differences(result({**zero, "grad/b": [0.0, 0.1]}))), "dp=2", "bf16")
    assert wrong.parameter == "b"
