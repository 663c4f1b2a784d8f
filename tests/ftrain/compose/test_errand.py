"""Storage work off the coordinator's thread: what is away comes back, what cannot come back ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ftrain.compose.errand import Errand
from storage.errors import Fenced, StorageError, Unavailable


def errand(work: Callable[[], int], tries: int) -> tuple[Errand[int], threading.Event]:
    over = threading.Event()
    made = Errand(work, wake=over.set, waits=(0.001, 0.002, tries))
    assert over.wait(30.0)
    return made, over


def failing(error: StorageError, times: int) -> Callable[[], int]:
    left = [error] * times

    def work() -> int:
        if left:
            raise left.pop()
        return 7

    return work


def test_it_is_tried_again_while_storage_is_away() -> None:
    made, _ = errand(failing(Unavailable("503"), 3), tries=3)
    assert made.done
    assert made.result == 7


def test_patience_has_an_end() -> None:
    made, _ = errand(failing(Unavailable("503"), 4), tries=3)
    with pytest.raises(Unavailable):
        assert made.done


def test_what_waiting_does_not_mend_ends_it_at_once() -> None:
    made, _ = errand(failing(Fenced("another owner"), 1), tries=3)
    with pytest.raises(Fenced):
        assert made.done


def test_the_caller_is_not_kept_waiting() -> None:
    free = threading.Event()
    made = Errand(lambda: free.wait(30.0), wake=lambda: None, waits=(1.0, 1.0, 1))
    assert not made.done
    free.set()
