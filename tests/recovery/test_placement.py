"""Which nodes, which rank on which of them, and the order of names."""

from __future__ import annotations

import pytest

from recovery.evidence import Evidence
from recovery.fleet import natural
from recovery.network import NoInterfaceError, first_present, interface_address
from recovery.placement import assign, choose, left_out
from recovery.places import WHOLE_NODE, Out, Place
from recovery.together import Together, merged_evidence


@pytest.mark.parametrize(
    ("previous", "available", "needed", "chosen"),
    [
        pytest.param([], ["a", "b", "c"], 2, ("a", "b"), id="first"),
        pytest.param(["b", "c"], ["a", "b", "c"], 2, ("b", "c"), id="all still there"),
        pytest.param(["b", "c"], ["a", "c"], 2, ("a", "c"), id="the gap is filled, the others keep their ranks"),
        pytest.param(["a", "b", "c"], ["c", "d"], 2, ("c", "d"), id="fewer than before"),
        pytest.param(["a"], ["a", "b"], 2, ("a", "b"), id="more than before"),
    ],
)
def test_nodes_keep_their_ranks(previous: list[str], available: list[str], needed: int, chosen: tuple[str, ...]) -> None:
    assert choose(previous, available, needed) == chosen


def test_too_few_nodes_are_said() -> None:
    with pytest.raises(ValueError, match="3 nodes are needed, 1 are there"):
        choose([], ["a"], 3)


def test_ranks_fill_node_after_node() -> None:
    assert assign(["a", "b"], 5, 3) == {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}
    with pytest.raises(ValueError, match="7 ranks do not fit on 2 nodes of 3"):
        assign(["a", "b"], 7, 3)


def test_only_whole_nodes_are_left_out() -> None:
    out = [Out(place=Place(node="a", slot=WHOLE_NODE), reason="drained"), Out(place=Place(node="b", slot=2), reason="blamed")]
    assert left_out(out) == ("a",)


def test_names_are_ordered_as_people_count() -> None:
    names = ["gpu10-b", "gpu2", "gpu10-a", "gpu1", "head"]
    assert sorted(names, key=natural) == ["gpu1", "gpu2", "gpu10-a", "gpu10-b", "head"]


def test_an_answer_of_all_is_made_once_when_the_last_has_come() -> None:
    made: list[dict[str, int]] = []
    together = Together(["a", "b"], lambda parts: made.append(dict(parts)))
    together.answer("b", 2)
    assert made == []
    together.answer("a", 1)
    together.answer("a", 3)
    together.finish()
    assert made == [{"a": 1, "b": 2}]


def test_an_answer_of_nobody_is_there_at_once() -> None:
    made: list[object] = []
    Together([], made.append)
    assert made == [{}]


def test_evidence_of_several_nodes_says_who_was_silent() -> None:
    found = {
        "a": Evidence(exit={"0": -9}, log=("[rank0]: x",), order=("0",), notes=("kernel log: not readable",)),
        "c": Evidence(exit={"2": None}, scheduler=("host state: full",)),
    }
    merged = merged_evidence(found, ["a", "b", "c"])
    assert merged.exit == {"0": -9, "2": None}
    assert merged.scheduler == ("host state: full",)
    assert merged.notes == ("a: kernel log: not readable", "node b did not answer")


def test_the_first_interface_that_is_here_is_taken() -> None:
    assert interface_address(["none0", "lo"]) == ("lo", "127.0.0.1")
    assert first_present("none0, lo") == "lo"
    assert first_present("none0") == "none0"
    with pytest.raises(NoInterfaceError, match=r"none0 or none1; this machine has .*lo"):
        interface_address(["none0", "none1"])
