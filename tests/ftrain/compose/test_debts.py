"""What storage is still owed, as the keepers of several nodes tell it, each of its own ranks."""

from __future__ import annotations

from ftrain.checkpoint.messages import Share
from ftrain.compose.debts import Debts


def test_a_snapshot_is_owed_when_the_keepers_of_all_its_ranks_have_said_so() -> None:
    debts = Debts()
    debts.started(2, epoch=1)
    debts.ask(["n1", "n2"])
    debts.told("n1", [Share(1, 2, 9, 0, 2), Share(1, 2, 6, 0, 2)])
    assert debts.asked, "n2 may owe something"
    assert debts.open
    debts.told("n2", [Share(1, 2, 9, 1, 2)])
    assert not debts.asked
    assert debts.writers == {(1, 2)}
    assert debts.before(3), "areas of attempt 2 still wait for their upload"
    debts.settle((2, 9))
    assert not debts.open, "what some rank does not hold will never be whole"


def test_what_an_earlier_attempt_owes_is_spared_by_a_coordinator_that_did_not_start_it() -> None:
    debts = Debts()
    debts.ask([""])
    debts.started(3, epoch=2)
    debts.told("", [Share(1, 2, 9, 0, 1)])
    assert debts.writers == {(2, 3), (1, 2)}
    debts.settle((2, 9))
    assert debts.writers == {(2, 3)}


def test_one_keeper_answers_for_one_machine() -> None:
    debts = Debts()
    debts.ask([""])
    debts.told("", [Share(0, 0, 3, 0, 1)])
    assert (debts.asked, debts.open) == (False, True)
    debts.clear()
    assert not debts.open
