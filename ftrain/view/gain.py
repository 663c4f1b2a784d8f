"""Whether one run's speed is a gain of its settings, and how far what was measured can tell.

The steps of a run say how sure its own median is. They say nothing of the machine on the day of the other run: a neighbour, the
heat, another placement of processes can make a whole run slow from its first step to its last. So a difference is noise unless
it is larger than what either run drifts from one part of its steps to another; with one run of each it is still no gain; and
with several pairs it is one only if it is larger than what runs with the same settings differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct

from ftrain.load import Change
from ftrain.units import plural
from ftrain.view.measured import Measured
from ftrain.view.numbers import show

OTHER_WORK = ("model.", "data.", "optimizer.")
"""Sections that say what is trained: runs that differ here are compared by what they learn, not by their speed."""


class Suggestion(Struct, frozen=True, kw_only=True):
    """One thing to do, the figures that speak for it, and the overrides that would do it."""

    about: str
    text: str
    evidence: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """A run with one setting and one with the other. `a_first`: which began first; None if one has no step."""

    a: Measured
    b: Measured
    a_first: bool | None = None

    @property
    def gain(self) -> float:
        """Of B over A, minus 1. Both have a speed."""
        return speed(self.b) / speed(self.a) - 1

    @property
    def unlike(self) -> str:
        """Whose steps hold an unknown number of tokens although the other's are known; empty: their speeds compare."""
        known = [bool(of.tokens_per_update) for of in (self.a, self.b)]
        return "" if known[0] == known[1] else "AB"[known.index(False)]


def speed(of: Measured) -> float:
    """Tokens per second and rank; where no tokens are told, steps per second. 0 if there is none."""
    if of.step is None or not of.step.value:
        return 0.0
    return of.tokens_per_s / of.ranks if of.tokens_per_s else 1.0 / of.step.value


def verdict(pairs: Sequence[Pair], timed: Sequence[Change], *, trusted: bool) -> Suggestion:
    """Which of the two is the faster way through the same material, if that can be told. `pairs`: at least one, A and B first;
    `timed`: what differs and changes a step; `trusted`: the results agree."""
    if not all(speed(pair.a) and speed(pair.b) for pair in pairs):
        return NO_STEP
    first = pairs[0]
    if first.unlike:
        text = f"no speed is compared: how many tokens a step of {first.unlike} holds is not told"
        return Suggestion(about="speed", text=text, evidence=tuple(spans(pairs)))
    evidence = (*_notes(first), *spans(pairs), *_memory(first))
    if len(pairs) == 1 and _within_noise(first):
        text = "neither is faster: the difference of the steps lies within their noise. Choose by memory, or measure longer"
        return Suggestion(about="speed", text=text, evidence=evidence)
    other = [item.path for item in timed if item.path.startswith(OTHER_WORK)]
    if other:
        text = "no speed is credited to either: they do not train the same thing"
        return Suggestion(about="speed", text=text, evidence=(f"changed: {', '.join(other)}", *evidence))
    if first.a.ranks != first.b.ranks and first.a.tokens_per_update:
        text = (
            f"scaling from {first.a.ranks} to {plural(first.b.ranks, 'rank')} keeps {100 + 100 * first.gain:.0f} % of a rank's"
        )
        doubt = ONE_PAIR if len(pairs) == 1 else ()
        return Suggestion(about="scaling", text=f"{text} speed", evidence=(*evidence, *doubt))
    return _one_pair(first, timed, evidence, trusted=trusted) if len(pairs) == 1 else _several(pairs, timed, evidence, trusted)


NO_STEP = Suggestion(about="speed", text="run both for more steps: there is no step to compare yet")
ONE_PAIR = (
    "one run of each does not tell a setting from the machine's ups and downs",
    "do both once more, B first, and compare all four: --again RUN_A2 RUN_B2",
)


def _one_pair(pair: Pair, timed: Sequence[Change], evidence: tuple[str, ...], *, trusted: bool) -> Suggestion:
    faster = "B" if pair.gain > 0 else "A"
    verb = "not yet a gain:" if trusted else "once the results agree, measure again:"
    text = f"{verb} {_named(faster, timed)} had {_more(pair, faster).replace(' per second', '/s')}"
    return Suggestion(about="speed", text=text, evidence=(*ONE_PAIR, *evidence))


def _several(pairs: Sequence[Pair], timed: Sequence[Change], evidence: tuple[str, ...], trusted: bool) -> Suggestion:
    """A gain is the least of all pairs, and larger than what runs with the same settings differ by."""
    faster = "B" if pairs[0].gain > 0 else "A"
    sides = [[speed(pair.a) for pair in pairs], [speed(pair.b) for pair in pairs]]
    uneven = max(max(side) / min(side) - 1 for side in sides)
    ahead, behind = (sides[1], sides[0]) if faster == "B" else (sides[0], sides[1])
    least = min(pairs, key=lambda pair: _over(pair, faster))
    same = f"runs with the same settings differed by up to {100 * uneven:.1f} %"
    if min(ahead) <= max(behind) or _over(least, faster) <= uneven:
        gains = ", ".join(f"{100 * pair.gain:+.1f} %" for pair in pairs)
        text = f"no gain is shown: {same}"
        return Suggestion(about="speed", text=text, evidence=(f"B against A, pair by pair: {gains}", *evidence))
    verb = "keep" if trusted else "once the results agree, prefer"
    order = "all pairs began with the same run: what changes with time is not ruled out"
    alike = len({pair.a_first for pair in pairs}) == 1
    text = f"{verb} {_named(faster, timed)}: {_more(least, faster)}, the least of {len(pairs)} pairs"
    return Suggestion(about="speed", text=text, evidence=(same, *([order] if alike else []), *evidence))


def _named(name: str, timed: Sequence[Change]) -> str:
    from ftrain.schema import toml_text

    what = ", ".join(f"{item.path} = {toml_text(item.new if name == 'B' else item.old)}" for item in timed)
    return f"{name} ({what})" if what else name


def _over(pair: Pair, faster: str) -> float:
    """How much more speed `faster` had, minus 1."""
    return pair.gain if faster == "B" else 1 / (1 + pair.gain) - 1


def _more(pair: Pair, faster: str) -> str:
    return f"{100 * _over(pair, faster):.1f} % more {'tokens' if pair.a.tokens_per_update else 'steps'} per second"


def _within_noise(pair: Pair) -> bool:
    """Intervals that meet, or a difference no larger than what one of the runs drifts by itself: of the time of equal material
    on all ranks together."""
    a, b = pair.a, pair.b
    assert a.step is not None
    assert b.step is not None
    share = (a.tokens_per_update or 1) / (b.tokens_per_update or 1)  # of B's update, which is as much as one of A's
    apart = a.step.high < share * b.step.low or share * b.step.high < a.step.low
    ratio = share * b.step.value / a.step.value
    return not (apart and max(ratio, 1 / ratio) - 1 > max(a.drift, b.drift))


def _notes(pair: Pair) -> Iterator[str]:
    if not pair.a.tokens_per_update:
        yield "how much a step holds is not told: compared is the time of a step"
    elif pair.a.tokens_per_update != pair.b.tokens_per_update:
        yield "an update holds another number of tokens: compared is the time of the same material, not of an update"


def _memory(pair: Pair) -> Iterator[str]:
    a, b = pair.a.peak_memory, pair.b.peak_memory
    if a and b:
        yield f"memory of the fullest rank: {show(a, 'B')} and {show(b, 'B')}"


def spans(pairs: Sequence[Pair]) -> Iterator[str]:
    """What each run measured, as evidence: A and B, then A2 and B2."""
    for number, pair in enumerate(pairs, 1):
        for name, of in (("A", pair.a), ("B", pair.b)):
            if of.step:
                yield _span(f"{name}{number if number > 1 else ''}", of)


def _span(name: str, of: Measured) -> str:
    assert of.step is not None
    told = f"{name}: step {show(of.step.value, 's')}, 95 % interval {show(of.step.low, 's')} to {show(of.step.high, 's')}, "
    told += plural(of.step.count, "step")
    if of.tokens_per_s:
        told += f", {show(of.tokens_per_s, 'tokens')} tokens/s on {plural(of.ranks, 'rank')}"
    return told + (f", parts of it apart by {100 * of.drift:.0f} %" if of.drift else "")


def alike(pairs: Sequence[Pair], beside: str, differ: Sequence[Change]) -> Suggestion:
    """Of two runs whose steps are configured alike: whatever their times are, no setting of a step is to thank for it.
    `differ`: fields that do not change what a step computes; faults can only have made slower whoever had them."""
    pair = pairs[0]
    if not (speed(pair.a) and speed(pair.b)):
        return NO_STEP
    name = "B" if pair.gain > 0 else "A"
    same = "the settings of a step are the same in both"
    if not (pair.a.step and pair.b.step and pair.a.step.differs_from(pair.b.step)):
        text = f"nothing follows: {same}, and the difference of the steps lies within their noise"
    else:
        cause = beside or "the machine was unequal (other load, other hardware)"
        paths = [item.path for item in differ if item.path != "faults" or (item.old if name == "B" else item.new)]
        cause += f", or because of what differs beside the steps ({', '.join(paths)})" * bool(paths)
        text = f"nothing follows: {same}. {name} had {_more(pair, name)} because {cause}"
    return Suggestion(about="speed", text=text, evidence=tuple(spans(pairs)))
