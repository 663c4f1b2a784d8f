"""From evidence to a verdict: what started it, who was first, how sure we are, and which lines say so.

The engine knows no software, only roles: it weighs what the signature table finds, tells causes from what healthy processes say
when a cause has struck elsewhere, and ignores what the supervisor did itself. Three rules do most of the work. The kernel and
the scheduler know better than the log. A cause beats a time-out, whichever was printed first. And what training survived did
not end it. `unknown` is an answer: without evidence nothing is blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from recovery.culprit import first_failing
from recovery.events import Action, EvidenceLine, Verdict
from recovery.evidence import Evidence
from recovery.literals import compiled
from recovery.reading import Line, Reader, read
from recovery.templates import ClassMeaning, ExitMeaning, Overrides, Signature, Table, default_table

SURVIVED = 2  # finished steps after a line that prove that it did not end the run
STALE_S = 600.0  # a job does not outlive its own cancellation by more than this: what follows is another attempt
HANDLED = 19  # most that a handled cause weighs: less than any time-out, more than a bare exit status
SURVIVED_WEIGHT = 4  # of what cannot have ended this attempt: decides only if there is nothing at all
# Confidence by weight: the outside says so, a program names the cause, an exception, a time-out, fall-out, a bare status.
_CONFIDENCE = ((90, 0.97), (70, 0.9), (50, 0.8), (35, 0.65), (20, 0.45), (10, 0.3), (0, 0.2))
T = TypeVar("T")
SHOWN = 4  # lines of evidence in a verdict


class Discarded(Struct, frozen=True, kw_only=True):
    """A line that looked like evidence and was not, and why."""

    where: str
    line: int
    text: str
    signature: str
    why: str


class Considered(Struct, frozen=True, kw_only=True):
    """An observation that could have decided, with the weight it had."""

    where: str
    line: int
    text: str
    signature: str
    class_: str
    weight: int


class Explanation(Struct, frozen=True, kw_only=True):
    """The verdict, what else was considered (heaviest first), and what was discarded."""

    verdict: Verdict
    considered: tuple[Considered, ...]
    discarded: tuple[Discarded, ...]


@dataclass(slots=True)
class _Match:
    """A signature (or the meaning of an exit status) found in a line."""

    signature: Signature | ExitMeaning
    line: Line
    weight: int
    why_less: str = ""

    def order(self) -> tuple[int, int]:
        return (-self.weight, self.line.index)


def classify(case: Evidence, table: Table | None = None) -> Verdict:
    """The verdict on one interruption."""
    return explain(case, table).verdict


def explain(case: Evidence, table: Table | None = None) -> Explanation:
    """The verdict with everything that was weighed for it."""
    table = table if table is not None else default_table()
    reader = read(case, table)
    discarded: list[Discarded] = []
    matches = [*_supported([*_matches(reader, table, discarded)]), *_exit_matches(case, table)]
    matches.sort(key=_Match.order)
    verdict = _verdict(case, reader, table, matches)
    considered = tuple(
        Considered(
            where=match.line.where,
            line=match.line.index,
            text=match.line.raw,
            signature=match.signature.name,
            class_=match.signature.class_,
            weight=match.weight,
        )
        for match in matches
    )
    discarded += [_dropped(match.line, match.signature.name, match.why_less) for match in matches if match.why_less]
    return Explanation(verdict=verdict, considered=considered, discarded=tuple(discarded))


def _matches(reader: Reader, table: Table, discarded: list[Discarded]) -> Iterator[_Match]:
    """Every signature found in every line that can be evidence."""
    seen: dict[tuple[str, str], tuple[Signature, ...]] = {}
    for where, lines in reader.lines.items():
        for line in lines:
            found = seen.get((where, line.text))
            if found is None:
                found = seen[where, line.text] = tuple(table.by_source[where].find(line.text))
            for signature in _allowed(found, line):
                if line.noise:
                    discarded.append(_dropped(line, signature.name, line.noise))
                else:
                    yield _weigh(signature, line, reader, table)


def _allowed(found: Sequence[Signature], line: Line) -> Iterator[Signature]:
    """Those whose conditions hold; the plain exception rule only speaks where no other does."""
    fitting = [s for s in found if not s.context or compiled(s.context).search(f"{line.context}\n{line.text}")]
    fitting = [s for s in fitting if not s.not_from or not compiled(s.not_from).search(_last_frame(line))]
    specific = [s for s in fitting if not s.exception]
    yield from specific or [s for s in fitting if line.exception or line.text[:1].isalpha()]


def _last_frame(line: Line) -> str:
    """Where the traceback that this line closes was raised."""
    frames = [text for text in line.context.splitlines() if text.lstrip().startswith('File "')]
    return frames[-1] if line.exception and frames else ""


def _weigh(signature: Signature, line: Line, reader: Reader, table: Table) -> _Match:
    """The weight of a match, less if the line was handled, survived, or belongs to an earlier attempt."""
    weight = signature.weight
    why = ""
    reading = table.reading
    if line.where == "log":
        if not signature.survives and reader.progress_after(line.index) >= SURVIVED:
            why = "training went on after it"
        elif signature.level != "any" and line.level in ("I", "D", "T"):
            why = "said at level INFO"
        elif (
            not signature.survives
            and compiled(reading.handled).search(line.text)
            and not compiled(reading.not_handled).search(line.text)
        ):
            why = "was handled" if signature.level != "any" else ""
        elif line.t is not None and reader.last_t is not None and reader.last_t - line.t > STALE_S and _ends_a_job(signature):
            why = "belongs to an earlier attempt"
    if (
        not why
        and signature.level != "any"
        and line.level == "W"
        and signature.role == "cause"
        and "NCCL WARN" not in line.text
    ):
        weight -= 15
    if why:
        weight = min(weight, HANDLED if why == "was handled" else SURVIVED_WEIGHT)
    return _Match(signature, line, weight, why)


def _ends_a_job(signature: Signature) -> bool:
    return signature.class_ in ("preemption", "time_limit", "user_interrupt", "host_maintenance")


def _supported(matches: list[_Match]) -> Iterator[_Match]:
    """A signature that means nothing by itself counts only beside one of those it needs."""
    names = {match.signature.name for match in matches if not match.why_less}
    for match in matches:
        needs = match.signature.needs if isinstance(match.signature, Signature) else ()
        if needs and not names.intersection(needs):
            match.weight, match.why_less = SURVIVED_WEIGHT, "means nothing by itself"
        yield match


def _exit_matches(case: Evidence, table: Table) -> Iterator[_Match]:
    """What the exit statuses say by themselves; those we caused say nothing."""
    own = {rank: status for rank, status in case.exit.items() if rank not in case.ours and status is not None}
    order = [*(rank for rank in case.order if rank in own), *(rank for rank in own if rank not in case.order)]
    for meaning in table.exit:
        struck = [rank for rank in order if own[rank] in meaning.statuses]
        counts = (not meaning.only or len(struck) == len(case.exit)) and (not meaning.one or len(struck) == 1 < len(case.exit))
        if struck and counts:
            rank = int(struck[0]) if struck[0].isdigit() else -1
            text = f"rank {struck[0]} ended with {own[struck[0]]}"
            yield _Match(meaning, Line("exit", rank, text, text, rank if rank >= 0 else None), meaning.weight)


def _verdict(case: Evidence, reader: Reader, table: Table, matches: Sequence[_Match]) -> Verdict:
    if not matches:
        return Verdict(class_="unknown", component="unknown", confidence=0.1, reason="nothing says what happened")
    best = matches[0]
    class_, component, action, retryable, planned = _meaning(case, reader, table, best)
    same = [m for m in matches if m.signature.class_ == best.signature.class_ or m.signature.name == best.signature.name]
    related = [m.line for m in matches if m is not best and not m.why_less and _same_story(m, best)]
    how = best.signature.rank if isinstance(best.signature, Signature) else "speaker"
    rank = first_failing(case, reader, best.line, related, how=how)
    return Verdict(
        class_=class_,
        component=component,
        planned=planned,
        first_failing_rank=rank,
        retryable=retryable,
        action=action,
        confidence=_confidence(best, matches),
        reason=_reason(best, rank),
        evidence=_evidence(best, same),
        node=case.nodes.get(str(rank), "") if rank is not None else "",
        signature=best.signature.name,
    )


def _same_story(match: _Match, best: _Match) -> bool:
    """Lines that may name the rank when the deciding one does not: the user-space side of a hardware fault, the same class."""
    if match.signature.class_ == best.signature.class_:
        return True
    hardware = best.signature.class_.startswith("gpu_")
    return hardware and match.signature.class_.startswith(("gpu_", "cuda_")) and match.line.where == "log"


def _meaning(case: Evidence, reader: Reader, table: Table, best: _Match) -> tuple[str, str, Action, bool, bool]:
    """Class, component, action, retryable, planned: the signature's word before the class's, the start's before the rest's."""
    said = best.signature
    own = Overrides(action=said.action, retryable=said.retryable, planned=said.planned)
    early = Overrides()
    if isinstance(said, Signature):
        own = replace(own, component=said.component)
        early = said.at_start if not reader.started else early
    class_ = early.class_ or said.class_
    base = table.classes[class_]
    layers: list[Overrides | ClassMeaning] = [early, own, base.at_start if not reader.started else Overrides(), base]
    component: str = _first(layer.component for layer in layers)
    action: Action = _first(layer.action for layer in layers)
    retryable: bool = _first(layer.retryable for layer in layers)
    planned: bool = _first(layer.planned for layer in layers)
    if _left_in_order(case, reader) and class_ == "process_crash":
        return class_, component, "finish", False, True
    return class_, component, action, retryable, planned


def _first(values: Iterable[T | None]) -> T:
    return next(value for value in values if value is not None)


def _left_in_order(case: Evidence, reader: Reader) -> bool:
    """Every rank ended with 0, and the log says that this was meant."""
    return bool(case.exit) and all(status == 0 for status in case.exit.values()) and reader.finished


def _confidence(best: _Match, matches: Sequence[_Match]) -> float:
    """How often such a verdict is right: by who says it, less if something of another kind weighs nearly as much."""
    confidence = next(value for least, value in _CONFIDENCE if best.weight >= least)
    rivals = [m for m in matches if m.signature.class_ != best.signature.class_ and best.weight - m.weight < 6]
    if rivals:
        confidence -= 0.15
    return round(confidence * (0.5 if best.why_less else 1.0), 2)


def _reason(best: _Match, rank: int | None) -> str:
    text = " ".join(best.line.text.split())
    shown = text if len(text) <= 200 else text[:199] + "…"
    who = "" if rank is None or best.line.where == "exit" else f"rank {rank}: "
    return f"{who}{shown}" if best.line.where in ("log", "exit") else f"{who}{best.line.where}: {shown}"


def _evidence(best: _Match, same: Sequence[_Match]) -> tuple[EvidenceLine, ...]:
    """The deciding line and a few more that say the same, each line once."""
    shown: dict[tuple[str, int], EvidenceLine] = {}
    for match in (best, *same):
        line = match.line
        if len(shown) < SHOWN and not (match.why_less and match is not best):
            shown.setdefault((line.where, line.index), EvidenceLine(where=line.where, line=line.index, text=line.raw))
    return tuple(shown.values())


def _dropped(line: Line, signature: str, why: str) -> Discarded:
    return Discarded(where=line.where, line=line.index, text=line.raw, signature=signature, why=why)
