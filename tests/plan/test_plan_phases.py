"""`ftrain plan` of a config in phases: each phase is planned, over the updates it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftrain.cli.plan import plan

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "llama3-405b-phases.toml")


def planned(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(plan, [words[0], CONFIG, "--hardware", "h100", *words[1:]])
    return result.exit_code, result.output


def test_row_69_each_phase_has_a_plan_of_its_own() -> None:
    """8 x 1 x 16 x 128 with 8,192 tokens at once, and 8 x 16 x 16 x 8 with 131,072."""
    code, text = planned("memory", "--json")
    assert code == 0, text
    phases = json.loads(text)["phases"]
    layouts = [answer["figures"]["layout"]["text"] for answer in phases]
    assert layouts == ["TP8 x CP1 x PP16 x DP128 = 16,384"] * 3 + ["TP8 x CP16 x PP16 x DP8 = 16,384"]


def test_days_of_the_phases_add_up_to_those_of_the_run() -> None:
    code, text = planned("time", "--json")
    assert code == 0, text
    found = json.loads(text)
    days = [answer["figures"]["predicted_days"]["value"] for answer in found["phases"]]
    assert found["whole"]["predicted_days"] == pytest.approx(sum(days))
    tokens = [answer["figures"]["tokens"]["value"] for answer in found["phases"]]
    assert sum(tokens) == pytest.approx(15.58e12, rel=1e-3)
    assert "all phases, predicted days" in planned("time")[1]


def test_one_phase_is_planned_by_its_number() -> None:
    code, text = planned("memory", "--phase", "3", "--json")
    assert code == 0, text
    assert json.loads(text)["figures"]["layout"]["text"] == "TP8 x CP16 x PP16 x DP8 = 16,384"
    code, text = planned("memory", "--phase", "4")
    assert code == 3
    assert "--phase 4: the config has the phases 0 to 3" in text


def test_layouts_are_found_for_every_phase() -> None:
    """Also for the first, of 61 updates, which is shorter than the run's warm-up."""
    code, text = planned("search", "--json")
    assert code == 0, text
    for answer in json.loads(text)["phases"]:
        assert answer["figures"]["fitting"]["value"] > 50
