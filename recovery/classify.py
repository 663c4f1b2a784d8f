"""From evidence to a verdict: what started it, who was first, how sure we are, and which lines say so.

The engine knows no software, only roles: it weighs what the signature table finds, tells causes from what healthy processes say
when a cause has struck elsewhere, and ignores what the supervisor did itself. Three rules do most of the work. The kernel and
the scheduler know better than the log. A cause beats a time-out, whichever was printed first. And what training survived did
not end it. `unknown` is an answer: without evidence nothing is blamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from recovery.culprit import first_failing
from recovery.events import Action, EvidenceLine, Verdict
from recovery.evidence import Evidence
from recovery.exits import ended_text, sender_text
from recovery.injected import announced
from recovery.observe import Observation, observe
from recovery.reading import Reader, read
from recovery.templates import ClassMeaning, Overrides, Signature, Table, default_table
from recovery.verdict import own_words

# Confidence by weight: the outside says so, a program names the cause, an exception, a time-out, fall-out, a bare status.
_CONFIDENCE = ((90, 0.97), (70, 0.9), (50, 0.8), (35, 0.65), (20, 0.45), (10, 0.3), (0, 0.2))
T = TypeVar("T")
SHOWN_CHARACTERS = 400  # of the deciding line, in the reason: long enough for a path and what is wrong there
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


def classify(case: Evidence, table: Table | None = None) -> Verdict:
    """The verdict on one interruption."""
    return explain(case, table).verdict


def warm(table: Table | None = None) -> None:
    """Read, index and compile the table now, so that a run that stands still does not wait for it (0.2 s of CPU)."""
    table = (table if table is not None else default_table()).check()
    classify(Evidence(log=("", "x")), table)


def explain(case: Evidence, table: Table | None = None) -> Explanation:
    """The verdict with everything that was weighed for it."""
    table = table if table is not None else default_table()
    reader = read(case, table)
    matches, noise = observe(case, reader, table)
    verdict = _verdict(case, reader, table, matches)
    said = tuple(line for line in announced(case, verdict.first_failing_rank) if line not in verdict.evidence)
    verdict = replace(verdict, evidence=verdict.evidence + said[-SHOWN:])
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
    discarded = tuple(
        Discarded(where=it.line.where, line=it.line.index, text=it.line.raw, signature=it.signature.name, why=it.why_less)
        for it in (*noise, *matches)
        if it.why_less
    )
    return Explanation(verdict=verdict, considered=considered, discarded=discarded)


def _verdict(case: Evidence, reader: Reader, table: Table, matches: Sequence[Observation]) -> Verdict:
    if not matches:
        return Verdict(class_="unknown", component="unknown", confidence=0.1, reason=_unexplained(case))
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
        reason=_reason(best, rank) + _sender(case, best, matches),
        evidence=_evidence(best, same),
        node=case.nodes.get(str(rank), "") if rank is not None else "",
        signature=best.signature.name,
    )


def _same_story(match: Observation, best: Observation) -> bool:
    """Lines that may name the rank when the deciding one does not: the user-space side of a hardware fault, the same class."""
    if match.signature.class_ == best.signature.class_:
        return True
    hardware = best.signature.class_.startswith("gpu_")
    return hardware and match.signature.class_.startswith(("gpu_", "cuda_")) and match.line.where == "log"


def _meaning(case: Evidence, reader: Reader, table: Table, best: Observation) -> tuple[str, str, Action, bool, bool]:
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


def _confidence(best: Observation, matches: Sequence[Observation]) -> float:
    """How often such a verdict is right: by who says it, less if something of another kind weighs nearly as much."""
    confidence = next(value for least, value in _CONFIDENCE if best.weight >= least)
    rivals = [m for m in matches if m.signature.class_ != best.signature.class_ and best.weight - m.weight < 6]
    if rivals:
        confidence -= 0.15
    if best.signature.class_ == "unknown":
        confidence = min(confidence, 0.3)
    return round(confidence * (0.5 if best.why_less else 1.0), 2)


def _reason(best: Observation, rank: int | None) -> str:
    text = " ".join(best.line.text.split())
    own = own_words(best.line.where, text)
    text = own or text
    shown = text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
    named = best.line.where == "exit" or (own and re.search(rf"\brank {rank}\b", text))
    who = "" if rank is None or named else f"rank {rank}: "
    return f"{who}{shown}" if own or best.line.where in ("log", "exit") else f"{who}{best.line.where}: {shown}"


def _unexplained(case: Evidence) -> str:
    """No signature knows it: at least how the first rank ended that did not end well and not by our own doing."""
    reason = "nothing says what happened"
    first = next((rank for rank in (*case.order, *case.exit) if case.exit.get(rank) and rank not in case.ours), None)
    if first is None:
        return reason
    return f"{reason}; {ended_text(first, case.exit[first] or 0)}{sender_text(case, first, oom_on_record=False)}"


def _sender(case: Evidence, best: Observation, matches: Sequence[Observation]) -> str:
    """Where a bare exit status is all there is and explains nothing: what is known of who did it."""
    if best.line.where != "exit" or best.signature.class_ != "unknown":
        return ""
    oom = any(match.signature.class_ == "host_oom" and match.line.where != "exit" for match in matches)
    who = str(best.line.index) if best.line.rank is not None else "agent"
    return sender_text(case, who, oom_on_record=oom)


def _evidence(best: Observation, same: Sequence[Observation]) -> tuple[EvidenceLine, ...]:
    """The deciding line and a few more that say the same, each line once."""
    shown: dict[tuple[str, int], EvidenceLine] = {}
    for match in (best, *same):
        line = match.line
        if len(shown) < SHOWN and not (match.why_less and match is not best):
            shown.setdefault((line.where, line.index), EvidenceLine(where=line.where, line=line.index, text=line.raw))
    return tuple(shown.values())
