"""What is no array: what is shown of it, and which differences are found in it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import ftrain
from ftrain.checkpoint.entries import LONGEST, PROGRESS, _differing, as_json, diff_entries, entries_of, short
from ftrain.checkpoint.record import Node
from ftrain.checkpoint.state import flatten
from storage.checkpoint import Checkpoint
from storage.diff import diff
from storage.objects import open_store
from storage.run import RunStore


def node(value: Any) -> Node:
    """The node of a value, as a manifest gives it back."""
    return msgspec.json.decode(msgspec.json.encode(flatten({"x": value}).record))


def texts(one: Any, other: Any) -> list[str]:
    return [row.text for row in _differing(node(one), node(other), "", frozenset({"x"}))]


NAN = float("nan")


@pytest.mark.parametrize(
    "value",
    [1, NAN, b"\0", {"a": 1, "b": [2, {}]}, {2: (1, None)}, Counter("abca"), np.float32(0.5), torch.float16, torch.ones(3), []],
)
def test_equal_values_do_not_differ(value: Any) -> None:
    assert texts(value, value) == []
    msgspec.json.encode(as_json(node(value)))


def test_the_order_of_keys_is_no_difference() -> None:
    assert texts({"a": 1, "b": 2}, {"b": 2, "a": 1}) == []
    assert texts(Counter("abca"), Counter("caab")) == []


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (1, 2, "x: 1 in the first, 2 in the second"),
        (1, 1.0, "x: 1 in the first, 1.0 in the second"),
        (1, True, "x: 1 in the first, True in the second"),
        (0.0, -0.0, "x: 0.0 in the first, -0.0 in the second"),
        (NAN, 0.0, "x: nan in the first, 0.0 in the second"),
        ("a", None, "x: 'a' in the first, None in the second"),
        ([1], (1,), "x: [1] in the first, (1,) in the second"),
        ({}, {"a": 1}, "x.a is only in the second: 1"),
        ({"a": {"b": 1}}, {"a": {}}, "x.a.b is only in the first: 1"),
        ({7: "a"}, {7: "b"}, "x[7]: 'a' in the first, 'b' in the second"),
        ([{"a": 1}, 2], [{"a": 3}, 2], "x[0].a: 1 in the first, 3 in the second"),
        ([0] * 9, [0] * 8 + [5], "x[8]: 0 in the first, 5 in the second"),
        ([0] * 9, [0] + [5] * 8, "x[1]: 0 in the first, 5 in the second; 8 of its 9 values differ"),
        (Counter("a"), Counter("aa"), "x: Counter({'a': 1}) in the first, Counter({'a': 2}) in the second"),
        (torch.ones(2), np.ones(2, np.float32), "x: tensor x in the first, numpy x in the second"),
        (torch.ones(2), 1.0, "x: tensor x in the first, 1.0 in the second"),
        ("-" * 99 + "a" + "-" * 99, "-" * 199, f"x: '{'-' * 27}...{'-' * 28}' in both, cut where they differ"),
        (torch.float16, torch.float32, "x: torch.float16 in the first, torch.float32 in the second"),
    ],
)
def test_a_difference_is_named_by_path_with_both_values(one: Any, other: Any, said: str) -> None:
    assert texts(one, other) == [said]


def saved(folder: Path, seed: int = 1, **more: Any) -> Checkpoint:
    """A checkpoint of the same tensors every time."""
    random.seed(seed)
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    torch.manual_seed(0)
    generators = ftrain.per_rank(ftrain.RandomState())
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "random": generators, "epoch": 1, **more}
    checkpointer = ftrain.Checkpointer(folder)
    checkpointer.load(state)
    checkpointer.save(5, state)
    checkpointer.close()
    return RunStore(open_store(str(folder))).open()


def test_states_that_differ_in_what_is_no_tensor_are_no_equal_states(tmp_path: Path) -> None:
    np.random.seed(0)
    one = saved(tmp_path / "one")
    assert diff_entries(one, saved(tmp_path / "same")) == []
    other = saved(tmp_path / "other", seed=2, epoch=2, name="later", average=torch.ones(2))
    assert [row.array for row in diff(one, other)] == ["average"], "no digest covers the rest"
    rows = {row.entry: row for row in diff_entries(one, other)}
    assert set(rows) == {"epoch", "name", "random.python[1]"}, "the average is the arrays' affair"
    assert (rows["epoch"].first, rows["epoch"].second, rows["epoch"].kind) == ("1", "2", "value")
    assert (rows["name"].second, rows["name"].kind) == ("'later'", "missing")
    assert rows["random.python[1]"].text.endswith("of its 625 values differ")


def test_what_is_shown_is_all_that_is_no_array(tmp_path: Path) -> None:
    found = dict(entries_of(saved(tmp_path / "run", bounds=(0.5, NAN), long={str(each): each for each in range(20)})))
    shown = {path: short(each) for path, each in found.items()}
    assert shown["epoch"] == "1"
    assert shown["optimizer.groups[0].lr"] == "0.5"
    assert shown["bounds"] == "(0.5, nan)"
    assert shown["long"].startswith("{'0': 0,"), "one entry, cut"
    assert as_json(found["bounds"]) == [0.5, {"float": "nan"}]
    assert not [path for path in found if path.startswith("model")], "arrays have a table of their own"
    assert len(short(node({str(each): {str(each): "-" * 99} for each in range(9)}))) == LONGEST


class Progress:
    """A checkpoint of `ftrain run`, of which only its progress is looked at."""

    names: tuple[str, ...] = ()

    def __init__(self, **progress: Any) -> None:
        self.progress = progress


def test_of_a_run_it_counts_where_it_goes_on() -> None:
    facts = {"step": 7, "sequences": 64, "tokens": 9, "begun": [[0, 64]], "skipped": [], "norms": [0.1], "layout": "dp=1"}
    by_nature = {"step": 8, "norms": [0.2], "layout": "dp=2", "eval_loss": 1.0, "config": {"a": 1}}
    assert diff_entries(Progress(**facts), Progress(**{**facts, **by_nature})) == []  # type: ignore[arg-type]
    other = Progress(**{**facts, "sequences": 128, "begun": [[0, 64], [3, 64]]})
    rows = diff_entries(Progress(**facts), other)  # type: ignore[arg-type]
    assert [row.text for row in rows] == [
        "sequences: 64 in the first, 128 in the second",
        "begun: [[0, 64]] in the first, [[0, 64], [3, 64]] in the second",
    ]
    assert set(PROGRESS) <= set(facts)
