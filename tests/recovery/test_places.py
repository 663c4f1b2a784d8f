"""Places: which are left, what people call them, and how the ledger remembers what was taken away."""

from __future__ import annotations

import pytest

from recovery.events import PlaceLost, PlaceReturned
from recovery.places import WHOLE_NODE, Out, Place, expired, parse, usable
from recovery.state import RunState, fold

CAPACITY = {"a": 3, "b": 2}


def place(node: str, slot: int) -> Place:
    return Place(node=node, slot=slot)


def test_what_is_left_keeps_the_order_of_nodes_and_slots():
    assert [str(it) for it in usable(CAPACITY, [])] == ["a/0", "a/1", "a/2", "b/0", "b/1"]
    assert [str(it) for it in usable(CAPACITY, [Out(place=place("a", 1), reason="r")])] == ["a/0", "a/2", "b/0", "b/1"]
    assert [str(it) for it in usable(CAPACITY, [Out(place=place("a", WHOLE_NODE), reason="r")])] == ["b/0", "b/1"]


@pytest.mark.parametrize(("text", "expected"), [("a/2", "a/2"), ("b", "b"), ("a/0", "a/0")])
def test_what_people_call_them(text, expected):
    assert str(parse(text, CAPACITY)) == expected


def test_a_number_is_enough_where_there_is_one_node():
    assert parse("1", {"localhost": 2}) == place("localhost", 1)


@pytest.mark.parametrize("text", ["a/3", "a/-2", "c", "c/0", "1", "a/x", ""])
def test_what_there_is_not_is_refused_with_what_there_is(text):
    with pytest.raises(ValueError, match=r"a/0 to a/2, b/0 to b/1"):
        parse(text, CAPACITY)


def test_quarantine_ends_by_itself_and_a_persons_word_does_not():
    blamed = Out(place=place("a", 0), reason="gpu_lost", until=10.0)
    drained = Out(place=place("a", 1), reason="drained")
    assert expired([blamed, drained], 9.9) == ()
    assert expired([blamed, drained], 10.0) == (blamed,)


def test_the_ledger_remembers_what_is_taken_away_and_who_was_blamed():
    lost = [PlaceLost(t=1.0, node="a", slot=0, reason="x", until=5.0), PlaceLost(t=2.0, node="b", slot=1, reason="drained")]
    state = fold(lost, RunState())
    assert [str(entry.place) for entry in state.out] == ["a/0", "b/1"]
    assert state.blames == ("a/0",)
    state = fold([PlaceReturned(t=6.0, node="a", slot=0, reason="over")], state)
    assert [str(entry.place) for entry in state.out] == ["b/1"]
    assert state.blames == ("a/0",), "the next quarantine is longer"


def test_a_whole_node_swallows_its_places_and_gives_them_back():
    lost = [
        PlaceLost(t=1.0, node="a", slot=0, reason="x", until=5.0),
        PlaceLost(t=2.0, node="a", slot=WHOLE_NODE, reason="drained"),
    ]
    state = fold(lost, RunState())
    assert [str(entry.place) for entry in state.out] == ["a"]
    assert fold([PlaceReturned(t=3.0, node="a", slot=WHOLE_NODE, reason="back")], state).out == ()
