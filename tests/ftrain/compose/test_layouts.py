"""What a person's wish makes of a run's layout."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ftrain.compose.args import Memo
from ftrain.compose.layouts import Layouts
from ftrain.load import load
from recovery.events import ConfigChanged, LayoutChosen
from recovery.places import Place

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-dp2.toml"
PLACES = [Place(node="a", slot=slot) for slot in range(2)]


def test_another_micro_batch_is_carried_out_in_the_same_areas() -> None:
    layouts = Layouts(load(str(CONFIG)))
    assert layouts.choose(PLACES, "the places that there are") == []
    changed, chosen = layouts.resize({"set": ["batch.micro_batch=2"]}, PLACES)
    assert isinstance(changed, ConfigChanged)
    assert isinstance(chosen, LayoutChosen)
    assert (layouts.now.batch.micro_batch, layouts.generation) == (2, 0)
    assert layouts.choose(PLACES, "the places that there are") == [], "the next attempt keeps it"


PHASES = (
    "phases=[{from_tokens = 4000, parallel = {ranks = 4}}, {from_tokens = 9000, data = {seq_len = 128}, parallel = {cp = 2}}]"
)


def places(count: int) -> list[Place]:
    return [Place(node="a", slot=slot) for slot in range(count)]


def test_the_layout_of_a_phase_is_chosen_when_it_is_entered() -> None:
    layouts = Layouts(load(str(CONFIG), (PHASES,)))
    assert layouts.choose(places(4), "the places that there are") == []
    layouts.enter(1)
    assert (layouts.ranks, layouts.needed) == (2, 4), "two run, and the next attempt needs four"
    (chosen,) = layouts.choose(places(4), "phase 1 begins")
    assert isinstance(chosen, LayoutChosen)
    assert [(change["path"], change["new"]) for change in chosen.changes] == [("parallel.ranks", 4)]
    layouts.enter(2)
    (chosen,) = layouts.choose(places(4), "phase 2 begins")
    assert isinstance(chosen, LayoutChosen)
    assert [change["path"] for change in chosen.changes] == ["parallel.cp"], "what else changes is told with the phase"
    assert (layouts.now.data.seq_len, layouts.now.parallel.cp) == (128, 2)


def test_places_lost_in_a_phase_are_made_up_for_on_its_config() -> None:
    layouts = Layouts(load(str(CONFIG), (PHASES,)))
    layouts.resume(2)
    assert layouts.choose(places(4), "the places that there are") == []
    layouts.choose(places(3), "a place is gone")
    assert (layouts.now.parallel.ranks, layouts.now.parallel.cp, layouts.now.data.seq_len) == (2, 2, 128)
    assert layouts.recorded.phases[1].parallel == {"cp": 2, "ranks": 2}, "what checkpoints of this attempt remember"
    assert layouts.whole == load(str(CONFIG), (PHASES,)), "what is wished for is as it was"
    layouts.choose(places(4), "it is back")
    assert layouts.now.parallel.ranks == 4


def test_a_resize_that_a_later_phase_cannot_have_is_refused_and_changes_nothing() -> None:
    layouts = Layouts(load(str(CONFIG), (PHASES,)))
    layouts.resume(1)
    layouts.choose(places(4), "the places that there are")
    before = layouts.whole
    with pytest.raises(ValueError, match=r"phases\.1\.parallel\.ranks: given 3"):
        layouts.resize({"ranks": 3, "set": ["batch.micro_batch=1"]}, places(4))
    assert (layouts.whole, layouts.wish.parallel.ranks) == (before, 4)
    layouts.resize({"ranks": 2}, places(4))
    assert layouts.whole.phases[0].parallel == {"ranks": 2}
    assert layouts.whole.parallel == before.parallel


def test_what_is_to_be_certified_does_not_stand_in_the_way_of_a_resize() -> None:
    """dp=4 needs four micro-batches: the list that goes with the config's own micro-batch does not go with every wish."""
    layouts = Layouts(load(str(CONFIG), ('certify.layouts=["dp=4"]', "batch.global_batch=4", "batch.micro_batch=1")))
    layouts.resize({"set": ["batch.micro_batch=2"]}, PLACES)
    assert layouts.now.batch.micro_batch == 2
    assert layouts.whole.certify.layouts == ("dp=4",)


def test_a_successor_knows_the_phase() -> None:
    layouts = Layouts(load(str(CONFIG), (PHASES,)))
    layouts.resume(2)
    layouts.choose(places(4), "the places that there are")
    layouts.started(7)
    successor = Layouts(load(str(CONFIG), (PHASES,)))
    successor.adopt(msgspec.msgpack.decode(layouts.memo(3, 7, []), type=Memo))
    assert (successor.phase, successor.now) == (2, layouts.now)


def test_a_successor_knows_whether_the_workers_it_finds_were_asked_for_the_same() -> None:
    layouts = Layouts(load(str(CONFIG)))
    asked = msgspec.msgpack.decode(layouts.memo(3, 7, [(4, 5)]), type=Memo)
    assert (asked.asked, asked.skips) == (Layouts(load(str(CONFIG))).asked, [(4, 5)])
    assert Layouts(load(str(CONFIG), ("data.skip=[{first=4, last=5}]",))).asked != asked.asked
    assert Layouts(load(str(CONFIG), ("checkpoint.snapshot_steps=7",))).asked != asked.asked
    fault = "faults=[{kind='kill', at='step', step=3}]"
    assert Layouts(load(str(CONFIG), (fault,))).asked == asked.asked, "what is injected is asked of nobody"
    layouts.choose(places(1), "one is lost")
    assert layouts.asked == asked.asked, "what it came to is not what it was asked to be"
    layouts.choose(places(2), "it is back")
    layouts.resize({"ranks": 1}, places(2))
    assert layouts.asked != asked.asked


def test_no_speed_is_predicted_by_a_profile_that_has_none() -> None:
    """A CPU's peak is unknown: the layout is chosen by work and divisibility, and that is what is said."""
    layouts = Layouts(load(str(CONFIG)))
    layouts.choose(places(2), "the places that there are")
    (chosen,) = layouts.choose(places(1), "a place is gone")
    assert isinstance(chosen, LayoutChosen)
    assert chosen.tokens_per_s is None
    assert "%" not in chosen.costs
    assert "best predicted" not in chosen.reason
    assert "no speed is predicted" in chosen.reason


def test_a_profile_with_a_peak_predicts_the_share_and_says_which_it_is() -> None:
    named, assumed = (
        Layouts(load(str(CONFIG), ('machine.device="cuda"', *given))) for given in (('machine.hardware="h100"',), ())
    )
    for layouts, says in ((named, "(predicted, h100)"), (assumed, "(predicted, h100 assumed)")):
        layouts.choose(places(2), "the places that there are")
        (chosen,) = layouts.choose(places(1), "a place is gone")
        assert isinstance(chosen, LayoutChosen)
        assert chosen.tokens_per_s
        assert f"{chosen.tokens_per_s:.0%} of the tokens/s before {says}" in chosen.costs
        assert chosen.reason == "a place is gone: best predicted tokens/s"


def test_what_a_person_asked_for_is_not_called_a_choice() -> None:
    layouts = Layouts(load(str(CONFIG)))
    layouts.choose(places(2), "the places that there are")
    _, chosen = layouts.resize({"ranks": 1, "by": "ftrain resize"}, places(2))
    assert isinstance(chosen, LayoutChosen)
    assert chosen.reason == "ftrain resize asked for 1 rank (tp1 x cp1 x pp1 x dp1)"
