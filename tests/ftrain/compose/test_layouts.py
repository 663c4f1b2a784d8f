"""What a person's wish makes of a run's layout."""

from __future__ import annotations

from pathlib import Path

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
