"""`ftrain watch`: a run as it goes, or as it went, on one screen. Reads the ledger and disturbs nobody.

ftrain watch runs/demo
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ftrain.cli import render
from ftrain.cli.bars import COLOURS, Bars
from ftrain.cli.hints import no_run
from ftrain.cli.live import local_option
from ftrain.cli.live_view import Briefly
from ftrain.cli.problems import told
from ftrain.cli.types import PLACE
from ftrain.compose.phasing import Phasing
from ftrain.compose.speed import Speed
from ftrain.config import Config
from ftrain.units import format_bytes, format_count, format_share
from ftrain.view.script import attempt_line
from recovery.codes import ExitCode
from recovery.durations import format_duration
from recovery.events import AttemptStarted, CheckpointCommitted, Event, RunStarted, steps_of
from recovery.gaps import SegmentsMissing
from recovery.report import Report, ReportBuilder, ReportError, of_script
from recovery.state import Phase, RunState, apply

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Source = Callable[[], Sequence[Event]]
"""Events since the last call; all that there are at the first."""

LOOK_EVERY_S, BOOKS_EVERY_S, STORE_EVERY_S = 0.5, 2.0, 10.0


@click.command()
@click.argument("run_url", metavar="RUN", type=PLACE)
@click.option("--once", is_flag=True, help="Show where it is now, and leave.")
@local_option
def watch(run_url: str, once: bool, local_dir: str) -> None:
    """Watch RUN, live or finished: progress, curves, effective time, checkpoints, trouble.

    Ends with the run, or with Ctrl-C, which leaves the run alone.

    \b
    Example:
      ftrain watch runs/demo
    """
    from rich.console import Console
    from rich.live import Live

    look, first = source(run_url, local_dir)
    screen = Screen()
    screen.add(first)
    if not screen.has_begun:
        why = f": {screen.missing}" if screen.missing else ""
        render.fail(f"{run_url}: the ledger holds no start of a run{why}", ExitCode.DAMAGED)
    console = Console()
    if once or screen.is_over or not console.is_terminal:
        console.print(screen.picture(Bars.of(console)))
        return
    with Live(screen.picture(Bars.of(console)), console=console, auto_refresh=False) as live:
        try:
            while not screen.is_over:
                time.sleep(LOOK_EVERY_S)
                screen.add(look())
                live.update(screen.picture(Bars.of(console)), refresh=True)
        except KeyboardInterrupt:
            return


def source(url: str, local_override: str) -> tuple[Source, Sequence[Event]]:
    """A run's events as they come, and those that there are; leaves with a sentence if there is none."""
    from ftrain.compose.ledgers import read_ledger

    with told():
        look, first = _source(url, local_override)
        if not first:
            read_ledger(url, local_override)  # a view passes over lines that are no events: if all are, this says so
            render.fail(no_run(url), ExitCode.USAGE)
    return look, first


def _source(url: str, local_override: str) -> tuple[Source, Sequence[Event]]:
    """The local segments as they grow; where the run is on another machine, its store now and then."""
    from ftrain.compose.ledgers import LedgerTail, read_ledger
    from ftrain.compose.paths import absolute_url, local_dir_of

    folder = local_dir_of(absolute_url(url), local_override) / "ledger"
    if folder.is_dir():
        tail = LedgerTail(folder, from_start=True)
        return tail.new, tail.first(lambda: read_ledger(url, local_override))
    seen, looked = 0, -STORE_EVERY_S

    def from_store() -> Sequence[Event]:
        nonlocal seen, looked
        if time.monotonic() - looked < STORE_EVERY_S:
            return []
        looked = time.monotonic()
        events = read_ledger(url, local_override)
        new, seen = events[seen:], len(events)
        return new

    return from_store, from_store()


class Screen:
    """What is shown, from the events so far."""

    def __init__(self) -> None:
        self._state, self._speed, self._phasing, self._builder = RunState(), Speed(), Phasing(), ReportBuilder()
        self._briefly = Briefly()
        self._losses: list[float] = []
        self._rates: deque[float] = deque(maxlen=60)
        self._told: deque[str] = deque(maxlen=6)
        self._saved: CheckpointCommitted | None = None
        self._steps: int | None = None
        self._config: Config | None = None
        self._script = False
        self._report: Report | None = None
        self._booked = float("-inf")
        self._is_new = False
        self._missing: list[str] = []

    @property
    def missing(self) -> str:
        """Which segments of the ledger are not there; empty if all are."""
        return "; ".join(self._missing)

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to show."""
        return bool(self._state.run_id)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and nobody has taken it up again."""
        return self._state.phase is Phase.ENDED

    def add(self, events: Sequence[Event]) -> None:
        """Take in what happened."""
        for event in events:
            self._is_new = True
            self._state = apply(self._state, event)
            self._builder.add(event)
            self._speed.add(event)
            if isinstance(event, CheckpointCommitted):
                self._saved = event
            if isinstance(event, RunStarted):
                self._steps = event.config.get("run", {}).get("steps")
                self._config, self._script = readable(event.config), of_script(event)
            if self._config is not None:
                self._phasing.see(self._config, event)
            for record in steps_of(event):
                seconds = record.t_end - record.t_begin
                self._losses += [record.loss] if record.loss is not None else []
                self._rates.append(record.tokens / seconds if seconds > 0 else 0.0)
            if isinstance(event, SegmentsMissing):  # has a row of its own
                self._missing.append(event.sentence())
                continue
            said = attempt_line(event) if self._script and isinstance(event, AttemptStarted) else self._briefly.sentence(event)
            if said and not isinstance(event, CheckpointCommitted):
                self._told.append(f"{time.strftime('%H:%M:%S', time.gmtime(event.t))}  {said}")

    def picture(self, bars: Bars) -> RenderableType:
        """The panel."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        rows = Table.grid(padding=(0, 2))
        for name, value in self._rows(bars):
            rows.add_row(name, value)
        told_lines = [Text(line, style="dim", overflow="fold") for line in self._told]
        title = f"{self._state.run_id}: {self._state.outcome or self._state.phase}"
        return Panel(Group(rows, *([Text("")] if told_lines else []), *told_lines), title=title, expand=False)

    def _rows(self, bars: Bars) -> list[tuple[str, RenderableType]]:
        from rich.text import Text

        state, report = self._state, self._books()
        gaps = [("ledger", Text(self.missing, style="red", overflow="fold"))] if self._missing else []
        if self._script and not state.step:
            return [
                *gaps,
                ("command", Text(f"{state.layout}, attempt {state.attempt}")),
                ("steps", Text("not known: the script tells none (ftrain.progress, --progress-pattern)")),
                ("trouble", Text(f"interruptions {len(state.interruptions)}")),
            ]
        config = None if self.is_over else self._config
        left = self._speed.eta_s(config, self._phasing.cursor) if config is not None else None
        eta = f"  ETA {format_duration(left)}" if left else ""
        rows: list[tuple[str, RenderableType]] = [
            ("layout", Text(f"{state.layout}, attempt {state.attempt}{self._phase()}")),
            ("step", Text.assemble(f"{state.step}/{self._steps or '?'}  ", (bars.done(state.step, self._steps), "green"), eta)),
            ("loss", Text.assemble("-  " if state.loss is None else f"{state.loss:.4f}  ", (bars.curve(self._losses), "cyan"))),
            *self._speed_row(bars),
            *([("tokens", Text(format_count(state.tokens)))] if state.tokens or not self._script else []),
            ("checkpoint", Text(self._checkpoint())),
            *gaps,
        ]
        if report is not None:
            rows += [
                ("time", bars.shares(report.buckets)),
                *([("key", Text(bars.key(report.buckets)))] if bars.lettered else []),
                ("", _largest(report)),
            ]
            rows.append(("trouble", Text(f"interruptions {len(report.interruptions)}, steps done again {report.steps_lost}")))
        return rows

    def _speed_row(self, bars: Bars) -> Iterator[tuple[str, RenderableType]]:
        """Tokens a second, where any are told."""
        from rich.text import Text

        if self._speed.text():
            yield "speed", Text.assemble(f"{self._speed.text()}  ", (bars.curve(list(self._rates)), "cyan"))

    def _phase(self) -> str:
        phases = len(self._config.phases) if self._config else 0
        return f", phase {self._state.training_phase} of 0 to {phases}" if phases else ""

    def _checkpoint(self) -> str:
        storage = f"step {self._saved.step} ({format_bytes(self._saved.nbytes)})" if self._saved else "none yet"
        return f"storage: {storage}" + ("" if self._script else f"; memory: step {self._state.snapshot_step}")

    def _books(self) -> Report | None:
        """The report so far, made now and then: a long ledger takes a while to close."""
        if self._is_new and (self.is_over or time.monotonic() - self._booked > BOOKS_EVERY_S):
            self._booked, self._is_new = time.monotonic(), False
            try:
                self._report = self._builder.build(None)
            except ReportError:  # in the middle of something; the last books stand until it is over
                return self._report
        return self._report


def readable(config: dict[str, Any]) -> Config | None:
    """The config of a ledger, if this version can read it."""
    try:
        return msgspec.convert(config, Config)
    except msgspec.ValidationError:
        return None


def _largest(report: Report, count: int = 3) -> Text:
    """What the bar shows, in words: the effective time, and what most of the rest went to."""
    from rich.text import Text

    told = Text(f"effective {100 * report.effective_time:.1f} % of {format_duration(report.wall_s)}")
    rest = sorted((item for item in report.buckets.items() if item[0] != "productive"), key=lambda item: -item[1])
    for name, seconds in rest[:count]:
        if seconds > 0:
            told.append(", ").append(f"{name} {format_share(seconds, report.wall_s)}", style=COLOURS[name])
    return told
