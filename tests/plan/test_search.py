"""The search compares floats and closed forms; asked one layout at a time, in fractions and hop by hop, it ranks the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from founding import ROOT

from ftrain.load import load
from ftrain.plan import memory, placement, profile, search
from ftrain.plan import time as clock
from ftrain.plan.setup import Setup, options_of

CASES = {
    "dense": ("llama3-8b", "h100", ()),
    "experts": ("mixtral-8x7b", "h100", ("parallel.ranks=64", "parallel.pp=2")),
    "cp": ("llama3-8b", "h100", ("parallel.cp=4", "data.seq_len=32768")),
    "odd sizes": ("dense-500b", "b200", ("parallel.ranks=1280", "batch.global_batch=640")),
    "narrow": ("llama3-405b", "h100", ("parallel.ranks=512", "batch.global_batch=256", "evaluate.every_steps=0")),
}

QUICK = ("dense", "experts", "cp")


def told(candidate: search.Candidate) -> tuple[Any, ...]:
    setup = candidate.setup
    return (*search._identity(setup), setup.options.schedule, setup.options.recompute)


def exhaustive(setup: Setup) -> list[search.Candidate]:
    """Every layout by itself, exactly."""
    found = []
    for option in search._layouts(setup):
        if search._illegal(option):
            continue
        for policy in search.RECOMPUTES:
            tried = Setup(config=option.config, profile=option.profile, options=option.with_recompute(policy).options)
            peak = max(rank.total for rank in memory.all_ranks(tried, aligned=False))
            if peak <= tried.profile.memory_bytes:
                found.append(search.Candidate(tried, clock.step(tried, exact=False), float(peak)))
                break
    return found


@pytest.mark.parametrize("case", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_the_ranking_is_that_of_every_layout_asked_by_itself(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, hardware, overrides = CASES[case]
    config = load(str(ROOT / "configs" / f"{name}.toml"), overrides)
    setup = Setup(config=config, profile=profile.load(hardware), options=options_of(config))
    found = search.search(setup).fitting
    placement.path.cache_clear()
    monkeypatch.setattr(placement, "_levels", lambda *_, **__: None)  # hop by hop
    one_by_one = exhaustive(setup)
    placement.path.cache_clear()
    assert {told(candidate) for candidate in found} == {told(candidate) for candidate in one_by_one}
    alone = {told(candidate): candidate for candidate in one_by_one}
    for candidate in found:
        other = alone[told(candidate)]
        assert candidate.tokens_per_s == pytest.approx(other.tokens_per_s, rel=1e-9)
        assert candidate.peak == pytest.approx(other.peak, rel=1e-9)
    rates = [alone[told(candidate)].tokens_per_s for candidate in found]
    assert all(first >= second * (1 - 1e-8) for first, second in pairwise(rates))


OWN = {
    "a micro-batch of its own": ("TP2 x CP1 x PP1 x DP32 = 64, is number", ("batch.micro_batch=8",)),
    "virtual stages of its own": (
        "TP2 x CP1 x PP4 x DP8 = 64, is number",
        ("parallel.pp=4", "parallel.schedule=interleaved", "parallel.virtual_stages=4"),
    ),
    "another schedule": ("TP2 x CP1 x PP2 x DP16 = 64, is number", ("parallel.pp=2", "parallel.schedule=gpipe")),
    "cuts of its own": ("TP2 x CP1 x PP2 x DP16 = 64, is number", ("parallel.pp=2", "parallel.layer_counts=[17, 15]")),
    "too large": (
        "TP2 x CP1 x PP1 x DP32 = 64, does not fit: with micro-batches of 16 sequences pipeline rank 0 needs",
        ("batch.micro_batch=16",),
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_the_config_s_own_layout_is_always_tried_and_why_it_does_not_fit_is_said(case: str) -> None:
    """It was one of micro-batches of 1, 2 and 4 and three schedules, or "not among those that fit"."""
    said, overrides = OWN[case]
    config = load(str(ROOT / "configs" / "llama3-8b.toml"), ("parallel.tp=2", *overrides))
    setup = Setup(config=config, profile=profile.load("h100"), options=options_of(config))
    (note,) = search.answer(setup).sections[-1].notes
    assert said in note
    tried = [search._identity(option) for option in search._layouts(setup)]
    assert tried.count(search._identity(setup)) == 1


def test_an_own_layout_that_is_not_legal_is_told_apart() -> None:
    config = load(str(ROOT / "configs" / "llama3-8b.toml"), ("parallel.tp=2", "parallel.pp=4", "batch.micro_batch=8"))
    asked = options_of(config, schedule="interleaved", chunks=16)
    (note,) = search.answer(Setup(config=config, profile=profile.load("h100"), options=asked)).sections[-1].notes
    assert "is not legal: interleaved: at least one layer for each virtual stage" in note
