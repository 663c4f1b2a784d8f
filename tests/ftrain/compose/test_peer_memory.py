"""Copies of another node's snapshots are memory that is counted before anything starts."""

from __future__ import annotations

import pytest

from ftrain.checkpoint.layout import rank_slot_nbytes
from ftrain.checkpoint.names import PEER_SLOTS
from ftrain.combinations import combinations
from ftrain.compose.layouts import Layouts
from ftrain.compose.nodes import arena_nbytes
from ftrain.load import load
from ftrain.schema import ConfigProblems
from recovery.places import Place
from tests.commands import ftrain_json

CONFIG = "configs/tiny-dp2.toml"
SETTINGS = ("machine.ranks_per_node=1", "checkpoint.peer_copy=true")


def test_the_areas_of_a_node_are_its_own_slots_and_the_copies_of_the_node_before_it() -> None:
    config = load(CONFIG, SETTINGS)
    own, other = rank_slot_nbytes(config)
    assert arena_nbytes(config) == max(3 * own + PEER_SLOTS * other, 3 * other + PEER_SLOTS * own)
    layouts = Layouts(config)
    layouts.choose([Place(node="a", slot=0), Place(node="b", slot=0)], "test")
    areas, _ = layouts.started(0)
    assert sum(areas.values()) == (3 + PEER_SLOTS) * (own + other)
    assert layouts.copied_nodes == ["a", "b"]


def test_a_run_that_has_come_down_to_one_node_copies_nothing() -> None:
    layouts = Layouts(load(CONFIG, SETTINGS))
    layouts.choose([Place(node="a", slot=0)], "one is left")
    assert layouts.copied_nodes == []
    assert not [name for name in layouts.areas() if name.startswith("peer-")]


@pytest.mark.parametrize("setting", ["machine.ranks_per_node=0", "checkpoint.slots=2", "checkpoint.snapshot_steps=0"])
def test_what_copies_need_is_said(setting: str) -> None:
    with pytest.raises(ConfigProblems, match=r"checkpoint\.peer_copy"):
        load(CONFIG, (*SETTINGS, setting))
    assert not combinations(load(CONFIG, SETTINGS))


def test_the_planner_counts_them() -> None:
    def arena(*settings: str) -> float:
        answer = ftrain_json("plan", "checkpoint", "configs/llama3-8b.toml", *(w for s in settings for w in ("--set", s)))
        return float(answer["figures"]["arena_per_server"]["value"])

    assert arena("checkpoint.peer_copy=true", "machine.ranks_per_node=8") == pytest.approx(5 / 3 * arena())
