"""Names: those of the model alone, whatever wraps it; one name for one memory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import ftrain
from ftrain.checkpoint.record import StateError
from ftrain.checkpoint.state import Flat, Names, flatten
from tests.world import run_world


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.inner(self.emb(x)))
        return found


def arrays(flat: Flat) -> set[str]:
    return {leaf.array for leaf in flat.leaves}


def record_of(flat: Flat) -> Any:
    """As it is stored."""
    return msgspec.json.decode(msgspec.json.encode(flat.record))


EXPECTED = {
    "model/emb.weight",
    "model/inner.0.weight",
    "model/inner.0.bias",
    "model/inner.1.weight",
    "model/inner.1.bias",
    "model/inner.1.running_mean",
    "model/inner.1.running_var",
    "model/inner.1.num_batches_tracked",
}


def names_under_wrappers(rank: int) -> list[set[str]]:
    wrappers = (lambda m: m, nn.parallel.DistributedDataParallel, torch.compile)
    found = [arrays(flatten({"model": wrap(Tied())})) for wrap in wrappers]
    both = torch.compile(nn.parallel.DistributedDataParallel(torch.compile(Tied())))
    return [*found, arrays(flatten({"model": both})), {f"model/{name}" for name in Names(both).parameters}]


@pytest.mark.dist
def test_no_wrapper_is_in_a_name() -> None:
    *found, parameters = run_world(names_under_wrappers, 1)[0]
    assert found == [EXPECTED] * 4
    assert parameters == {name for name in EXPECTED if "running" not in name and "num_" not in name} | {"model/head.weight"}


def test_tied_weights_are_one_array() -> None:
    flat = flatten({"model": Tied()})
    assert flat.tied == {"model/emb.weight": ["model/head.weight"]}
    record = record_of(flat)["map"]["model"]["map"]
    assert record["head.weight"] == record["emb.weight"]


def test_one_memory_under_two_keys_is_one_array() -> None:
    tensor = torch.arange(4.0)
    assert arrays(flatten({"a": tensor, "b": tensor, "c": tensor.clone()})) == {"a", "c"}


def test_an_optimizer_is_named_after_its_parameters() -> None:
    model = Tied()
    optimizer = torch.optim.SGD([{"params": model.inner.parameters(), "lr": 0.1}], lr=1.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    flat = flatten({"optimizer": optimizer, "model": model})
    assert {name for name in arrays(flat) if name.startswith("optimizer")} == {
        f"optimizer/momentum_buffer/inner.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")
    }
    held = record_of(flat)["map"]["optimizer"]["map"]
    assert held["group_of"]["map"] == dict.fromkeys(("inner.0.weight", "inner.0.bias", "inner.1.weight", "inner.1.bias"), 0)
    assert held["groups"]["list"][0]["map"]["lr"] == 0.1


def test_an_optimizer_without_its_model_is_refused() -> None:
    with pytest.raises(StateError, match="put its model into the state"):
        flatten({"optimizer": torch.optim.SGD(Tied().parameters(), lr=1.0)})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 2).to_mkldnn(), "only plain tensors"),
        (torch.empty(2, device="meta"), "a meta tensor"),
        ({"deep": [object()]}, r"x\.deep\[0\] is a builtins\.object"),
        (np.array(["text"]), "NumPy array of <U4"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        flatten({"x": value})


def test_per_rank_arrays_carry_their_rank() -> None:
    flat = flatten({"rng": ftrain.per_rank({"state": torch.arange(3)})}, rank=2)
    assert arrays(flat) == {"rng/rank-00002/state"}
    with pytest.raises(ValueError, match="refuse, first, split"):
        ftrain.per_rank(1, other_world="all")  # type: ignore[arg-type]
