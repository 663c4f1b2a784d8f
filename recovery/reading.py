"""From lines to what they are worth: who speaks, which lines are events, which are only text that looks like one.

Most lines of a dying run's log are not evidence: advice printed beside an error, the source code shown in a traceback, a
dataset preview that happens to speak of killing, a warning that was handled, settings. A classifier that looks for words falls
for all of them. So every line is first given its speaker (the rank it came from) and, if it cannot be evidence, the reason why;
only then are signatures compared with what is left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from recovery.events import Where
from recovery.evidence import Evidence
from recovery.literals import compiled
from recovery.templates import Noise, Reading, Table

MAX_LINE = 4000  # characters looked at: longer lines are dumps, and expressions must stay fast
CONTEXT_LINES = 8
SHORTEST_SAYING = 12  # characters: what is left of a line when its advice is cut off must still say something
_CODE_FRAME = re.compile(r'^\s+File "|^\s*\^+\s*$|^\s*~*\^+~*\s*$')
_CPP_FRAME = re.compile(r"^frame #\d+:|^\s*#\d+ 0x|^Thread 0x|^\s+<no Python frame>|^Current thread 0x")
_LEVEL = re.compile(r"\b(INFO|DEBUG|TRACE|WARNING|WARN)\b|^\[?([IWEF])\d{4} |^\[([IWEF])\d{3,4} |^\[([IWEF]) \w")
_QUOTED = re.compile(r"^Traceback \(most recent call last\): \(RANK (\d+)\)|CheckpointException ranks:dict_keys\(\[(\d+)\]\)")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b")
_NCCL = re.compile(r"^(\S+:\d+):\d+ \[\d+\] ")
_NCCL_INIT = re.compile(
    r"^(\S+:\d+):\d+ \[\d+\] NCCL INFO (?:ncclCommInit\w+ )?comm 0x\w+ rank (\d+) n[Rr]anks \d+ .*cudaDev \d+"
)
_GLOG = re.compile(r"^\[rank(\d+)\]:\[[EWIF]\d")
_SENTENCE_END = re.compile(r"[.!?;] | - |, ")
_KERNEL_TIME = re.compile(r"^\[(\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4})\]")
_TIME = re.compile(r"(20\d\d)-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")


@dataclass(slots=True)
class Line:
    """One line of evidence. `noise` says why it cannot decide anything; `context` is what stood before it."""

    where: Where
    index: int
    raw: str
    text: str
    rank: int | None = None
    speaker: str = ""
    noise: str = ""
    exception: bool = False
    context: str = ""
    level: str = ""
    t: float | None = None


@dataclass
class Reader:
    """All lines of an interruption, read once."""

    lines: dict[str, list[Line]]
    progress: list[int] = field(default_factory=list)  # log indices of finished steps
    finished: bool = False
    again: int = 0  # the log index where the newest attempt begins, where a log holds several
    steps: int | None = None

    @property
    def started(self) -> bool:
        """Whether a step was finished before the end."""
        return self.steps > 0 if self.steps is not None else len(self.progress) > 0

    @cached_property
    def last_t(self) -> float | None:
        """The last time of day printed in the log."""
        times = [line.t for line in self.lines["log"] if line.t is not None]
        return max(times) if times else None


def read(case: Evidence, table: Table) -> Reader:
    """The lines of `case`, each with its speaker and, where it is no evidence, the reason."""
    lines = {
        "log": [_split(index, raw, table.reading) for index, raw in enumerate(case.log)],
        "kernel": [Line("kernel", i, raw, raw[:MAX_LINE], t=_kernel_t(raw)) for i, raw in enumerate(case.kernel)],
        "scheduler": [Line("scheduler", i, raw, raw[:MAX_LINE]) for i, raw in enumerate(case.scheduler)],
    }
    reader = Reader(lines, steps=case.steps)
    _mark_speakers(lines["log"], table.reading)
    _mark_quoted(lines["log"])
    _mark_nccl(lines["log"])
    _mark_tracebacks(lines["log"])
    _mark_previews(lines["log"], table.reading)
    for line in lines["log"]:
        if line.noise:
            continue
        if _is_progress(line.text, table.reading):
            reader.progress.append(line.index)
        if any(compiled(pattern).search(line.text) for pattern in table.reading.again):
            reader.again = line.index
        if compiled(table.reading.finished).search(line.text):
            reader.finished = True
        line.noise = _noise(line, table)
    for line in (*lines["kernel"], *lines["scheduler"]):
        line.noise = next((noise.why for noise in table.noises.find(line.text)), "")
    return reader


def _split(index: int, raw: str, reading: Reading) -> Line:
    """The line without the prefixes that launchers put before it, and the rank they name."""
    text = raw[:MAX_LINE]
    rank: int | None = None
    prefixes = [compiled(pattern) for pattern in reading.prefixes]
    found = True
    while found:
        found = False
        for prefix in prefixes:
            if match := prefix.match(text):
                named = match.groupdict().get("rank")
                rank = int(named) if named is not None else rank
                text = text[match.end() :]
                found = True
    if rank is None and (match := _GLOG.match(text)):  # the text may number it within its process group
        rank = int(match[1])
    line = Line("log", index, raw, text, rank, speaker=raw[: len(raw[:MAX_LINE]) - len(text)])
    if match := _LEVEL.search(text[:160]):
        line.level = next(group for group in match.groups() if group)[0]
    if match := _TIME.search(raw[:200]):
        line.t = _seconds(match)
    return line


def _seconds(match: re.Match[str]) -> float | None:
    try:
        *whole, part = match.groups(default="0")
        return datetime(*map(int, whole)).timestamp() + float(f"0.{part}")  # type: ignore[arg-type]  # six numbers
    except ValueError:
        return None


def _mark_speakers(lines: Iterable[Line], reading: Reading) -> None:
    """Logs of several ranks one after the other, each under a heading."""
    rank: int | None = None
    for line in lines:
        matches = (compiled(pattern).match(line.text) for pattern in reading.speakers)
        if match := next((found for found in matches if found), None):
            named = match.groupdict().get("rank")
            rank = int(named) if named else None
            line.noise = "a heading"
        elif rank is not None and line.rank is None:
            line.rank, line.speaker = rank, f"rank {rank}"


def _mark_quoted(lines: Iterable[Line]) -> None:
    """PyTorch's distributed checkpoints print one rank's traceback on every rank: its lines are the rank's that it names."""
    quoted: dict[int | None, int] = {}  # rank that prints -> rank whose traceback it is
    for line in lines:
        printed, text = line.rank, line.text
        if match := _QUOTED.search(text):
            line.rank = int(next(filter(None, match.groups())))
            if match[1]:
                quoted[printed] = line.rank
        elif printed in quoted:
            line.rank = quoted[printed]
            if not text[:1].isspace() and not _EXCEPTION.match(text):
                line.rank = printed
                del quoted[printed]


def _mark_nccl(lines: Sequence[Line]) -> None:
    """NCCL says host, pid and device; which rank that is, it says once, when a communicator begins."""
    ranks = {match[1]: int(match[2]) for line in lines if (match := _NCCL_INIT.match(line.text))}
    for line in lines:
        if line.rank is None and (match := _NCCL.match(line.text)):
            line.rank = ranks.get(match[1])


def _kernel_t(raw: str) -> float | None:
    """The time of a kernel line that was printed with one (`dmesg -T`)."""
    match = _KERNEL_TIME.match(raw)
    try:
        return datetime.strptime(match[1], "%a %b %d %H:%M:%S %Y").timestamp() if match else None
    except ValueError:
        return None


def _mark_tracebacks(lines: Sequence[Line]) -> None:
    """Source code shown in a traceback is no event; the line that ends it is the exception, with the frames as its context."""
    frames: dict[str, list[str]] = {}  # speaker -> frames of the traceback being printed
    recent: dict[str, list[str]] = {}
    code_follows: set[str] = set()
    for line in lines:
        key, text = line.speaker, line.text
        if "Traceback (most recent call last)" in text:
            frames[key] = []
            line.noise = "begins a traceback"
        elif key in frames and (text[:1].isspace() or not text):
            frames[key].append(text)
            line.noise = "code shown in a traceback"
        elif key in frames:
            line.exception = True
            line.context = "\n".join((*recent.get(key, []), *frames.pop(key)))
        elif _CODE_FRAME.match(text):
            line.noise = "code shown in a traceback"
            code_follows.add(key)
        elif key in code_follows and text[:1].isspace():
            line.noise = "code shown in a traceback"
        elif _CPP_FRAME.match(text):
            line.noise = "stack frame"
        if not line.noise:
            code_follows.discard(key)
            line.context = line.context or "\n".join(recent.get(key, []))
            recent.setdefault(key, []).append(text)
            del recent[key][:-CONTEXT_LINES]


def _mark_previews(lines: Iterable[Line], reading: Reading) -> None:
    """A block that a data preview opens ends at the first line that a logger wrote."""
    inside = False
    for line in lines:
        if compiled(reading.preview_block).match(line.text):
            inside = True
            line.noise = "data preview"
        elif inside and (line.level or line.t is not None or line.rank is not None or line.noise):
            inside = False
        elif inside:
            line.noise = "data preview"
        if not line.noise and any(compiled(pattern).search(it) for it in (line.text, line.raw) for pattern in reading.preview):
            line.noise = "data preview"


def _noise(line: Line, table: Table) -> str:
    reading = table.reading
    for noise in table.noises.find(line.text):
        if noise.role != "advice" or not _cut_advice(line, noise):
            return noise.why
    looks_set = any(compiled(pattern).search(line.text) for pattern in reading.config)
    if looks_set and not line.exception and not compiled(reading.config_not).search(line.text):
        return "a setting, not an event"
    return ""


def _cut_advice(line: Line, noise: Noise) -> bool:
    """Keep what a line says before it turns to advice ("X failed. This may be caused by Y"); False if that is nothing."""
    starts = [match.start() for pattern in noise.patterns if (match := compiled(pattern).search(line.text))]
    ends = [match.end() for match in _SENTENCE_END.finditer(line.text, 0, min(starts))]
    kept = line.text[: ends[-1]] if ends else ""
    if len(kept.strip()) < SHORTEST_SAYING:
        return False
    line.text = kept
    return True


def _is_progress(text: str, reading: Reading) -> bool:
    if any(compiled(pattern).search(text) for pattern in reading.not_progress):
        return False
    return any(compiled(pattern).search(text) for pattern in reading.progress)
