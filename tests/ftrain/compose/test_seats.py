"""Tensor parallel groups stay within a node."""

from __future__ import annotations

import pytest

from ftrain.compose.seats import in_whole_groups, seated
from ftrain.config import Parallel
from recovery.places import Place


def places(**counts: int) -> list[Place]:
    return [Place(node=node, slot=slot) for node, count in counts.items() for slot in range(count)]


def names(seats: object) -> list[str]:
    return [str(place) for place in seats]  # type: ignore[attr-defined]


def test_a_place_that_makes_no_whole_group_stays_empty() -> None:
    two = Parallel(ranks=4, tp=2)
    left = [place for place in places(a=4, b=4) if str(place) not in ("a/0", "a/1", "a/2")]
    assert names(in_whole_groups(left, two)) == ["b/0", "b/1", "b/2", "b/3"]
    assert names(seated(left, two, ())) == ["b/0", "b/1", "b/2", "b/3"]


def test_ranks_keep_their_places_unless_a_group_would_straddle_nodes() -> None:
    before = places(a=2, b=2)
    spare = [*(place for place in before if str(place) != "a/1"), Place(node="c", slot=0), Place(node="c", slot=1)]
    assert names(seated(spare, Parallel(ranks=4), before)) == ["a/0", "c/0", "b/0", "b/1"]
    assert names(seated(spare, Parallel(ranks=4, tp=2), before)) == ["b/0", "b/1", "c/0", "c/1"]


@pytest.mark.parametrize("parallel", [Parallel(ranks=4, tp=4), Parallel(ranks=4, tp=2, order=("dp", "tp", "cp", "pp"))])
def test_a_layout_that_crosses_nodes_by_wish_is_seated_as_it_comes(parallel: Parallel) -> None:
    assert names(seated(places(a=1, b=3), parallel, ())) == ["a/0", "b/0", "b/1", "b/2"]
