"""What the planner says a checkpoint takes, with the weights and without."""

from __future__ import annotations

from fractions import Fraction

import pytest
from founding import ROOT

from ftrain.load import load
from ftrain.plan import explain, profile
from ftrain.plan.checkpoint import Costs, answer, rank_bytes
from ftrain.plan.setup import Options, Setup


def setup(*overrides: str) -> Setup:
    config = load(str(ROOT / "configs" / "llama3-8b.toml"), overrides)
    return Setup(config=config, profile=profile.load("h100"), options=Options())


@pytest.mark.parametrize(("overrides", "each"), [((), 14), (("checkpoint.weights=false",), 12)])
def test_bytes_a_parameter_are_those_that_are_stored(overrides: tuple[str, ...], each: int) -> None:
    plan = setup(*overrides)
    figures = {figure.key: figure for section in answer(plan, Costs()).sections for figure in section.figures}
    assert figures["stored_bytes_per_param"].value == each
    assert figures["size"].value == each * plan.num_params
    assert rank_bytes(plan) == Fraction(each, 14) * rank_bytes(setup())
    assert f"{each} B x parameters" in figures["rank_bytes"].why.formula


def test_explain_gives_the_bytes_that_a_rank_writes() -> None:
    with_weights, without = (
        next(table for section in explain.answer(plan, 0).sections for table in section.tables if table.key == "boxes").rows[0][
            -1
        ]
        for plan in (setup(), setup("checkpoint.weights=false"))
    )
    assert float(str(without).split()[0]) == pytest.approx(float(str(with_weights).split()[0]) * 12 / 14, rel=0.01)


def test_a_section_says_whose_failures_it_counts_and_a_row_what_it_is() -> None:
    """33 days between interruptions of this job stand above the 3 hours of another: nobody may take one for the other."""
    found = answer(setup(), Costs())
    (whose,) = (section for section in found.sections if section.title.startswith("Failures"))
    assert "Llama 3 405B, 54 days on 16,384 H100" in whose.title
    assert any("not this job's" in note for note in whose.notes)
    allowed = found.figure("storage_interval_s")
    assert "uploads allow" in allowed.label
    assert allowed.value == max(found.figure("young_s").value, found.figure("upload_s").value)
