"""What is known of a script under `ftrain supervise`, and not more.

The supervisor sees processes: when they began, how they ended, what it was taken for, what was decided. Steps it knows only if
the script tells them; where the script has its state from it never knows. A report of 0 steps and "state from storage" would
be wrong where "not known" is right.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from msgspec import Struct

from ftrain.units import plural
from ftrain.view.record import Recorded
from recovery.durations import format_duration
from recovery.events import AttemptStarted, CheckpointCommitted, Event, ProcessDied, RunStarted, StopRequested
from recovery.exits import exit_text
from recovery.report_text import lines as report_lines
from recovery.report_text import missing, table

BEGINNINGS = ("no interruption", "no interruption recorded", "interruptions")


class Ran(Struct, frozen=True, kw_only=True):
    """One attempt. `ran_s`: from its start to its end, or to now; `steps` is 0 if none was told."""

    attempt: int
    processes: int
    started_t: float
    ran_s: float
    steps: int
    ended_by: str


class Script(Struct, frozen=True, kw_only=True):
    """A supervised command. `tells_steps`: whether any step was reported, without which there is no effective time."""

    command: str
    tells_steps: bool
    running_s: float
    attempts: tuple[Ran, ...]


def script(run: Recorded) -> Script | None:
    """None if it is a run of a config."""
    if not run.command:
        return None
    rows = {row.attempt: row for row in run.report.attempts}
    ran = tuple(
        Ran(
            attempt=span.attempt,
            processes=rows[span.attempt].ranks,
            started_t=span.start,
            ran_s=span.end - span.start,
            steps=rows[span.attempt].steps,
            ended_by=rows[span.attempt].ended_by,
        )
        for span in run.attempts
    )
    return Script(
        command=run.command,
        tells_steps=run.report.steps_finished > 0,
        running_s=sum(row.ran_s for row in ran),
        attempts=ran,
    )


def attempt_line(event: AttemptStarted) -> str:
    """That an attempt of a script begins. (Where its state is from, the script knows.)"""
    return f"attempt {event.attempt}: {plural(event.ranks, 'process')} ({event.layout})"


def after_stop(event: Event) -> str:
    """What is said of a script, and not of a run of a config, once it is asked to stop; nothing of other events."""
    match event:
        case StopRequested():
            return f"stop requested by {event.by}: the script is told to leave, by SIGTERM if it does not use ftrain.progress"
        case ProcessDied(kind="worker", ours=False):
            return f"rank {event.rank} (pid {event.pid}) has left after that: {exit_text(event.status)}"
    return ""


def killed_after_stop(events: Iterable[Event], stop_s: float) -> str:
    """That processes did not leave when they were asked to, and what is known to be saved; empty if all left. `events`: the
    whole ledger, oldest first; `stop_s`: the time that they had."""
    killed, stored, hurry, stopping = 0, 0, False, False
    for event in events:
        match event:
            case RunStarted(readopted=False):
                killed, hurry, stopping = 0, False, False
            case StopRequested():
                hurry, stopping = stopping, True
            case ProcessDied(kind="worker", ours=True, status=-9) if stopping:  # -SIGKILL
                killed += 1
            case CheckpointCommitted():
                stored = event.step
    if not killed:
        return ""
    when = "when the stop was asked for again" if hurry else f"{format_duration(stop_s)} after the stop"
    known = (
        f"the newest state known is the checkpoint of step {stored}"
        if stored
        else "the script told no checkpoint, so what is saved is not known"
    )
    return f"{plural(killed, 'process')} had to be killed (SIGKILL), still running {when}; {known}"


def lines(found: Script, run: Recorded) -> list[str]:
    """The report as text: the usual one where steps are told, but for what nobody can know."""
    usual = report_lines(run.report)
    after = next(place for place, line in enumerate(usual) if line in BEGINNINGS)
    before = usual[: usual.index("attempts")] if found.tells_steps else _without_steps(found, run)
    own = (
        []
        if run.report.checkpoints.committed
        else ["checkpoints: the script's own affair; none was made with ftrain.Checkpointer"]
    )
    rest = [line for line in usual[after:] if not (own and line.startswith("checkpoints: "))]
    if not found.tells_steps:
        rest = [line.replace("0 steps lost, ", "work lost: not known; ") for line in rest]
    return [*before, "attempts", *_attempts(found), "", *rest, *own]


def _without_steps(found: Script, run: Recorded) -> list[str]:
    report = run.report
    state = f"{report.outcome} ({report.outcome_reason})" if report.outcome_reason else report.outcome or report.phase
    apart = max(0.0, report.wall_s - found.running_s)
    return [
        f"run {report.run_id}: {state}",
        f"command: {found.command}",
        f"running {format_duration(found.running_s)} of {format_duration(report.wall_s)} since the first start"
        f" ({format_duration(apart)} between attempts and around them)",
        "steps, lost work and effective time: not known, for the script tells no step. One line does:",
        "  `ftrain.progress(step)` in the script, or --progress-pattern for a line that it logs",
        *missing(report),
        "",
    ]


def _attempts(found: Script) -> list[str]:
    head = ("attempt", "processes", "started (UTC)", "ran", "steps", "ended by")
    rows = [
        (str(row.attempt), str(row.processes), datetime.fromtimestamp(row.started_t, UTC).strftime("%Y-%m-%d %H:%M:%S"),
         format_duration(row.ran_s), str(row.steps) if found.tells_steps else "-", row.ended_by or "-")
        for row in found.attempts
    ]  # fmt: skip
    return table(head, rows)
