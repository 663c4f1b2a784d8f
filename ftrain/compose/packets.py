"""The packet for a person, on disk the moment the supervisor decides to stop for one: `<local>/packets/<verdict>.json`.

The ledger holds everything a packet says, but not in one place and not in the words of the person who must act. So it is drawn
once, when the history is known to the decision, and shown again by `ftrain report` for as long as nothing has been started
since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from recovery.endings import code_for_a_person, keeps_memory
from recovery.events import AttemptStarted, Decided, Event, InterruptionClassified, Verdict
from recovery.files import replace_file
from recovery.packet import Option, Packet, packet
from recovery.policy import Decision
from recovery.state import RunState

log = logging.getLogger(__name__)


class Packets:
    """Sees every event of the run; writes a packet for each decision to stop."""

    def __init__(
        self,
        folder: Path,
        command: str,
        state: Callable[[], RunState],
        *,
        skips: Sequence[tuple[int, int]] | None = None,
        stored: Callable[[bool], int] = lambda keep: 0,
    ) -> None:
        """`command` goes on with the run; `state` is the coordinator's, after the event; `skips`: the ranges of `data.skip`, if
        the run can pass over data; `stored`: up to which step, once the run is left, with what memory holds or without.
        """
        self._folder, self._command, self._state, self._skips = folder, command, state, skips
        self._stored = stored
        self._verdict: tuple[str, Verdict] | None = None

    def on_event(self, event: Event) -> None:
        """Remember a verdict; draw the packet when it ends in a stop."""
        if isinstance(event, InterruptionClassified):
            self._verdict = (event.verdict_id, event.verdict)
        elif isinstance(event, Decided) and event.action == "stop_for_human" and self._verdict is not None:
            verdict_id, verdict = self._verdict
            if verdict_id == event.verdict_id:
                self._write(verdict_id, self._draw(verdict, event))

    def _draw(self, verdict: Verdict, decided: Decided) -> Packet:
        state = self._state()
        stored = max(state.committed_step or 0, self._stored(keeps_memory(code_for_a_person(verdict.class_))))
        earlier = replace(state.history, interruptions=state.interruptions[:-1])
        return packet(
            verdict,
            Decision(action=decided.action, reason=decided.reason),
            earlier,
            command=self._command,
            steps_at_risk=max(0, state.step - stored),
            onset=min((onset.step for onset in state.onsets if onset.open), default=None),
            further=(*self._passing(state, decided.attempt), *self._trusting(state, decided.attempt)),
        )

    def _trusting(self, state: RunState, attempt: int) -> tuple[Option, ...]:
        """Where a watch of the numbers has ended it: to go on without that watch."""
        found = next((onset for onset in state.onsets if onset.attempt == attempt and onset.open), None)
        if self._skips is None or found is None:
            return ()
        watch, what = ("nonfinite_steps", "not finite") if "not finite" in found.reason else ("spike_z", "far too high")
        again = f"the steps since the newest checkpoint before step {found.step} done again"
        costs = f"{again}, and from then on losses that are {what} end the run no more"
        command = f"{self._command} --set recovery.{watch}=0"
        return (Option(what="the losses are fine: go on without this watch", costs=costs, command=command),)

    def _passing(self, state: RunState, attempt: int) -> tuple[Option, ...]:
        """Where the same updates made no sense twice: to go on without their data."""
        found = state.doubted(attempt)
        if self._skips is None or found is None or not found.again:
            return ()
        entries = ", ".join(f"{{first={first}, last={last}}}" for first, last in (*self._skips, (found.first, found.last)))
        which = f"update {found.first}" if found.first == found.last else f"updates {found.first} to {found.last}"
        command = f"{self._command} --set 'data.skip=[{entries}]' --accept-change"
        return (Option(what=f"pass over the data of {which}", costs="those data are not learnt from", command=command),)

    def _write(self, verdict_id: str, made: Packet) -> None:
        path = packet_file(self._folder, verdict_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, msgspec.json.format(msgspec.json.encode(made)))
        except OSError as error:  # what it says stands in the ledger too
            log.error("the packet %s cannot be written: %s", path, error)


def packet_file(folder: Path, verdict_id: str) -> Path:
    """Where the packet of a verdict lies."""
    return folder / "packets" / f"{verdict_id}.json"


def waiting(events: Iterable[Event], folder: Path) -> Packet | None:
    """The packet of the stop that a run is in; None if it is in none, or the packet is on another machine."""
    stopped = ""
    for event in events:
        if isinstance(event, Decided):
            stopped = event.verdict_id if event.action == "stop_for_human" else ""
        elif isinstance(event, AttemptStarted):
            stopped = ""
    path = packet_file(folder, stopped)
    if not stopped or not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Packet)
