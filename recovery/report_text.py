"""The report in plain lines: what a log file, a mail or a terminal without colours can hold."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from recovery.durations import format_duration
from recovery.events import (
    AttemptEnded,
    AttemptStarted,
    Decided,
    Event,
    EvidenceLine,
    InterruptionClassified,
    ProcessDied,
    Ready,
    SignalSent,
    Straggler,
    Suspected,
    steps_of,
)
from recovery.exits import exit_text
from recovery.gaps import SegmentsMissing
from recovery.report import AttemptRow, CauseRow, InterruptionRow, Report, ReportError, of_script
from recovery.verdict import own_words

WIDTH = 80
NOTICES = 5
ATTEMPTS = ("attempt", "ranks", "from step", "ready in", "steps", "lost", "ended by")
_SPEAKER = re.compile(r"\[rank(\d+)\]: ")
_LABEL = re.compile(r" *(?:\S+ {2,}|\(\d+\) )")  # what stands before the text of a line: `cause      `, `(1) `
_COMMAND = re.compile(r"command: |  go on  |  option .*: ftrain ")  # what somebody copies, and would copy with its breaks


def lines(report: Report) -> list[str]:
    """The whole report, one string a line."""
    return [
        *_summary(report),
        *missing(report),
        "",
        *_buckets(report),
        "",
        "attempts",
        *table(ATTEMPTS, map(_attempt, report.attempts)),
        *_layouts_of(report.attempts),
        "",
        *_layouts(report),
        *_phases(report),
        *_skips(report),
        *_interruptions(report),
        *_causes(report),
        *_checkpoints(report),
        *_notices(report),
    ]


def missing(report: Report) -> list[str]:
    """What is not there to be reported on, and what that does to the rest."""
    told = []
    for row in report.missing:
        since = "" if row.since is None else f" from {_clock(row.since)}"
        told.append(f"{row.text}{since}{' on' if row.until is None else f' to {_clock(row.until)}'}")
    if told:
        told.append("  so steps, tokens, interruptions and checkpoints are those that are recorded: there may have been more")
    return told


def _layouts(report: Report) -> list[str]:
    if not report.layouts:
        return []
    rows = [f"  {_clock(row.t)}  {row.was} -> {row.layout}: {row.reason}; costs {row.costs}" for row in report.layouts]
    return ["changes of layout", *rows, ""]


def _phases(report: Report) -> list[str]:
    if not report.phases:
        return []
    rows = []
    for row in report.phases:
        what = "; ".join(f"{it['path']} {it['old']} -> {it['new']}" for it in row.changes)
        which = f"phase {row.phase} of 0 to {row.phases - 1}, after step {row.step} ({row.layout})"
        rows.append(f"  {_clock(row.t)}  {which}: {what}")
    return ["phases", *rows, ""]


def _skips(report: Report) -> list[str]:
    if not report.skips:
        return []
    rows = [f"  {_clock(row.t)}  updates {row.first} to {row.last}, after attempt {row.attempt}" for row in report.skips]
    return ["data passed over", *rows, ""]


def explain(events: Iterable[Event], attempt: int) -> list[str]:
    """The story of one attempt: what was seen, what it was taken for and on which evidence, what was decided."""
    told: list[str] = []
    steps: list[int] = []
    script = False
    for event in events:
        script = script or of_script(event)
        if event.attempt != attempt and not isinstance(event, SegmentsMissing):
            continue
        steps += [record.step for record in steps_of(event)]
        story = list(_story(event, script=script))
        if story:
            told += _finished(steps)
            steps = []
        told += [f"{_clock(event.t)}  {line}" for line in story]
    told += _finished(steps)
    if not told:
        raise ReportError(f"the ledger holds no attempt {attempt}")
    return [f"attempt {attempt}", *told]


def _finished(steps: Sequence[int]) -> list[str]:
    """What was told between two lines of a story."""
    if not steps:
        return []
    return [f"  step {steps[0]} finished" if steps[0] == steps[-1] else f"  steps {steps[0]} to {steps[-1]} finished"]


def _story(event: Event, *, script: bool) -> Iterator[str]:
    match event:
        case SegmentsMissing():
            yield event.sentence()
        case AttemptStarted():
            layout = event.layout or "layout not recorded"
            state = "" if script else f", state from {event.source}"
            yield f"started on {_count(event.ranks, 'rank')} ({layout}){state}"
        case Ready(assumed=True):
            yield "all ranks are running: the first step is told; the state they began with is not"
        case Ready():
            yield f"all ranks ready with the state of step {event.step}"
        case ProcessDied():
            who = event.kind if event.rank is None else f"{event.kind} of rank {event.rank}"
            yield f"{who} (pid {event.pid}) ended: {exit_text(event.status)}{', by our own signal' if event.ours else ''}"
        case SignalSent():
            yield f"we sent signal {event.signal} to {event.kind} {event.pid}: {event.reason}"
        case Suspected():
            yield f"suspected since {_clock(event.since)}: {event.reason}"
        case Straggler():
            yield f"straggler: {event.reason}"
        case InterruptionClassified():
            verdict = event.verdict
            yield f"verdict {verdict.class_} ({verdict.component}), confidence {verdict.confidence:.2f}: {verdict.reason}"
            yield from (f"    {line}" for line in evidence_texts(verdict.evidence))
        case Decided():
            wait = f" after {format_duration(event.wait_s)}" if event.wait_s else ""
            yield f"decided {event.action}{wait}: {event.reason}"
        case AttemptEnded():
            yield f"ended; last finished step {event.step}"


def evidence_texts(evidence: Iterable[EvidenceLine]) -> list[str]:
    """Where each line stands (that of the first rank, if several said it), and what it says; who said it is named once."""
    said: dict[tuple[str, str], list[EvidenceLine]] = {}
    for line in evidence:
        text = _SPEAKER.sub("", line.text) if line.where == "log" else line.text
        said.setdefault((line.where, text), []).append(line)
    return [_evidence_text(text, lines) for (_, text), lines in said.items()]


def _evidence_text(text: str, said: Sequence[EvidenceLine]) -> str:
    first = said[0]
    if own := own_words(first.where, text):
        return own
    ranks = sorted({int(found[1]) for line in said if (found := _SPEAKER.match(line.text))})
    if len(ranks) < 2 or first.where != "log":
        return f"{first.where}:{first.line}: {first.text}"
    return f"{first.where}:{first.line}: [ranks {', '.join(map(str, ranks))}]: {text}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _summary(report: Report) -> Iterator[str]:
    state = f"{report.outcome} ({report.outcome_reason})" if report.outcome_reason else report.outcome or report.phase
    yield f"run {report.run_id}: {state}"
    finished, least = _count(report.steps_finished, "step"), "at least " if report.at_least else ""
    yield f"step {report.step}; {least}{finished} finished, {least}{report.steps_lost} of them lost and done again"
    losses = (("loss", report.loss), ("held-out loss", report.eval_loss))
    again = f" read, {report.tokens_again:,} of them again" if report.tokens_again else ""
    learnt = [f"{'at least ' if report.missing else ''}{report.tokens:,} tokens{again}"] if report.tokens else []
    learnt += [f"{name} {value:.4f}" for name, value in losses if value is not None]
    if learnt:
        yield ", ".join(learnt)
    productive_s = report.buckets["productive"]
    if not productive_s and report.steps_finished > report.steps_lost:
        yield "effective time: not known, for nothing says how long the steps took that were told"
        return
    yield f"effective time {report.effective_time:.1%} = {format_duration(productive_s)} / {format_duration(report.wall_s)}"
    yield f"  ({report.formula})"


def _buckets(report: Report) -> Iterator[str]:
    yield "every second since the first launch"
    wall_s = report.wall_s
    rows = [(name, format_duration(s), f"{s / wall_s if wall_s else 0.0:.1%}") for name, s in report.buckets.items() if s]
    yield from table(("bucket", "time", "share"), [*rows, ("total", format_duration(wall_s), "100.0%")])


def _attempt(row: AttemptRow) -> tuple[str, ...]:
    span = f"{row.first_step} to {row.last_step}" if row.first_step is not None else "none"
    start = "never" if row.start_s is None else format_duration(row.start_s)
    source = attempt_source(row).replace(", step", "")  # which the heading says
    return (str(row.attempt), str(row.ranks), source, start, span, str(row.steps_lost), row.ended_by or "-")


def attempt_source(row: AttemptRow) -> str:
    """Where its state is from, as far as it is known."""
    return f"{row.source}, step {'not told' if row.restored_step is None else row.restored_step}"


def _layouts_of(rows: Sequence[AttemptRow]) -> Iterator[str]:
    """Which attempts had which layout: on a line of its own, because it is as long as half a table."""
    for layout in dict.fromkeys(row.layout for row in rows if row.layout):
        having = [str(row.attempt) for row in rows if row.layout == layout]
        yield f"  {layout}: attempt{'s' if len(having) > 1 else ''} {', '.join(having)}"


def _interruptions(report: Report) -> Iterator[str]:
    if not report.interruptions:
        yield "no interruption recorded" if report.missing else "no interruption"
        return
    yield "interruptions"
    for row in report.interruptions:
        yield from _interruption(row, "at least " if report.at_least and row.steps_lost else "")
    yield ""


def _interruption(row: InterruptionRow, least: str) -> Iterator[str]:
    rank = "" if row.first_failing_rank is None else f", first rank {row.first_failing_rank}"
    node = f", node {row.node}" if row.node else ""
    was = f" (relabelled, was {row.relabelled_from})" if row.relabelled_from else ""
    where = "" if row.component == "unknown" else f" in {row.component}"
    yield f"  {_clock(row.t)}  attempt {row.attempt}: {row.class_}{was}{where}{rank}{node}"
    yield f"      cause      {row.reason} (confidence {row.confidence:.2f})"
    yield from (f"      evidence   {line}" for line in evidence_texts(row.evidence))
    decision = row.decision.replace(f": {row.reason}", "", 1)  # which stands above
    yield f"      decision   {row.action or 'none'}: {decision}" if row.decision else "      decision   none recorded"
    down = "not recovered" if row.down_s is None else f"{format_duration(row.down_s)} until all ranks were ready again"
    away = f", and {format_duration(row.absent_s)} in which nobody had started the run" if row.absent_s else ""
    yield f"      cost       {least}{_count(row.steps_lost, 'step')} lost, {down}{away}"


def _causes(report: Report) -> Iterator[str]:
    if not report.causes:
        return
    yield "causes, by count"
    yield from table(("component", "class", "count", "share"), map(_cause, report.causes))
    if report.mtbf_s is not None:
        high = "unbounded" if report.mtbf_high_s is None else format_duration(report.mtbf_high_s)
        interval = f"95 %: {format_duration(report.mtbf_low_s)} to {high}"
        yield f"mean running time between unplanned interruptions {format_duration(report.mtbf_s)} ({interval})"
    yield ""


def _cause(row: CauseRow) -> tuple[str, ...]:
    name = f"{row.class_} (planned)" if row.planned else row.class_
    return (row.component, name, str(row.count), f"{row.share:.1%}")


def _checkpoints(report: Report) -> Iterator[str]:
    rows = report.checkpoints
    newest = "none" if rows.newest_step is None else f"newest at step {rows.newest_step}"
    yield f"checkpoints: {rows.committed} committed ({newest}), {rows.nbytes:,} bytes in {format_duration(rows.seconds)}"
    yield from (f"  failed at step {row['step']}: {row['reason']}" for row in rows.failed)
    yield from (f"  step {row['step']} passed over: {row['reason']}" for row in rows.passed_over)


def _notices(report: Report) -> Iterator[str]:
    """What was said on the way, each sentence once and when it was said last; the newest of many."""
    last = {row["text"]: row["t"] for row in report.checkpoints.notices}
    newest = sorted(last, key=last.__getitem__)[-NOTICES:]
    if newest:
        yield "notices" if len(newest) == len(last) else f"the newest {NOTICES} of {len(last)} notices"
        yield from (f"  {_clock(last[text])}  {text}" for text in newest)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, left-aligned; closer together where a terminal would break the rows."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    gap = "  " if sum(widths) + 2 * len(widths) <= WIDTH else " "
    return ["  " + gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def fold(lines: Iterable[str], width: int = WIDTH) -> list[str]:
    """Lines that fit a terminal of `width` columns. What is too long goes on below its text, not below its label. Commands stay
    whole, and so does each word, which may be a path.
    """
    return [part for line in lines for part in _folded(line, width)]


def _folded(line: str, width: int) -> list[str]:
    if len(line) <= width or _COMMAND.match(line):
        return [line]
    label = _LABEL.match(line)
    margin = len(line) - len(line.lstrip())
    hang = label.end() if label and label.end() <= width // 2 else margin + 4
    return textwrap.wrap(line, width, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)


def _clock(t: float) -> str:
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S")
