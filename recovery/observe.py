"""What the signature table finds in the lines, and what each finding is worth.

A line that matches a cause is not yet a cause: it may be noise, it may have been handled or survived, it may belong to an
earlier attempt, it may mean nothing without another one. Such a finding keeps a little weight or none, and the reason is kept
with it, so that an explanation can say why a line that looks so telling did not decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from recovery.evidence import Evidence
from recovery.exits import ended_text
from recovery.literals import compiled
from recovery.reading import Line, Reader
from recovery.templates import ExitMeaning, Reading, Signature, Table

SURVIVED = 2  # finished steps after a line that prove that it did not end the run
STALE_S = 600.0  # a job does not outlive its own cancellation by more than this: what follows is another attempt
HANDLED = 8  # of a handled cause: less than a signal or what peers say, more than a bare error status
NEXT_TO_NOTHING = 4  # of what cannot have ended this attempt: decides only if there is nothing at all
OTHERS_KILL = 45  # of an OOM kill that may be somebody else's: less than an exception, more than a time-out
STALE_KERNEL_S = 10_800.0  # what the kernel said this long before the log's end is another story, even after a long hang
WARNING = 15  # what a cause loses that is only called a warning
KILLED = frozenset({-9, 137, None})
HEALED = 45  # of a link that came back: less than an exception, more than a time-out, which a flap may well have caused
_LINK_DOWN = re.compile(r"(?i)\blink (is )?down\b")
_LINK_UP = re.compile(r"(?i)link (is )?(up|ready)\b")
CAUSE = 50  # an exception, or what says more
AFTER = 20  # of a node drained for a kill that took too long: less than what the kill itself, and its reason, say
_KILL_FAILED = re.compile(r"(?i)\bkill task failed\b")
_DRAINED = re.compile(r"(?i)\bdrain(ed|ing)?\b|kill task failed")
_KERNEL_STAMP = re.compile(r"^\[[^\]]*\]\s*")
_WAS_KILLED = re.compile(r"(?i)\bkilled\b|SIGKILL|signal 9|exit(ed)? (with )?(code|status) -9|137")
ENDS_A_JOB = frozenset({"preemption", "time_limit", "user_interrupt", "host_maintenance"})


@dataclass(slots=True)
class Observation:
    """A signature (or the meaning of an exit status) found in a line. `why_less`: why it does not have its full weight."""

    signature: Signature | ExitMeaning
    line: Line
    weight: int
    why_less: str = ""

    def order(self) -> tuple[int, int]:
        """Heaviest first, then as printed."""
        return (-self.weight, self.line.index)


def observe(case: Evidence, reader: Reader, table: Table) -> tuple[list[Observation], list[Observation]]:
    """What can decide, heaviest first, and what was found in lines that are no evidence."""
    found = list(_find(reader, table))
    steps = _steps_with(found)
    real = [_weigh(it, reader, table, steps.get(it.signature.name, frozenset())) for it in found if not it.line.noise]
    noise = [Observation(it.signature, it.line, 0, it.line.noise) for it in found if it.line.noise]
    _drop_unsupported(real)
    _drop_others_kills(real, case, reader)
    _drop_healed(real, reader)
    _drop_drained_after(real, reader)
    _drop_earlier(real, reader)
    spoke = {it.line.rank for it in real if it.line.where == "log"}
    matches = [*real, *_exits(case, table, spoke)]
    matches.sort(key=Observation.order)
    return _earliest_first(matches), noise


def _earliest_first(matches: list[Observation]) -> list[Observation]:
    """Logs of several ranks are put together in any order: of equal ones on several ranks, the earliest by its own time."""
    best = [it for it in matches if it.weight == matches[0].weight and it.line.where == "log"]
    if not best or best[0] is not matches[0]:
        return matches
    if len({it.line.rank for it in best}) < 2 or any(it.line.rank is None or it.line.t is None for it in best):
        return matches
    first = min(best, key=lambda it: it.line.t or 0.0)
    return [first, *(it for it in matches if it is not first)]


def _find(reader: Reader, table: Table) -> Iterator[Observation]:
    """Every signature in every line; ranks repeat each other, so each text is looked up once."""
    seen: dict[tuple[str, str], list[Signature]] = {}
    index = table.by_source
    for where, lines in reader.lines.items():
        for line in lines:
            key = (where, line.text)
            if key not in seen:
                seen[key] = index[where].find(line.text)
            for signature in _allowed(seen[key], line):
                yield Observation(signature, line, signature.weight)


def _allowed(found: Sequence[Signature], line: Line) -> Iterator[Signature]:
    """Those whose conditions hold; the plain exception rule only speaks where no other does."""
    fitting = [s for s in found if not s.context or compiled(s.context).search(f"{line.context}\n{line.text}")]
    fitting = [s for s in fitting if not s.not_from or not compiled(s.not_from).search(_last_frame(line))]
    specific = [s for s in fitting if not s.exception]
    yield from specific or [s for s in fitting if line.exception or (s.exception == "line" and line.text[:1].isalpha())]


def _last_frame(line: Line) -> str:
    """Where the traceback that this line closes was raised."""
    frames = [text for text in line.context.splitlines() if text.lstrip().startswith('File "')]
    return frames[-1] if line.exception and frames else ""


def _steps_with(found: Sequence[Observation]) -> dict[str, frozenset[int]]:
    """Signature -> the log lines that hold it: to tell a bad step among good ones from a bad end."""
    lines: dict[str, set[int]] = {}
    for it in found:
        if it.line.where == "log":
            lines.setdefault(it.signature.name, set()).add(it.line.index)
    return {name: frozenset(indices) for name, indices in lines.items()}


def _weigh(it: Observation, reader: Reader, table: Table, same: frozenset[int]) -> Observation:
    signature, line = it.signature, it.line
    if not isinstance(signature, Signature):
        return it
    if line.where == "kernel" and line.t is not None and reader.last_t is not None and reader.last_t - line.t > STALE_KERNEL_S:
        it.weight, it.why_less = NEXT_TO_NOTHING, "long before the end"
    if line.where != "log":
        return it
    it.why_less = _doubt(signature, line, reader, table.reading, same)
    if it.why_less:
        it.weight = min(it.weight, HANDLED if it.why_less == "was handled" else NEXT_TO_NOTHING)
    elif signature.level != "any" and line.level == "W" and signature.role == "cause" and "NCCL WARN" not in line.text:
        it.weight -= WARNING
    return it


def _doubt(signature: Signature, line: Line, reader: Reader, reading: Reading, same: frozenset[int]) -> str:
    """Why the line does not count for what it says; empty if it does."""
    good = sum(at > line.index and at not in same for at in reader.progress)  # a bad value may stand in the step's own line
    if not signature.survives and good >= SURVIVED:
        return "training went on after it"
    if signature.level != "any":
        if line.level in ("I", "D", "T"):
            return "said at level INFO"
        step = line.index in reader.progress  # "skipped iterations: 0" is a column, not a story
        if not step and compiled(reading.handled).search(line.text) and not compiled(reading.not_handled).search(line.text):
            return "was handled"
    old = line.t is not None and reader.last_t is not None and reader.last_t - line.t > STALE_S
    return "belongs to an earlier attempt" if old and signature.class_ in ENDS_A_JOB else ""


def _drop_unsupported(matches: Sequence[Observation]) -> None:
    """A signature that means nothing by itself counts only beside one of those it needs."""
    names = {it.signature.name for it in matches if not it.why_less}
    for it in matches:
        needs = it.signature.needs if isinstance(it.signature, Signature) else ()
        if needs and not names.intersection(needs):
            it.weight, it.why_less = NEXT_TO_NOTHING, "means nothing by itself"


def _drop_others_kills(matches: Sequence[Observation], case: Evidence, reader: Reader) -> None:
    """An OOM kill that the kernel reports is ours only if something of ours was killed."""
    struck = any(status in KILLED for status in case.exit.values()) or not case.exit
    if struck or any(_WAS_KILLED.search(line.raw) for line in reader.lines["log"]):
        return
    for it in matches:
        if it.line.where == "kernel" and isinstance(it.signature, Signature) and it.signature.rank == "killed":
            it.weight, it.why_less = OTHERS_KILL, "no process of ours is known to have been killed"


def _drop_healed(matches: Sequence[Observation], reader: Reader) -> None:
    """A link that the kernel reports down and then up again in the same words did not stay down."""
    said = [_KERNEL_STAMP.sub("", line.text) for line in reader.lines["kernel"]]
    for it in matches:
        if it.line.where != "kernel" or not (down := _LINK_DOWN.search(_KERNEL_STAMP.sub("", it.line.text))):
            continue
        device, at = down.string[: down.start()], down.start()
        if any(text.startswith(device) and _LINK_UP.match(text, at) for text in said[it.line.index + 1 :]):
            it.weight, it.why_less = min(it.weight, HEALED), "the link came back"


def _drop_drained_after(matches: Sequence[Observation], reader: Reader) -> None:
    """A node that Slurm drains because the job's processes did not die in time: that came after the end."""
    if any(_KILL_FAILED.search(line.text) for where in ("scheduler", "log") for line in reader.lines[where]):
        for it in matches:
            if _DRAINED.search(it.line.text):
                it.weight, it.why_less = min(it.weight, AFTER), "the node was drained after the end"


def _drop_earlier(matches: Sequence[Observation], reader: Reader) -> None:
    """Where a log holds several attempts: what earlier ones said, if the newest has a cause of its own."""
    told = [it for it in matches if it.line.where == "log" and not it.why_less]
    if any(it.line.index > reader.again > 0 and it.weight >= CAUSE for it in told):
        for it in told:
            if it.line.index < reader.again:
                it.weight, it.why_less = NEXT_TO_NOTHING, "belongs to an earlier attempt"


def _began_it(case: Evidence, struck: Sequence[str]) -> bool:
    """Whether the first of these ranks ended before every other one, as far as the order of deaths is on record."""
    return bool(struck) and len(case.exit) > 1 and case.order[:1] == (struck[0],) and struck[0].isdecimal()


def _exits(case: Evidence, table: Table, spoke: Collection[int | None]) -> Iterator[Observation]:
    """What the exit statuses say by themselves; those we caused say nothing. `spoke`: ranks whose own lines say something."""
    own = {rank: status for rank, status in case.exit.items() if rank not in case.ours and status is not None}
    order = [*(rank for rank in case.order if rank in own), *(rank for rank in own if rank not in case.order)]
    for meaning in table.exit:
        struck = [rank for rank in order if own[rank] in meaning.statuses]
        if meaning.only and len(struck) < len(case.exit):
            continue
        if meaning.one and not len(struck) == 1 < len(case.exit):
            continue
        if meaning.first and not (_began_it(case, struck) and int(struck[0]) not in spoke):
            continue
        if struck:
            rank = int(struck[0]) if struck[0].isdecimal() else -1
            text = ended_text(struck[0], own[struck[0]])
            yield Observation(meaning, Line("exit", rank, text, text, rank if rank >= 0 else None), meaning.weight)
