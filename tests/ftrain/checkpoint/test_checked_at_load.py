"""What `save` would refuse, `load` refuses: at the start of a script, also where there is nothing to load, not hours later."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftrain
from ftrain.checkpoint.checkpointer import Checkpointer
from ftrain.checkpoint.record import StateError
from storage.epoch import read_epochs
from storage.local import LocalStore


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    made = Checkpointer(tmp_path / "run")
    yield made
    made.close()


def optimizer_alone() -> dict[str, Any]:
    return {"v": torch.optim.AdamW(nn.Linear(2, 2).parameters())}


STATES: list[tuple[Any, str]] = [
    ({"v": lambda: 1}, "v is a builtins.function, which is not saved: allowed are tensors"),
    ({"deep": [{"v": {1, 2}}]}, "deep[0].v is a builtins.set, which is not saved"),
    ({"own": ftrain.per_rank(object())}, "own is a builtins.object, which is not saved"),
    (optimizer_alone(), "v: parameter 0 of a group, of shape (2, 2), belongs to no module of the state, so it has no name"),
    ({"v": torch.empty(2, device="meta")}, "v is a meta tensor"),
    ({"v": nn.LazyLinear(2)}, "v.weight has no shape yet"),
    ({"v": bytes(13 << 20)}, "at most 16 MiB are saved"),
    ([torch.ones(1)], "the state is a list: it is filled in place, so it must be a dict"),
]


@pytest.mark.parametrize(("state", "words"), STATES)
def test_a_state_that_no_save_takes_is_refused_before_there_is_anything(
    checkpointer: Checkpointer, tmp_path: Path, state: Any, words: str
) -> None:
    with pytest.raises(StateError, match=re.escape(words)) as caught:
        checkpointer.load(state)
    assert str(caught.value).startswith("this state could not be saved (")
    assert str(caught.value).endswith("; nothing was loaded")
    assert read_epochs(LocalStore(tmp_path / "run")).newest < 0, "the run was not taken over"
    assert checkpointer.load({"w": torch.ones(2)}) == 0, "the right one is loaded as ever"


def test_and_where_there_is_something_to_load_before_it_is_loaded(checkpointer: Checkpointer) -> None:
    checkpointer.load({"w": torch.ones(2)})
    checkpointer.save(3, {"w": torch.ones(2)})
    checkpointer.wait()
    w = torch.zeros(2)
    with pytest.raises(StateError, match=re.escape("more is a builtins.object")):
        checkpointer.load({"w": w, "more": object()}, strict=False)
    assert w.tolist() == [0, 0]
    assert checkpointer.load({"w": w, "more": 1}, strict=False) == 3


class Loader:
    """To ask for its state is to start it."""

    started = False

    def state_dict(self) -> dict[str, int]:
        self.started = True
        return {"at": 1}

    def load_state_dict(self, held: dict[str, int]) -> None:
        self.at = held["at"]


def test_objects_are_not_asked_before_they_are_loaded(checkpointer: Checkpointer) -> None:
    loader = Loader()
    assert checkpointer.load({"loader": ftrain.per_rank(loader)}) == 0
    assert not loader.started


def test_what_a_module_raises_itself_comes_through(checkpointer: Checkpointer) -> None:
    class Stubborn(nn.Linear):
        def get_extra_state(self) -> Any:
            raise RuntimeError("not now")

        def set_extra_state(self, state: Any) -> None:
            raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"):
        checkpointer.load({"model": Stubborn(1, 1)})
