"""What may still be changed about the phases of a run that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.compose.resume import Resume, compared
from ftrain.config import Config
from ftrain.course import Cursor, course, cursor_at
from ftrain.load import load

CONFIG = str(Path(__file__).parents[3] / "configs" / "tiny-dp2.toml")
TABLE = (
    "phases=[{from_tokens = 4000, parallel = {ranks = 4}},"
    " {from_tokens = 9000, data = {seq_len = 128}, optimizer = {lr = 1e-4}},"
    " {from_tokens = 90000, optimizer = {lr = 1e-5}}]"
)


def config(*overrides: str) -> Config:
    return load(CONFIG, (TABLE, "run.steps=60", *overrides))


def resumed(*overrides: str, phase: int) -> Resume:
    """Two updates into a phase."""
    old = config()
    step = course(old)[phase].first_step + 2
    return compared(old, config(*overrides), step, cursor_at(old, step))


@pytest.mark.parametrize(
    ("change", "phase", "words"),
    [
        ("phases.0.optimizer.lr=1e-3", 2, "phases.0: was"),
        ("phases.0.from_tokens=5000", 2, "phases.0.from_tokens: was 4000, is 5000"),
        ("phases.1.from_tokens=9500", 2, "phases.1.from_tokens: was 9000, is 9500"),
        ("phases=[{from_tokens = 4000, parallel = {ranks = 4}}]", 2, "phases.1.from_tokens: is missing"),
        ("data.seq_len=32", 2, "data.seq_len: was 64, is 32: it only counts in a phase that is over"),
        ("phases=[{from_tokens = 4000, parallel = {ranks = 4}}, {from_tokens = 5000}]", 1, "phases.1.from_tokens: given 5000"),
    ],
)
def test_what_is_over_cannot_be_changed_any_more(change: str, phase: int, words: str) -> None:
    told = resumed(change, phase=phase).refused(accept=True)
    assert any(line.startswith(words) for line in told), told


@pytest.mark.parametrize("phase", [0, 1])
def test_what_comes_may_be_changed_and_is_recorded(phase: int) -> None:
    found = resumed("phases.1.data.seq_len=256", "phases.2.optimizer.lr=2e-5", phase=phase)
    assert found.refused(accept=False) == []
    assert [change["path"] for change in found.recorded()] == ["phases.1", "phases.2"]
    assert found.recorded()[1]["new"] == {"from_tokens": 90_000, "optimizer": {"lr": 2e-5}}, "as it was written"


def test_the_present_phase_obeys_the_rules_of_its_fields() -> None:
    found = resumed("phases.1.optimizer.lr=2e-4", phase=2)
    assert found.refused(accept=False) == []
    assert {"path": "phases.1.optimizer.lr", "old": 1e-4, "new": 2e-4, "kind": "recorded"} in found.recorded()
    found = resumed("phases.1.data.seq_len=256", phase=2)
    assert found.refused(accept=False) == [
        "phases.1.data.seq_len: was 128, is 256: this changes what is being trained; set it back, or say --accept-change"
    ]
    assert found.refused(accept=True) == []
    found = resumed("optimizer.weight_decay=0.2", phase=2)
    assert [change["path"] for change in found.recorded()] == ["optimizer.weight_decay"]


def test_the_layout_of_a_phase_that_is_over_may_have_been_another() -> None:
    """A resize stands in the checkpoint, and a person's file does not know of it."""
    found = resumed("phases.0.parallel.ranks=2", "phases.1.parallel.ranks=4", phase=2)
    assert found.refused(accept=False) == []
    assert [change["path"] for change in found.recorded()] == ["phases.0"]


def test_a_phase_that_is_about_to_begin_may_still_be_changed_but_not_its_token() -> None:
    """A checkpoint of the very boundary: no update of the phase was done."""
    old = config()
    step = course(old)[1].first_step
    boundary = Cursor(step, cursor_at(old, step).begun[:1])  # as the last update of phase 0 has saved it
    found = compared(old, config("phases.0.parallel.ranks=2", "phases.0.optimizer.lr=1e-3"), step, boundary)
    assert found.refused(accept=False) == []
    assert [change["path"] for change in found.recorded()] == ["phases.0"]
    assert compared(old, config("phases.0.from_tokens=3900"), step, boundary).refused(accept=True)


def test_a_config_without_a_change_changes_nothing() -> None:
    for phase in range(3):
        assert resumed(phase=phase) == Resume(step=course(config())[phase].first_step + 2)
