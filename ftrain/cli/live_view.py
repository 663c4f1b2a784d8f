"""What a person sees of a live run: one panel on a terminal, plain lines elsewhere. Fed from the ledger, so it can
be wrong about nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ftrain.cli import render
from ftrain.compose.ledgers import LedgerTail
from ftrain.compose.metrics import newest, told
from ftrain.compose.phasing import Phasing
from ftrain.compose.speed import Speed
from ftrain.config import Config
from ftrain.plan.rates import mfu_text
from ftrain.units import format_bytes, plural
from recovery import events
from recovery.durations import format_duration
from recovery.events import Event, steps_of
from recovery.exits import exit_text
from recovery.gaps import SegmentsMissing
from recovery.places import Place
from recovery.state import RunState, apply

if TYPE_CHECKING:
    from rich.live import Live
    from rich.panel import Panel

LINE_EVERY_S = 5.0


class LiveView:
    """Call `tick` a few times a second, `close` at the end."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's local folder; only what happens from now on is shown."""
        self._folder = folder
        self._tail = LedgerTail(folder / "ledger")
        self._state, self._briefly = RunState(), Briefly()
        self._speed, self._phasing = Speed(), Phasing()
        self._config = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config)
        self._steps = self._config.run.steps
        self._last_line_t = 0.0
        self._checkpoint = "none yet"
        self._live: Live | None = None
        if render.is_terminal():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False)
            self._live.start()

    @property
    def live(self) -> bool:
        """Whether there is a terminal, on which somebody watches."""
        return self._live is not None

    def tick(self) -> None:
        """Show what is new. The panel is drawn again only then: it takes longer than to find out that nothing has happened."""
        new = self._tail.new()
        for event in new:
            self._state = apply(self._state, event)
            self._speed.add(event)
            self._phasing.see(self._config, event)
            if isinstance(event, events.CheckpointCommitted):
                self._checkpoint = f"step {event.step} ({format_bytes(event.nbytes)} in {format_duration(event.seconds)})"
            line = self._step_line(event) or self._briefly.sentence(event)
            if isinstance(event, events.ConfigChanged):
                line += curve_note(event, self._config)
            if line:
                self._print(line)
        if self._live is not None and new:
            self._live.update(self._panel(), refresh=True)

    def close(self) -> None:
        """Show the rest and give the terminal back."""
        self.tick()
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            render.note(line)

    def _step_line(self, event: Event) -> str:
        """A line for the newest step, now and then; on a terminal the panel shows it."""
        records = list(steps_of(event))
        if not records or self._live is not None:
            return ""
        last = records[-1]
        if last.step < self._steps and last.t_end - self._last_line_t < LINE_EVERY_S:
            return ""
        self._last_line_t = last.t_end
        loss = "not finite" if last.loss is None else f"{last.loss:.4f}"
        line = f"step {last.step}/{self._steps}  loss {loss}  {self._speed.text()}{self._eta()}"
        measured = newest(self._folder)
        paced = self._speed.paced(measured) if measured else {}
        return f"{line}  {mfu_text(paced)}" if paced.get("mfu") is not None else line

    def _eta(self) -> str:
        """The end of a line: the time that is left; nothing behind the last step."""
        if self._state.step >= self._steps:
            return ""
        seconds = self._speed.eta_s(self._config, self._phasing.cursor)
        return f"  ETA {format_duration(seconds)}" if seconds is not None else "  ETA unknown"

    def _panel(self) -> Panel:
        from rich.panel import Panel
        from rich.table import Table

        state, rows = self._state, Table.grid(padding=(0, 2))
        loss = "" if state.loss is None else f"loss {state.loss:.4f}"
        decision = state.last_decision
        attempt = f"{state.layout}, attempt {state.attempt} " if state.attempt >= 0 else ""
        rows.add_row("layout", f"{attempt}({state.phase})")
        if self._config.phases:
            rows.add_row("phase", f"{state.training_phase} of 0 to {len(self._config.phases)}")
        rows.add_row("step", f"{state.step}/{self._steps}  {loss}  {self._speed.text()}{self._eta()}")
        if measured := newest(self._folder):
            texts = told(self._speed.paced(measured))
            rows.add_row("speed", texts["speed"])
            rows.add_row("a step", texts["step_went_to"])
            rows.add_row("memory", texts["memory"])
        rows.add_row("checkpoint", f"storage: {self._checkpoint}; memory: step {state.snapshot_step}")
        rows.add_row("decision", f"{decision.action}: {decision.reason}" if decision else "none needed so far")
        return Panel(rows, title=f"run {state.run_id}", expand=False)


def curve_note(event: events.ConfigChanged, config: Config) -> str:
    """What another number of steps changes besides; empty where nothing depends on it. `config`: that of now."""
    kind = config.schedule.kind
    if kind == "constant" or all(change["path"] != "run.steps" for change in event.changes):
        return ""
    return f"; the learning rate's curve ({kind}) ends at run.steps and changes with it"


def sentence(event: Event) -> str:
    """What an event means to a person, or nothing."""
    match event:
        case events.AttemptStarted():
            return f"attempt {event.attempt}: {plural(event.ranks, 'rank')} ({event.layout}), state from {event.source}"
        case events.Ready(assumed=True):
            return f"attempt {event.attempt}: the script tells its steps"
        case events.Ready():
            return f"attempt {event.attempt}: all ranks hold the state of step {event.step}"
        case events.CheckpointCommitted():
            return f"checkpoint of step {event.step} committed ({format_bytes(event.nbytes)})"
        case events.CheckpointFailed():
            return f"checkpoint of step {event.step} failed: {event.reason}"
        case events.StorageNotice():
            return event.text
        case events.CheckpointPassedOver():
            return f"checkpoint of step {event.step} passed over: {event.reason}"
        case events.Evaluated(loss=loss) if loss is not None:
            return f"step {event.step}: held-out loss {loss:.4f}"
        case events.ConfigChanged():
            return "config changed: " + "; ".join(f"{c['path']}: {c['old']!r} -> {c['new']!r}" for c in event.changes)
    return _trouble(event)


class Briefly:
    """Sentences without what one before them has said in full: the cause is told with the interruption, the decision once."""

    def __init__(self) -> None:
        self._cause = self._decision = ""

    def sentence(self, event: Event) -> str:
        """What an event means to a person who has read the ones before, or nothing."""
        line = sentence(event)
        match event:
            case events.InterruptionClassified():
                self._cause = event.verdict.reason
            case events.Decided():
                self._decision = event.reason
                return line.replace(f": {self._cause}", "", 1) if self._cause else line
            case events.RunEnded() if self._decision:
                return line.replace(self._decision, "as decided", 1)
        return line


def _trouble(event: Event) -> str:
    match event:
        case events.ProcessDied(ours=False) if event.status != 0:
            who = event.kind if event.rank is None else f"{event.kind} of rank {event.rank}"
            return f"{who} (pid {event.pid}) died ({exit_text(event.status)})"
        case events.Suspected():
            return f"suspected: {event.reason}"
        case events.InterruptionClassified():
            return f"interruption: {event.verdict.class_}: {event.verdict.reason}"
        case events.Decided():
            return f"decision: {event.action}: {event.reason}"
        case events.PlaceLost():
            return f"{Place(node=event.node, slot=event.slot).described()} is taken away: {event.reason}"
        case events.PlaceReturned():
            return f"{Place(node=event.node, slot=event.slot).described()} is back: {event.reason}"
        case events.LayoutChosen():
            return f"layout {event.was} -> {event.layout}: {event.reason}; costs {event.costs}"
        case events.PhaseBegan():
            what = "; ".join(f"{c['path']}: {c['old']!r} -> {c['new']!r}" for c in event.changes)
            return f"phase {event.phase} of 0 to {event.phases - 1} begins after step {event.step} ({event.layout}): {what}"
        case events.StopRequested():
            return f"stop requested by {event.by}: finishing the step, saving"
        case SegmentsMissing():
            return event.sentence()
        case events.RunEnded():
            where = "" if event.step is None else f" at step {event.step}"
            return f"run {event.outcome}{where}" + (f": {event.reason}" if event.reason else "")
    return ""
