"""Plain values as data: there and back, and nothing else."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.checkpoint.record import StateError, merged, of_mapping, of_sequence, plain, value_of

plains = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    plains,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner)
    ),
)


def encode(value: Any, path: str = "state") -> Any:
    if isinstance(value, dict):
        return of_mapping(value, path, encode)
    return of_sequence(value, path, encode) if isinstance(value, list | tuple) else plain(value, path)


@given(values)
def test_a_value_comes_back_as_it_was_with_its_types(value: Any) -> None:
    node = msgspec.json.decode(msgspec.json.encode(encode(value)))
    found = value_of(node)
    assert found == value
    assert repr(found) == repr(value)


def test_what_json_has_no_word_for() -> None:
    for value in (math.inf, -math.inf, 2**80, Counter({3: 2, 5: 1})):
        found = value_of(msgspec.json.decode(msgspec.json.encode(encode(value))))
        assert found == value
        assert type(found) is type(value)
    assert math.isnan(value_of(encode(math.nan)))


def test_what_is_no_data_is_refused_by_its_path() -> None:
    with pytest.raises(StateError, match=r"state\.hooks\[1\] is a builtins\.function"):
        encode({"hooks": [1, lambda: 2]})


def test_unknown_nodes_are_refused() -> None:
    with pytest.raises(StateError, match="'code'"):
        value_of({"code": "import os"})


def test_ranks_are_united_and_must_agree() -> None:
    one, other = encode({"a": 1, "n": {"x": [1, 2]}}), encode({"b": 2, "n": {"x": [1, 2]}})
    assert value_of(merged([one, other])) == {"a": 1, "n": {"x": [1, 2]}, "b": 2}
    with pytest.raises(StateError, match=r"n\.x\[1\] differs between ranks \(2 and 3\).*per_rank"):
        merged([one, encode({"n": {"x": [1, 3]}})])
    own = [{"rank": "first", "values": [value]} for value in (1, 2)]
    assert merged(own) == {"rank": "first", "values": [1, 2]}
