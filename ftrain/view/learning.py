"""Whether two runs learn the same: step by step where their updates are the same ones, and over tokens in any case.

Two runs with the same data, seed and batch do the same updates; their losses may differ by rounding only. That is not
"close": rounding feeds back through the updates, so what counts is where the curves part and how far, and the reader is told
both. Runs with other batches are compared after equal numbers of tokens: a larger update is not the same material sooner.
"""

from __future__ import annotations

from bisect import bisect_right

from msgspec import Struct

from ftrain.units import plural
from ftrain.view.past import Origins, origins
from ftrain.view.record import Recorded

ROUNDING = 2.0**-8
"""Largest |difference| of two losses, relative to the larger, that is called rounding: one step of a bfloat16 weight."""


class Learning(Struct, frozen=True, kw_only=True):
    """What the curves say. Losses are of the final histories."""

    same_updates: bool
    """Every common step learnt from as many tokens in both runs."""
    common_steps: int
    last_common_step: int
    a_at_step: float | None
    b_at_step: float | None
    first_difference: int | None
    """The first common step whose losses are not the same number."""
    largest_difference: float
    common_tokens: int
    a_at_tokens: float | None
    b_at_tokens: float | None
    corpora: str
    """What tells that the runs learn from different texts; empty if nothing does."""
    untold: str
    """Why losses cannot be compared, of a script that does not tell all of them; empty if nothing is missing."""
    origins: Origins
    """What they began with: where that differs, no losses are of the same material."""
    is_rounding: bool
    """The same updates, and no loss differs by more than rounding."""
    verdict: str


def learning(a: Recorded, b: Recorded, *, corpora: str = "") -> Learning:
    """Compare two runs' losses. `corpora`: what says that they learn from different texts, which no two losses survive."""
    losses = [{done.record.step: done.record.loss for done in run.steps} for run in (a, b)]
    common = sorted(losses[0].keys() & losses[1].keys())
    tokens = [run.tokens_by_step() for run in (a, b)]
    began = origins(a, b)
    untold = _untold(a, b)
    alike = began.same and not corpora and not untold
    same = bool(common) and alike and all(_tokens(a, step) == _tokens(b, step) for step in (common[0], common[-1]))
    gaps = {step: _gap(losses[0][step], losses[1][step]) for step in common}
    first = next((step for step, gap in gaps.items() if gap), None)
    least = min((max(found.values(), default=0) for found in tokens), default=0)
    at = [_at(run, found, least) for run, found in zip((a, b), tokens, strict=True)]
    last = common[-1] if common else 0
    return Learning(
        same_updates=same,
        common_steps=len(common),
        last_common_step=last,
        a_at_step=losses[0].get(last),
        b_at_step=losses[1].get(last),
        first_difference=first if same else None,
        largest_difference=0.0 if untold else max(gaps.values(), default=0.0),
        common_tokens=least,
        a_at_tokens=at[0],
        b_at_tokens=at[1],
        corpora=corpora,
        untold=untold,
        origins=began,
        verdict=_verdict(same, first, gaps) if alike else _unlike(corpora, began, untold),
        is_rounding=same and all(_relative(losses[0][step], losses[1][step]) <= ROUNDING for step in common),
    )


def _untold(a: Recorded, b: Recorded) -> str:
    """What only a script leaves out. Two scripts that tell no tokens are taken to have as many in a step: it is not known."""
    runs = {"A": a, "B": b}
    silent = [name for name, run in runs.items() if run.steps and all(done.record.loss is None for done in run.steps)]
    if silent and (a.command or b.command):
        return f"not known: {' and '.join(silent)} told none"
    told = [any(done.record.tokens for done in run.steps) for run in runs.values()]
    if a.steps and b.steps and told[0] != told[1]:
        return f"not compared: how many tokens a step of {'AB'[told.index(False)]} holds is not told"
    return ""


def _tokens(run: Recorded, step: int) -> int:
    return next(done.record.tokens for done in run.steps if done.record.step == step)


def _gap(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b)


def _relative(a: float | None, b: float | None) -> float:
    gap = _gap(a, b)
    return gap / max(abs(a or 0.0), abs(b or 0.0)) if gap else 0.0


def _at(run: Recorded, tokens: dict[int, int], least: int) -> float | None:
    """The loss of the step by which `least` tokens had been learnt."""
    if not run.steps or not least:
        return None
    totals = [tokens[done.record.step] for done in run.steps]
    return run.steps[max(0, bisect_right(totals, least) - 1)].record.loss


def _unlike(corpora: str, began: Origins, untold: str) -> str:
    """Why no two losses of theirs can be compared."""
    if untold:
        return untold
    return "; ".join(([] if began.same else [_other_origins(began)]) + ([_other_texts(corpora)] if corpora else []))


def _other_origins(began: Origins) -> str:
    return (
        f"the runs did not begin with the same state ({began.text}): what was learnt before stands behind every loss, at equal"
        " steps and after equal numbers of tokens. Nothing follows from a difference; begin both with one state"
    )


def _other_texts(corpora: str) -> str:
    return (
        f"the runs learn from different corpora ({corpora}): their losses are of different texts, and equal numbers of tokens"
        " (targets that count) are not the same material. Nothing follows from a difference; evaluate both on one corpus"
    )


def _verdict(same: bool, first: int | None, gaps: dict[int, float]) -> str:
    if not gaps:
        return "the runs have no step in common"
    if not same:
        return "an update holds another number of tokens: compare after equal tokens, not at equal steps"
    if first is None:
        return f"identical, digit by digit, over {plural(len(gaps), 'common step')}"
    return f"first difference at step {first}, largest {max(gaps.values()):.3g} over {plural(len(gaps), 'common step')}"
