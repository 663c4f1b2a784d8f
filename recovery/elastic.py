"""Places come and go; the run goes on with the layout that fits what is left.

Two ways lead to another layout, and both are the same mechanism: the delegate chooses, what it chose stands in the ledger with
its reason, and the next attempt is started with it.

- A place is lost with its rank (a verdict that blames it): the attempt is over anyhow.
- A place is taken away or comes back, or a person asks for other ranks: the workers finish their step, copy their state into
  memory and leave (`SetControl.leave`), and the next attempt reads it there. Nothing is lost but the restart.

What is blamed stays out for a time that doubles with each blame. More than a share of all places is never left out by blame:
then it is not the places.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from recovery.delegate import Delegate
from recovery.endings import ONLY_NODE
from recovery.events import Event, LayoutChosen, PlaceLost, PlaceReturned, StorageNotice, Verdict
from recovery.journal import Journal
from recovery.messages import ClientReply, ClientRequest
from recovery.places import Out, Place, expired, parse, usable
from recovery.policy import Decision, Limits

log = logging.getLogger(__name__)

KINDS = ("drain", "admit", "resize")

MOST_PLACES = 4096
"""Of a machine that takes as many ranks as a person asks for: of a slip of a hundred million, the list alone would keep the
coordinator from all its work for minutes."""


class Surroundings(Protocol):
    """What is needed of the coordinator's desk."""

    @property
    def journal(self) -> Journal: ...

    @property
    def running(self) -> int | None:
        """The number of the attempt whose workers live; None between attempts."""

    def ask_to_leave(self, attempt: int) -> None:
        """Workers of attempts up to this one finish their step, save and leave."""


class Elastic:
    """The places of a run, and what becomes of its layout when they change. Used by the coordinator's thread."""

    def __init__(self, desk: Surroundings, delegate: Delegate, limits: Limits, clock: Callable[[], float] = time.time) -> None:
        """`capacity` is filled by whoever knows the nodes, before the first attempt."""
        self.capacity: dict[str, int] = {}
        self._desk, self._delegate, self._limits, self._clock = desk, delegate, limits, clock
        self._changed_at = float("-inf")
        self._restarted: set[Place] = set()
        self._joined: list[str] = []  # nodes that have come and are not taken up yet
        self._told = set[str]()  # why places stayed
        self._left = -1  # the newest attempt whose workers were asked to make way

    @property
    def places(self) -> tuple[Place, ...]:
        """Where ranks may run now."""
        return usable(self.capacity, self._desk.journal.state.out)

    # what people ask for

    def on_client(self, request: ClientRequest) -> ClientReply:
        """`ftrain drain|admit|resize`."""
        args, changes = dict(request.args), list[dict[str, Any]]()
        try:
            match request.kind:
                case "drain":
                    self._drain(str(args.get("place", "")), str(args.get("by", "a person")))
                case "admit":
                    self._admit(str(args.get("place", "")), str(args.get("by", "a person")))
                case _:
                    changes = self._resize(args)
        except ValueError as error:
            return ClientReply(ok=False, error=str(error))
        return ClientReply(ok=True, data={**self.describe(), **({"changes": changes} if changes else {})})

    def _drain(self, text: str, by: str) -> None:
        place = parse(text, self.capacity)
        entry = Out(place=place, reason=f"drained by {by}")
        left = usable(self.capacity, (*self._desk.journal.state.out, entry))
        chosen = self._delegate.choose_layout(left, f"{place} was drained by {by}")  # ValueError before anything is recorded
        self._record(PlaceLost(t=self._clock(), node=place.node, slot=place.slot, reason=entry.reason))
        self._hand_over(chosen)

    def _admit(self, text: str, by: str) -> None:
        place = parse(text, self.capacity)
        if not any(place.covers(entry.place) for entry in self._desk.journal.state.out):
            raise ValueError(f"{place} is not taken away; taken away: {self._out_in_words() or 'nothing'}")
        self._return(place, f"given back by {by}")

    def _resize(self, args: dict[str, Any]) -> list[dict[str, Any]]:
        """What changes: path, old and new of each."""
        before = dict(self.capacity)
        ranks = int(args.get("ranks") or 0)
        missing = ranks - len(self.places)
        if len(before) == 1 and missing > 0:  # one machine has as many places as are asked for: what it can do, its ranks say
            if ranks > MOST_PLACES:
                raise ValueError(f"{ranks} ranks are asked for; allowed: at most {MOST_PLACES} on one machine")
            self.capacity[next(iter(before))] += missing
        try:
            told = self._delegate.resize(args, self.places)
        except ValueError:
            self.capacity.update(before)
            raise
        self._hand_over(told)
        return [dict(change) for event in told if isinstance(event, LayoutChosen) for change in event.changes]

    # what happens by itself

    def spared(self, verdict: Verdict, decision: Decision) -> str:
        """Why a place stays although the decision is to leave it out: too many would be out; empty if none has to stay."""
        place = self._blamed(verdict) if decision.action == "restart_exclude_node" else None
        if place is None or self._making_way:
            return ""
        blamed = sum(entry.until is not None for entry in self._desk.journal.state.out) + 1
        count, share = sum(self.capacity.values()), self._limits.breaker_share
        if blamed <= share * count:
            return ""
        would = f"{blamed} of {count} places would be, more than recovery.breaker_share = {share:g} allows"
        return f"{place} is not left out: {would}"

    def blame(self, verdict: Verdict, decision: Decision) -> str:
        """Carry out a decision to leave a place out. Empty if the run goes on without it; else why it cannot."""
        place = self._blamed(verdict) if decision.action == "restart_exclude_node" else None
        if place is None:
            return ONLY_NODE
        if self._making_way:
            log.warning(
                "rank %s is not blamed for %s: another layout follows anyhow", verdict.first_failing_rank, verdict.class_
            )
            return ""
        kept = self.spared(verdict, decision) or self._go_without(place, verdict, decision)
        if kept:
            log.warning("%s", kept)
        return kept

    def _go_without(self, place: Place, verdict: Verdict, decision: Decision) -> str:
        """Leave a place out; why not, if there is no layout for the rest."""
        try:
            left = usable(self.capacity, (*self._desk.journal.state.out, Out(place=place, reason=verdict.class_)))
            chosen = self._delegate.choose_layout(left, f"{place} is left out after {verdict.class_}")
        except ValueError as error:
            return f"the run cannot go on without {place}: {error}"
        now = self._clock()
        self._changed_at = now
        self._record(
            PlaceLost(t=now, node=place.node, slot=place.slot, reason=decision.reason, until=now + self._quarantine_s(place))
        )
        self._desk.journal.extend(chosen)
        return ""

    @property
    def _making_way(self) -> bool:
        """Whether the newest attempt's workers were asked to leave.

        Then the places of ranks are those of the layout to come, and where they sit now is not known any more.
        """
        return 0 <= self._desk.journal.state.attempt <= self._left

    def _blamed(self, verdict: Verdict) -> Place | None:
        return self._delegate.place_of(verdict.first_failing_rank) if verdict.first_failing_rank is not None else None

    def on_straggler(self, rank: int, reason: str) -> None:
        """A rank slows the others down, and has for long. New processes are tried once for each place: if that does not help,
        it is not the process.
        """
        policy, place = self._limits.straggler, self._delegate.place_of(rank)
        if policy == "report" or place is None or place in self._restarted or self._making_way:
            return
        if policy == "exclude":
            self.leave_out(rank, "straggler", reason)
        else:
            self._restarted.add(place)
            self.start_again(reason)

    def leave_out(self, rank: int, class_: str, reason: str) -> None:
        """A rank that is not to be trusted makes way at the next step boundary, if the run can do without its place."""
        verdict = Verdict(class_=class_, component="host", first_failing_rank=rank)
        kept = self.blame(verdict, Decision(action="restart_exclude_node", reason=f"{class_}: {reason}"))
        if not kept:
            self._leave()
        elif kept not in self._told:
            self._told.add(kept)
            self._record(StorageNotice(t=self._clock(), topic="places", text=f"{class_}: {reason}; {kept}"))

    def start_again(self, reason: str) -> None:
        """The same layout in new processes, from the state of the step that is being finished."""
        state = self._desk.journal.state
        same = LayoutChosen(
            t=self._clock(), ranks=state.ranks, layout=state.layout, was=state.layout, reason=reason, costs="a restart"
        )
        self._hand_over([same])

    def tick(self) -> None:
        """What comes back by itself, places whose quarantine is over and nodes, is taken up; one layout is kept for a while
        before the next is chosen.
        """
        now = self._clock()
        if now - self._changed_at < self._limits.layout_hold_s:
            return
        for entry in expired(self._desk.journal.state.out, now):
            self._return(entry.place, "its quarantine is over")
        joined, self._joined = [node for node in self._joined if node in self.capacity], []
        if joined:
            self.capacity_changed(
                f"node {joined[0]} has joined" if len(joined) == 1 else f"nodes {', '.join(joined)} have joined"
            )

    def node_joined(self, node: str) -> None:
        """A node came (`capacity` has it already): a spare, until the run may grow."""
        self._joined = [*(it for it in self._joined if it != node), node]
        self.tick()

    def capacity_changed(self, reason: str) -> None:
        """There are other places than before (`capacity` is changed already): another layout, if one is possible."""
        try:
            self._hand_over(self._delegate.choose_layout(self.places, reason))
        except ValueError as error:
            log.warning("no layout for what is left: %s", error)

    def _return(self, place: Place, reason: str) -> None:
        self._record(PlaceReturned(t=self._clock(), node=place.node, slot=place.slot, reason=reason))
        self.capacity_changed(f"{place} is back: {reason}")

    def _quarantine_s(self, place: Place) -> float:
        blames = self._desk.journal.state.blames.count(str(place))
        return min(self._limits.quarantine_s * 2.0 ** min(blames, 64), self._limits.quarantine_max_s)

    # carrying it out

    def _record(self, event: Event) -> None:
        self._desk.journal.append(event)

    def _hand_over(self, chosen: Sequence[Event]) -> None:
        """The decision is put on record, then the workers make way for it."""
        self._desk.journal.extend(chosen)
        if any(isinstance(event, LayoutChosen) for event in chosen):
            self._leave()

    def _leave(self) -> None:
        self._changed_at = self._clock()
        running = self._desk.running
        if running is not None:
            self._left = running
            self._desk.ask_to_leave(running)

    def describe(self) -> dict[str, Any]:
        """For people: plain JSON values."""
        return {"places": [str(place) for place in self.places], "taken_away": self._out_in_words()}

    def _out_in_words(self) -> str:
        return "; ".join(f"{entry.place}: {entry.reason}" for entry in self._desk.journal.state.out)
