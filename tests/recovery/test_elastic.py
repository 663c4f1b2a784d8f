"""What is done when places come and go: what stands in the ledger, in which order, and when the workers make way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recovery.delegate import Delegate
from recovery.elastic import Elastic
from recovery.endings import ONLY_NODE
from recovery.events import AttemptStarted, Event, LayoutChosen, PlaceLost, PlaceReturned, StorageNotice, Verdict
from recovery.journal import Journal
from recovery.messages import ClientRequest
from recovery.places import Place
from recovery.policy import Decision, Limits
from recovery.state import RunState


class Book:
    """A ledger in a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def append(self, *together: Event) -> None:
        self.events += together

    def rotate(self) -> None:
        """Nothing is copied."""

    def close(self) -> bool:
        return True


class Chooser(Delegate):
    """As many ranks as there are places, at most four and at least two; rank r sits in place r."""

    epoch = 0  # type: ignore[assignment]  # nobody asks

    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()

    def choose_layout(self, places: Sequence[Place], why: str) -> Sequence[Event]:
        if len(places) < 2:
            raise ValueError("no layout of at most 1 ranks is legal and fits")
        before, self.places = self.places, tuple(places[:4])
        if self.places == before:
            return []
        return [LayoutChosen(t=0.0, ranks=len(self.places), layout=f"dp{len(self.places)}", was=f"dp{len(before)}", reason=why)]

    def place_of(self, rank: int) -> Place | None:
        return self.places[rank]

    def begin(self, links, *, resumed):  # type: ignore[no-untyped-def]  # of no interest here
        return []

    plan_attempt = on_worker = on_keeper = on_agent_lost = finished = begin  # type: ignore[assignment]


class Desk:
    """Notes who was asked to leave, and what was on record by then."""

    def __init__(self) -> None:
        self.book = Book()
        self.journal = Journal(self.book, RunState())
        self.running: int | None = 7
        self.left: list[tuple[int, list[str]]] = []

    def ask_to_leave(self, attempt: int) -> None:
        self.left.append((attempt, [type(event).__name__ for event in self.book.events]))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def made(limits: Limits | None = None, places: int = 4) -> tuple[Elastic, Desk, Chooser, Clock]:
    desk, chooser, clock = Desk(), Chooser(), Clock()
    elastic = Elastic(desk, chooser, limits or Limits(quarantine_s=100.0, layout_hold_s=10.0), clock)
    elastic.capacity["n"] = places
    chooser.choose_layout(elastic.places, "the beginning")
    return elastic, desk, chooser, clock


def ask(elastic: Elastic, kind: str, **args: object) -> str:
    return elastic.on_client(ClientRequest(kind=kind, args=dict(args))).error


def gpu(rank: int | None) -> Verdict:
    return Verdict(class_="gpu_lost", component="gpu", first_failing_rank=rank)


EXCLUDE = Decision(action="restart_exclude_node", reason="gpu_lost: Xid 79")


def test_a_drained_place_is_on_record_with_its_layout_before_the_workers_are_asked():
    elastic, desk, _, _ = made()
    assert ask(elastic, "drain", place="2", by="op") == ""
    assert desk.left == [(7, ["PlaceLost", "LayoutChosen"])]
    assert elastic.describe() == {"places": ["n/0", "n/1", "n/3"], "taken_away": "n/2: drained by op"}


def test_a_spare_that_is_drained_disturbs_nobody():
    elastic, desk, _, _ = made(places=5)
    assert ask(elastic, "drain", place="4") == ""
    assert desk.left == []
    assert [type(event).__name__ for event in desk.book.events] == ["PlaceLost"]


def test_what_leaves_too_little_is_refused_and_nothing_is_recorded():
    elastic, desk, _, _ = made(places=2)
    assert "no layout of at most 1 ranks" in ask(elastic, "drain", place="0")
    assert desk.book.events == []


def test_a_slip_of_many_digits_is_refused_without_a_place_for_each():
    elastic, desk, _, _ = made()
    assert "99999999999 ranks are asked for; allowed: at most 4096" in ask(elastic, "resize", ranks=99_999_999_999)
    assert (elastic.capacity, desk.book.events, desk.left) == ({"n": 4}, [], [])


@pytest.mark.parametrize("place", ["", "²", "n/²", "9" * 5000, "n/" + "9" * 5000, "n/-1", "n/x", "0/0/0"])
def test_what_is_no_place_is_answered_with_those_that_are(place: str):
    elastic, _, _, _ = made()
    assert "there are n/0 to n/3" in ask(elastic, "drain", place=place)


def test_only_what_was_taken_away_can_be_given_back():
    elastic, desk, _, _ = made()
    assert "n/1 is not taken away" in ask(elastic, "admit", place="1")
    ask(elastic, "drain", place="1")
    assert ask(elastic, "admit", place="1") == ""
    assert isinstance(desk.book.events[2], PlaceReturned)
    assert len(desk.left) == 2


def test_a_blamed_place_stays_out_twice_as_long_the_next_time():
    elastic, desk, _, clock = made(Limits(quarantine_s=100.0, layout_hold_s=10.0, breaker_share=0.5))
    assert elastic.blame(gpu(1), EXCLUDE) == ""
    assert desk.left == [], "the attempt is over anyhow"
    clock.now += 99.0
    elastic.tick()
    assert len(elastic.places) == 3
    clock.now += 1.0
    elastic.tick()
    assert len(elastic.places) == 4
    assert elastic.blame(gpu(1), EXCLUDE) == ""
    lost = [event for event in desk.book.events if isinstance(event, PlaceLost)]
    assert [event.until - event.t for event in lost if event.until is not None] == [100.0, 200.0]


def test_a_layout_is_kept_for_a_while_before_the_run_grows_back():
    elastic, desk, _, clock = made(Limits(quarantine_s=1.0, layout_hold_s=50.0))
    assert elastic.blame(gpu(0), EXCLUDE) == ""
    clock.now += 49.0
    elastic.tick()
    assert desk.left == []
    clock.now += 1.0
    elastic.tick()
    assert [attempt for attempt, _ in desk.left] == [7]


def test_so_it_is_before_the_run_grows_onto_nodes_that_call_again():
    elastic, desk, _, clock = made(Limits(quarantine_s=1000.0, layout_hold_s=50.0))
    assert elastic.blame(gpu(0), EXCLUDE) == "", "it is left out"
    for node in ("m", "gone", "m2"):
        elastic.capacity[node] = 1
        elastic.node_joined(node)
    del elastic.capacity["gone"]
    clock.now += 49.0
    elastic.tick()
    assert desk.left == []
    clock.now += 1.0
    elastic.tick()
    assert [attempt for attempt, _ in desk.left] == [7]
    assert [event.reason for event in desk.book.events if isinstance(event, LayoutChosen)][-1] == "nodes m, m2 have joined"


def test_a_node_of_a_run_that_has_not_changed_is_taken_up_at_once():
    elastic, _, chooser, _ = made(places=3)
    elastic.capacity["m"] = 1
    elastic.node_joined("m")
    assert len(chooser.places) == 4


def test_a_person_who_gives_a_place_back_need_not_wait():
    elastic, desk, _, clock = made(Limits(layout_hold_s=50.0))
    ask(elastic, "drain", place="1")
    clock.now += 1.0
    assert ask(elastic, "admit", place="1") == ""
    assert len(desk.left) == 2


def test_the_breaker_keeps_what_is_too_much_to_be_its_own_fault():
    elastic, desk, _, _ = made()  # a quarter of four
    assert elastic.spared(gpu(0), EXCLUDE) == elastic.blame(gpu(0), EXCLUDE) == ""
    said = "n/1 is not left out: 2 of 4 places would be, more than recovery.breaker_share = 0.25 allows"
    assert elastic.spared(gpu(0), EXCLUDE) == elastic.blame(gpu(0), EXCLUDE) == said
    assert len([event for event in desk.book.events if isinstance(event, PlaceLost)]) == 1


def test_nobody_to_blame_or_nothing_to_exclude():
    elastic, _, _, _ = made()
    for given in ((gpu(None), EXCLUDE), (gpu(0), Decision(action="restart", reason="r"))):
        assert (elastic.blame(*given), elastic.spared(*given)) == (ONLY_NODE, "")


def test_without_a_layout_for_the_rest_it_is_said_that_there_is_none():
    elastic, desk, _, _ = made(Limits(breaker_share=1.0), places=2)
    assert elastic.blame(gpu(0), EXCLUDE) == "the run cannot go on without n/0: no layout of at most 1 ranks is legal and fits"
    assert desk.book.events == []


def test_a_place_that_stays_although_it_is_blamed_between_attempts_is_told_once():
    elastic, desk, _, _ = made()
    for rank in (0, 0, 0):  # each time the one that has come in its place
        elastic.leave_out(rank, "silent_corruption", "it computes something else")
    (told,) = [event for event in desk.book.events if isinstance(event, StorageNotice)]
    assert told.text == (
        "silent_corruption: it computes something else; n/1 is not left out: 2 of 4 places would be, "
        "more than recovery.breaker_share = 0.25 allows"
    )


def test_nobody_is_blamed_by_the_places_of_a_layout_that_is_still_to_come():
    elastic, desk, _, _ = made(places=5)
    desk.journal.append(AttemptStarted(t=0.0, attempt=7, ranks=4, source="init"))
    ask(elastic, "drain", place="2")  # rank 2 will sit in place 3
    assert elastic.blame(gpu(2), EXCLUDE) == "", "the run goes on, in the new layout"
    elastic.leave_out(2, "silent_corruption", "r")
    assert [event.slot for event in desk.book.events if isinstance(event, PlaceLost)] == [2]
    desk.journal.append(AttemptStarted(t=1.0, attempt=8, ranks=4, source="memory"))
    assert elastic.blame(gpu(2), EXCLUDE) == ""
    assert [event.slot for event in desk.book.events if isinstance(event, PlaceLost)] == [2, 3]


def test_a_straggler_gets_new_processes_once_for_each_place():
    elastic, desk, _, _ = made(Limits(straggler="restart"))
    elastic.on_straggler(2, "slow")
    elastic.on_straggler(2, "slow")
    elastic.on_straggler(1, "slow")
    assert [names for _, names in desk.left] == [["LayoutChosen"], ["LayoutChosen"] * 2]


def test_a_straggler_is_only_reported_unless_asked_for_more():
    elastic, desk, _, _ = made()
    elastic.on_straggler(2, "slow")
    assert (desk.left, desk.book.events) == ([], [])


def test_between_attempts_nobody_is_asked_to_leave():
    elastic, desk, _, _ = made()
    desk.running = None
    ask(elastic, "drain", place="0")
    assert desk.left == []
    assert [type(event).__name__ for event in desk.book.events] == ["PlaceLost", "LayoutChosen"]
