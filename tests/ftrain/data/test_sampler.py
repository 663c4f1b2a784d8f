"""The keyed permutation: a bijection, the same at any index on its own, another one for another key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftrain.data.sampler import derive, permute

keys = st.integers(0, 2**64 - 1)


@given(n=st.integers(1, 3000), key=keys)
def test_is_a_bijection(n: int, key: int) -> None:
    assert sorted(permute(n, key, np.arange(n)).tolist()) == list(range(n))


@given(n=st.integers(1, 2**62), key=keys, data=st.data())
def test_any_index_on_its_own_gives_what_the_whole_gives(n: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    together = permute(n, key, indices).tolist()
    assert together == [permute(n, key, index)[0] for index in indices]
    assert all(0 <= value < n for value in together)
    assert len(set(together)) == len(set(indices))


@given(n=st.integers(1, 1000), words=st.lists(keys, min_size=2, max_size=8))
def test_a_key_per_index_is_each_key_alone(n: int, words: list[int]) -> None:
    index = np.arange(len(words)) % n
    many = permute(n, np.array(words, np.uint64), index)
    assert many.tolist() == [permute(n, word, i)[0] for word, i in zip(words, index, strict=True)]


def test_looks_shuffled() -> None:
    """Over random permutations the number of fixed points is Poisson with mean 1, and the correlation of index and image has
    mean 0 and deviation 1 / sqrt(n - 1). Four deviations are allowed; the keys are fixed, so this cannot flake."""
    n, rounds = 1000, 200
    images = [permute(n, key, np.arange(n)) for key in range(rounds)]
    fixed = sum(int((image == np.arange(n)).sum()) for image in images)
    assert abs(fixed - rounds) < 4 * np.sqrt(rounds)
    correlations = [np.corrcoef(np.arange(n), image)[0, 1] for image in images]
    assert abs(np.mean(correlations)) < 4 / np.sqrt((n - 1) * rounds)
    assert max(abs(value) for value in correlations) < 5 / np.sqrt(n - 1)


def test_every_order_of_a_few_items_occurs() -> None:
    """3 items have 6 orders; over 6000 keys each is expected 1000 times (deviation about 29)."""
    orders = [tuple(permute(3, int(key), np.arange(3)).tolist()) for key in derive(np.arange(6000))]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * 29 for count in counts)


def test_derived_keys_differ_with_every_word_and_their_order() -> None:
    found = {int(derive(*words)[0]) for words in [(1,), (2,), (1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1, 0, 2), (0,), (0, 0)]}
    assert len(found) == 9
    assert derive(7, np.array([0, 1]), 3).tolist() == [int(derive(7, i, 3)[0]) for i in (0, 1)]


def test_the_order_is_part_of_every_saved_run() -> None:
    """Pinned: another result here means that resumed runs see other data. Raise nothing, change nothing lightly."""
    assert permute(10, 7, np.arange(10)).tolist() == [6, 8, 4, 5, 7, 3, 1, 9, 2, 0]
    assert int(derive(1, 2, 3)[0]) == 9812528628958509896


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match=r"outside \[0, 10\)"):
        permute(10, 0, index)
    with pytest.raises(ValueError, match="cannot permute 0"):
        permute(0, 0, 0)
